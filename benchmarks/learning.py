# SPDX-License-Identifier: Apache-2.0
"""Check that each advantage estimator and each policy loss learns, in a tiny run on CPU for each name.

    python benchmarks/learning.py [--only grpo loss/sapo] [--seeds 1 2] [--keep-table] [a.b=c ...]

Model (0.6 million random weights) and text questions are those of the quickstart. A response has at most
three tokens; each token that names the right color earns a third (`learning_reward.py`). Estimators run with
the loss `default`, losses with the estimator that they are designed for, or `reinforce_plus_plus_baseline`.
The learning rate is constant, and each step has two updates, so that the ratio of a loss is not always one.

Each run must raise the mean reward by at least `MIN_RISE` from the first step, which the untrained policy
samples, to the last steps. The rows of successful runs are written to `docs/algorithms.md` between two
markers; other rows are unchanged. The last line of the output is JSON. The exit status is 1 if a run failed
or did not learn.
"""

import argparse
import json
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
from verl.algorithms.advantages import ADV_ESTIMATORS
from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.logger.file import read_log
from verl.models.tiny import save_tiny_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
QUICKSTART = ROOT / "examples" / "quickstart"
TABLE = ROOT / "docs" / "algorithms.md"
FOLDER = ROOT / "outputs" / "learning"

MIN_RISE = 0.2  # of the mean reward; one color for all questions earns 0.325, any color 0.1
WINDOW = 3  # number of last steps that are averaged
RESPONSE_LENGTH = 3  # tokens
BEGIN, END = "<!-- benchmarks/learning.py writes from here -->", "<!-- to here -->"
HEADER = (
    "| run | options | reward, first step | last steps | held-out, before | after | seeds | seconds |",
    "|---|---|---|---|---|---|---|---|",
)

COMMON = (
    "algorithm.disable_kl=true",
    "data.val_batch_size=-1",
    "data.num_workers=0",
    f"data.max_response_length={RESPONSE_LENGTH}",
    "worker.actor.global_batch_size=8",
    "worker.actor.entropy_coef=0.01",
    "worker.actor.optim.lr=2e-3",
    "worker.actor.optim.lr_scheduler_type=constant",
    f"worker.reward.reward_function={HERE / 'learning_reward.py'}:compute_score",
    f"worker.reward.reward_function_kwargs={{times: {RESPONSE_LENGTH}}}",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[file]",
    "trainer.val_freq=-1",
    "trainer.val_generations_to_log=0",
    "trainer.find_last_checkpoint=false",
)
# The value model and the process reward model start from random weights, too; {model} is the policy's folder.
CRITIC = (
    "worker.critic.model.model_path={model}",
    "worker.critic.global_batch_size=8",
    "worker.critic.micro_batch_size_per_device_for_update=128",
    "worker.critic.micro_batch_size_per_device_for_experience=128",
    "worker.critic.optim.lr=2e-3",
    "worker.critic.optim.weight_decay=0.0",
    "worker.critic.fsdp.mp_param_dtype=fp32",
)
PRIME = (
    "worker.prime.global_batch_size=16",
    "worker.prime.micro_batch_size_per_device_for_update=128",
    "worker.prime.micro_batch_size_per_device_for_experience=128",
    "worker.prime.optim.lr=1e-4",
    "worker.prime.fsdp.mp_param_dtype=fp32",
)
SEQUENCES = "worker.actor.loss_avg_mode=seq"
# Whitened advantages are about one from the start, even while rewards are small: without a larger bonus, the
# policy settles on one color.
WHITENED = "worker.actor.entropy_coef=0.1"
BASELINE = ("algorithm.adv_estimator=reinforce_plus_plus_baseline", WHITENED)


def bounds(low: float, high: float) -> tuple[str, str]:
    """Return the options that bound the ratio."""
    return f"worker.actor.clip_ratio_low={low}", f"worker.actor.clip_ratio_high={high}"


OPTIONS: dict[str, tuple[str, ...]] = {  # of a run, in addition to its name; options of models are in MODELS
    "estimator/gae": (WHITENED,),
    "estimator/gdpo": (
        WHITENED,
        "algorithm.gdpo_reward_keys=[accuracy, format]",
        "algorithm.norm_adv_by_std=true",
    ),
    "estimator/grpo_passk": (
        "algorithm.norm_adv_by_std=true",
        "worker.rollout.n=4",  # one response of a group has a gradient
        "data.rollout_batch_size=64",
        "worker.actor.global_batch_size=32",
    ),
    "estimator/prime": (WHITENED, "algorithm.prime_norm=false"),
    "estimator/reinforce_plus_plus": (WHITENED,),
    "estimator/reinforce_plus_plus_baseline": (WHITENED,),
    "estimator/turn_gae": (WHITENED,),
    "loss/default": BASELINE,
    "loss/gspo": (*BASELINE, SEQUENCES, *bounds(3e-2, 4e-2)),
    "loss/gspo_token": (*BASELINE, SEQUENCES, *bounds(3e-2, 4e-2)),
    "loss/cispo": (*BASELINE, *bounds(1.0, 4.0)),
    "loss/sapo": (*BASELINE, SEQUENCES),
    "loss/geo_mean": (*BASELINE, SEQUENCES, *bounds(0.4, 0.4)),
    "loss/clip_cov": (*BASELINE, "worker.actor.clip_cov_ratio=0.02"),
    "loss/kl_cov": (*BASELINE, "worker.actor.kl_cov_ratio=0.02", "worker.actor.ppo_kl_coef=1.0"),
    "loss/gpg": ("algorithm.adv_estimator=gpg",),
    "loss/dppo_tv": BASELINE,
    "loss/dppo_kl": (*BASELINE, *bounds(0.05, 0.05)),
    "loss/dro": (*BASELINE, "worker.actor.dro_beta=0.1"),
    "loss/sppo": ("algorithm.adv_estimator=sppo", SEQUENCES),
}
MODELS = {"estimator/gae": CRITIC, "estimator/turn_gae": CRITIC, "estimator/prime": PRIME}


@dataclass(frozen=True)
class Case:
    """One run: the registered name that it tests, and its options."""

    name: str  # `estimator/grpo`, `loss/sapo`
    options: tuple[str, ...]  # listed in the table
    models: tuple[str, ...]  # options of further models

    def arguments(self, folder: Path, output: Path, steps: int, seed: int) -> list[str]:
        """Return the arguments of the trainer; data and model are in `folder`, the run writes to `output`."""
        model = folder / "model"
        return [
            f"config={QUICKSTART / 'demo.yaml'}",
            f"data.train_files={folder / 'train.jsonl'}",
            f"data.val_files={folder / 'val.jsonl'}",
            f"worker.actor.model.model_path={model}",
            *COMMON,
            *(option.format(model=model) for option in self.models),
            *self.options,
            f"data.seed={seed}",
            f"worker.rollout.seed={seed}",
            f"trainer.max_steps={steps}",
            f"trainer.save_checkpoint_path={output}",
        ]


class Outcome(NamedTuple):
    """The result of a run."""

    first: float  # mean reward of the first step
    last: float  # ... of the last steps
    before: float  # held-out accuracy before training
    after: float
    seconds: float

    @property
    def has_learned(self) -> bool:
        return self.last - self.first >= MIN_RISE


def all_cases() -> list[Case]:
    """List a run for each registered estimator and each registered loss."""
    kinds = {"estimator": ADV_ESTIMATORS, "loss": POLICY_LOSSES}
    cases = []
    for kind, registry in kinds.items():
        for registered in registry.names():
            name = f"{kind}/{registered}"
            options = (f"{registry.option}={registered}", *OPTIONS.get(name, ()))
            cases.append(Case(name, options, MODELS.get(name, ())))
    return cases


def chosen_cases(only: Sequence[str]) -> list[Case]:
    """Return the cases with these names, with or without their kind; all cases for no names."""
    cases = all_cases()
    names = {name for case in cases for name in (case.name, case.name.partition("/")[2])}
    if unknown := sorted(set(only) - names):
        raise SystemExit(f"no run named {', '.join(unknown)}; there are {', '.join(sorted(names))}")
    return [case for case in cases if not only or {case.name, case.name.partition("/")[2]} & set(only)]


def prepare(folder: Path) -> None:
    """Write the random model, 256 training questions and 64 held-out ones."""
    write_questions = runpy.run_path(str(QUICKSTART / "shapes.py"))["write_questions"]
    save_tiny_model(folder / "model", "qwen2")
    write_questions(folder, "train", 256, seed=1, with_images=False)
    write_questions(folder, "val", 64, seed=2, with_images=False)


def run(case: Case, folder: Path, steps: int, seed: int, overrides: Sequence[str]) -> Outcome:
    """Run the trainer and read its log."""
    output = folder / case.name.replace("/", "_") / f"seed{seed}"
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "verl.trainer.main", *case.arguments(folder, output, steps, seed)]
    start = time.time()
    finished = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.time() - start
    if finished.returncode:
        raise RuntimeError(f"{finished.stdout[-1000:]}\n{finished.stderr[-4000:]}")

    log = read_log(output)
    rewards = [entry["reward/overall"] for entry in log if "reward/overall" in entry]
    accuracies = [entry["val/accuracy_reward"] for entry in log if "val/accuracy_reward" in entry]
    return Outcome(rewards[0], fmean(rewards[-WINDOW:]), accuracies[0], accuracies[-1], seconds)


def row(case: Case, outcomes: Sequence[Outcome], seeds: Sequence[int]) -> str:
    """Return a row of the table, with means over the seeds."""
    means = [fmean(values) for values in zip(*outcomes, strict=True)]
    options = " ".join(f"`{option.partition('.')[2]}`" for option in case.options)
    numbers = " | ".join(f"{mean:.2f}" for mean in means[:4])
    return f"| {case.name} | {options} | {numbers} | {' '.join(map(str, seeds))} | {means[4]:.0f} |"


def write_rows(path: Path, rows: dict[str, str]) -> None:
    """Insert rows into the table of a Markdown file, in the order of the cases; keep its other rows.

    Raises:
        ValueError: The file has no markers for the table.
    """
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path} must hold the lines {BEGIN!r} and {END!r}, between which the table goes")
    head, _, rest = text.partition(BEGIN)
    old, _, tail = rest.partition(END)
    known = {line.split(" ")[1]: line for line in old.splitlines() if re.match(r"\| \w+/", line)}
    known |= rows
    lines = [known[case.name] for case in all_cases() if case.name in known]
    table = "\n".join((*HEADER, *lines))
    path.write_text(f"{head}{BEGIN}\n\n{table}\n\n{END}{tail}")


def main() -> int:
    """Run the chosen cases one after the other; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names to run (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="one run per seed")
    parser.add_argument("--steps", type=int, default=30, help="steps per run")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="output folder")
    parser.add_argument("--keep-table", action="store_true", help="do not update docs/algorithms.md")
    arguments, overrides = parser.parse_known_args()
    cases = chosen_cases(arguments.only)
    folder = arguments.folder.resolve()
    prepare(folder)

    problems = []
    for case in cases:
        try:
            outcomes = [run(case, folder, arguments.steps, seed, overrides) for seed in arguments.seeds]
        except RuntimeError as error:
            problems.append(case.name)
            print(f"{case.name} failed:\n{error}", flush=True)
            continue
        line = row(case, outcomes, arguments.seeds)
        print(line, flush=True)
        if all(outcome.has_learned for outcome in outcomes):
            if not arguments.keep_table:
                write_rows(TABLE, {case.name: line})
        else:
            problems.append(case.name)
            print(f"{case.name} did not learn: the reward must rise by {MIN_RISE}", flush=True)
    print(json.dumps({"runs": len(cases), "problems": problems}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
