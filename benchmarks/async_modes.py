# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of whole runs in each mode of `trainer.async`, with long-tailed lengths.

    python benchmarks/async_modes.py [--rounds 3] [--steps 12] [--modes off stream] [a.b=c ...]

The policy is a Markov chain: attention and MLPs run but add nothing, and the head gives each token the
probabilities of the next. A tenth of the responses has a mean of 320 tokens and may have 480, the others have
a mean of 24. All modes train on the same number of prompts in the same number of steps, on two CPU processes
with a thread each: two that sample and train in turn, or one of each. The modes run in turns; figures are
medians over the rounds.

From the runs with `off` alone the simulation of `--dry-run` predicts the other modes: a decoding step takes
a constant and a time for each response, fitted to the seconds of all rollouts, and one process trains half as
fast as two. The last line is JSON.
"""

import argparse
import json
import math
import os
import random
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from verl.logger.file import read_log
from verl.models.tiny import save_tiny_model
from verl.planning.speed.simulation import Costs, SimulatedWork, simulate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
QUICKSTART = ROOT / "examples" / "quickstart"
FOLDER = ROOT / "outputs" / "async_modes"

LONG_SHARE, SHORT_MEAN, LONG_MEAN, LONGEST = 0.1, 24, 320, 480  # of the responses; in tokens
PROMPTS, RESPONSES, THRESHOLD = 8, 8, 4  # of a step, to a prompt, in updates
CODE = 8.0  # of a token's kind in the embedding; the norm makes it the square root of the width
NEVER = -30.0  # logit of a token that is not sampled
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8}
OWN = ("worker.hybrid_engine=false", "trainer.n_gpus_for_rollout=1", "trainer.n_gpus_per_node=1")
STALENESS = f"trainer.async.staleness_threshold={THRESHOLD}"
MODES: dict[str, tuple[str, ...]] = {
    "off": ("trainer.n_gpus_per_node=2",),
    "one_step_off": (*OWN, "trainer.async.mode=one_step_off"),
    "stream": (*OWN, "trainer.async.mode=stream", STALENESS),
    "partial": ("trainer.n_gpus_per_node=2", "trainer.async.mode=partial", STALENESS),
}
COMMON = (
    f"data.max_response_length={LONGEST}",
    f"data.rollout_batch_size={PROMPTS}",
    f"worker.rollout.n={RESPONSES}",
    f"worker.actor.global_batch_size={PROMPTS}",
    "worker.actor.micro_batch_size_per_device_for_update=16",
    "worker.actor.micro_batch_size_per_device_for_experience=16",
    "worker.actor.entropy_coef=0.0",
    "worker.actor.optim.lr=1e-12",
    f"worker.reward.reward_function={HERE / 'bench_reward.py'}:compute_score",
    "trainer.logger=[file]",
    "trainer.val_freq=-1",
    "trainer.val_before_train=false",
    "trainer.val_generations_to_log=0",
    "trainer.find_last_checkpoint=false",
)


class Step(NamedTuple):
    """A logged step; seconds of its whole, of sampling and of sending weights, and tokens of responses."""

    seconds: float
    sampling: float
    sync: float
    tokens: float
    longest: float


def save_chain(folder: Path) -> None:
    """Write a model whose next token depends on the last one only."""
    save_tiny_model(folder, "qwen2", **SHAPE, tie_word_embeddings=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    short, long = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embedding = weights["model.embed_tokens.weight"].zero_()  # (V, H)
    embedding[:, 0] = CODE  # the kind of every other token
    embedding[[short, long], 0] = 0.0
    embedding[short, 1] = embedding[long, 2] = CODE
    chances = [  # of the next token, by the kind of the last
        {short: 1 - LONG_SHARE, long: LONG_SHARE},
        {short: 1 - 1 / SHORT_MEAN, tokenizer.eos_token_id: 1 / SHORT_MEAN},
        {long: 1 - 1 / LONG_MEAN, tokenizer.eos_token_id: 1 / LONG_MEAN},
    ]
    head = weights["lm_head.weight"].zero_()  # (V, H)
    width = math.sqrt(head.shape[-1])  # of the normed embedding
    for kind, its in enumerate(chances):
        head[:, kind] = NEVER / width
        for token, chance in its.items():
            head[token, kind] = math.log(chance) / width
    weights["model.norm.weight"] = torch.ones_like(weights["model.norm.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def run(mode: str, folder: Path, steps: int, overrides: Sequence[str]) -> list[Step]:
    """Run the trainer and read its log."""
    output = folder / mode
    shutil.rmtree(output, ignore_errors=True)
    arguments = (
        f"config={QUICKSTART / 'demo.yaml'}",
        f"data.train_files={folder / 'train.jsonl'}",
        "data.val_files=",
        f"worker.actor.model.model_path={folder / 'model'}",
        *COMMON,
        *MODES[mode],
        f"trainer.max_steps={steps}",
        f"trainer.save_checkpoint_path={output}",
    )
    command = [sys.executable, "-m", "verl.trainer.main", *arguments, *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{finished.stdout[-1000:]}\n{finished.stderr[-4000:]}")
    log = [entry for entry in read_log(output) if "perf/time_per_step" in entry]
    assert len(log) == steps, f"{len(log)} of {steps} steps"
    return [
        Step(
            entry["perf/time_per_step"],
            entry.get("timing_s/gen", 0.0),
            entry.get("timing_s/sync_weights", 0.0),
            PROMPTS * RESPONSES * entry["response_length/mean"],
            entry["response_length/max"],
        )
        for entry in log
    ]


def rate(steps: Sequence[Step]) -> float:
    """Tokens of responses per second."""
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def measured_costs(steps: Sequence[Step], engines: int) -> Costs:
    """Fit what the simulation needs to steps that sample and train in turn."""
    # the engine with the longest response makes as many steps as that has tokens
    needed = torch.tensor([[step.longest, step.tokens / engines] for step in steps])  # (S, 2)
    seconds = torch.tensor([[step.sampling] for step in steps])  # (S, 1)
    constant, each = torch.linalg.lstsq(needed, seconds).solution.flatten().tolist()
    training = fmean(step.seconds - step.sampling - step.sync for step in steps)
    return Costs(lambda running: constant + each * running, 0.0, training, fmean(step.sync for step in steps))


def predicted_rate(mode: str, costs: Costs, steps: int) -> float:
    """Simulate a run like the measured ones."""
    rng = random.Random(0)

    def length() -> float:
        mean = LONG_MEAN if rng.random() < LONG_SHARE else SHORT_MEAN
        return max(1.0, min(LONGEST, rng.expovariate(1 / mean)))

    work = SimulatedWork(PROMPTS, RESPONSES, 0.0, length, steps)
    if OWN[0] in MODES[mode]:
        return simulate(
            mode, work, replace(costs, training=2 * costs.training), engines=1, staleness=THRESHOLD
        ).rate
    return simulate(mode, work, costs, engines=2, staleness=THRESHOLD).rate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="steps of a run")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="output folder")
    arguments, overrides = parser.parse_known_args()
    folder = arguments.folder.resolve()
    save_chain(folder / "model")
    write_questions = runpy.run_path(str(QUICKSTART / "shapes.py"))["write_questions"]
    write_questions(folder, "train", 256, seed=1, with_images=False)

    measured: dict[str, list[list[Step]]] = {mode: [] for mode in arguments.modes}
    for number in range(arguments.rounds):
        for mode, rounds in measured.items():
            steps = run(mode, folder, arguments.steps, [*overrides, f"worker.rollout.seed={number}"])
            rounds.append(steps)
            tokens, seconds = sum(step.tokens for step in steps), sum(step.seconds for step in steps)
            print(
                f"{mode:13s} {seconds:6.1f} s, {tokens:6.0f} tokens, {rate(steps):5.0f} a second", flush=True
            )
    rates = {mode: median(map(rate, rounds)) for mode, rounds in measured.items()}
    predicted: dict[str, float] = {}
    if "off" in measured:
        costs = measured_costs([step for steps in measured["off"] for step in steps[1:]], engines=2)
        predicted = {mode: predicted_rate(mode, costs, arguments.steps) for mode in measured}
        constant, each = costs.decoding(0), costs.decoding(1) - costs.decoding(0)
        print(
            f"a decoding step takes {1000 * constant:.2f} ms and {1000 * each:.3f} for each response,"
            f" training {costs.training:.2f} s"
        )
    for mode, value in rates.items():
        line = f"{mode:13s} {value:6.0f} tokens/s"
        if predicted:
            line += (
                f", {value / rates['off']:.2f} x off; predicted {predicted[mode] / predicted['off']:.2f} x"
            )
        print(line)
    print(json.dumps({"measured": rates, "predicted": predicted}))


if __name__ == "__main__":
    main()
