# SPDX-License-Identifier: Apache-2.0
r"""Compute what an early stop of prompts saves and costs, for solve rates of three kinds of data.

    python benchmarks/early_stop.py --n 16

A response is right with its prompt's solve rate, and a filter keeps prompts with right and wrong responses.
All numbers are expectations, computed without sampling.
"""

import argparse
import json
from typing import NamedTuple

import numpy as np

RATES = (np.arange(4000) + 0.5) / 4000  # of prompts that are solved more or less often, evenly
DATA = {
    "even": RATES,
    "hard": RATES**4,
    "80 % never or always": np.concatenate([np.zeros(8000), np.ones(8000), RATES]),
}


class Costs(NamedTuple):
    """Numbers relative to a filter without a stop."""

    responses: float  # sampled for a prompt
    gain: float  # effective groups for each response


def costs(rates: np.ndarray, n: int, after: int, keep_probability: float) -> Costs:
    """Compute the costs of stopping after `after` of `n` responses, for prompts with solve rates (P,)."""
    early = 1 - rates**after - (1 - rates) ** after  # chance of both kinds among the first, (P,)
    kept = 1 - rates**n - (1 - rates) ** n  # among all, (P,)
    late = (kept - early).mean()
    sampled_on = early.mean() + keep_probability * (1 - early.mean())
    responses = (after + (n - after) * sampled_on) / n
    # sums of weights, and of their squares, of the groups that are trained on
    total, squares = early.mean() + late, early.mean() + late / keep_probability
    return Costs(responses, total / squares / responses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--n", type=int, default=16, help="responses to a prompt")
    arguments = parser.parse_args()
    results = []
    print("solve rates           after  keep  responses  gain")
    for name, rates in DATA.items():
        for after in (arguments.n // 4, arguments.n // 2):
            for keep_probability in (0.25, 0.5, 0.75):
                found = costs(rates, arguments.n, after, keep_probability)
                numbers = f"{after:5d}  {keep_probability:4.2f}  {found.responses:9.2f}  {found.gain:4.2f}"
                print(f"{name:21s} {numbers}")
                results.append({"rates": name, "after": after, "keep": keep_probability, **found._asdict()})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
