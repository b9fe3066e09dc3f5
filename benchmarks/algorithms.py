# SPDX-License-Identifier: Apache-2.0
"""Time of each advantage estimator on a rollout batch, relative to a masked sum over it, on CPU.

    python benchmarks/algorithms.py [--rows 8192 --tokens 4096] [--group 8] [--rounds 3]

Each figure is the best of the rounds. The masked sum is timed again before each run, so that other load on
the machine affects both. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from verl.algorithms.advantages import ADV_ESTIMATORS, AdvantageInputs
from verl.utils.masking import masked_sum

MAX_RATIO = 3.0  # limit for estimators that are not in OVER_TIME
TURNS = 8  # of the longest responses
OVER_TIME = (  # recursions or several sums over time; no limit applies
    *("gae", "optimal_token_baseline", "prime", "reinforce_plus_plus, gamma 0.99"),
    *("tir_optimal_token_baseline", "turn_gae", "turn_grpo"),
)


def make_inputs(rows: int, tokens: int, group: int) -> AdvantageInputs:
    """Build a batch with all inputs of the estimators: responses of all lengths, a reward on each token."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    mask = (torch.arange(tokens) < lengths).long()  # (B, R)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    return AdvantageInputs(
        token_level_rewards=uniform(rows, tokens),
        response_mask=mask,
        group_ids=torch.arange(rows) // group,
        lam=0.95,
        values=uniform(rows, tokens),
        reward_baselines=uniform(rows),
        reward_components=uniform(rows, 3),
        log_probs=-uniform(rows, tokens),
        sum_squared_probs=uniform(rows, tokens),
        importance_weights=uniform(rows, tokens),
        process_rewards=uniform(rows, tokens) - 0.5,
        accuracies=uniform(rows).round(),
        turn_ids=(torch.arange(tokens) * TURNS // tokens).expand(rows, tokens),
    )


def cases(inputs: AdvantageInputs) -> dict[str, Callable[[], object]]:
    """List what is timed: each estimator, and `reinforce_plus_plus` also with discounting, a slower case."""
    timed = {name: lambda name=name: ADV_ESTIMATORS[name](inputs) for name in ADV_ESTIMATORS}
    discounted = replace(inputs, gamma=0.99)
    timed["reinforce_plus_plus, gamma 0.99"] = lambda: ADV_ESTIMATORS["reinforce_plus_plus"](discounted)
    return dict(sorted(timed.items()))


def milliseconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1e3


def measure(inputs: AdvantageInputs, rounds: int) -> dict[str, dict[str, float]]:
    """Time each case `rounds` times, alternating with the masked sum."""

    def reference() -> torch.Tensor:
        return masked_sum(inputs.token_level_rewards, inputs.response_mask)

    results = {}
    for name, function in cases(inputs).items():
        pairs = [(milliseconds(reference), milliseconds(function)) for _ in range(rounds)]
        base, spent = (min(column) for column in zip(*pairs, strict=True))
        results[name] = {
            "ms": round(spent, 1),
            "masked_sum_ms": round(base, 1),
            "ratio": round(spent / base, 2),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    results = measure(make_inputs(args.rows, args.tokens, args.group), args.rounds)
    threads = torch.get_num_threads()
    print(f"{'':34}{'ms':>9}{'ratio':>8}   {args.rows} x {args.tokens} tokens, {threads} threads")
    for name, result in results.items():
        note = "over time" if name in OVER_TIME else "" if result["ratio"] <= MAX_RATIO else "above 3"
        print(f"{name:34}{result['ms']:9.1f}{result['ratio']:8.2f}   {note}")
    print(json.dumps({"rows": args.rows, "tokens": args.tokens, "threads": threads, **results}))


if __name__ == "__main__":
    main()
