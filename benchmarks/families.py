# SPDX-License-Identifier: Apache-2.0
"""Train a tiny random model of any family to name the color of a shape in an image, with the whole system.

It writes the model (`verl-tiny-model --kind`) and the quickstart's questions, and trains with
`verl.trainer.main` as `examples/quickstart/demo.yaml` says. The last line of the output is JSON: the accuracy
on held-out questions before and after, and the seconds. One color for all is right 1 time in 4.

    python3 benchmarks/families.py --kind internvl [--engine hf] [--steps 150] [--folder FOLDER] [a.b=c ...]

Exit status: 0 if the last accuracy is at least `--accuracy` (0.8), else 1.
"""

import argparse
import json
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
from transformers import AutoConfig, AutoProcessor

from verl.logger.file import read_log
from verl.models.families.interface import MediaFamily
from verl.models.families.registry import family_of
from verl.models.tiny import TINY_MODELS, save_tiny_model

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "examples" / "quickstart"
write_questions = runpy.run_path(str(QUICKSTART / "shapes.py"))["write_questions"]
ACCURACY = "val/accuracy_reward"
TRAIN, VAL = 256, 64  # questions


def prepare(folder: Path, kind: str, seed: int) -> None:
    """Write the random model and the questions, with images if the model reads them."""
    save_tiny_model(folder / "model", kind, seed=seed)
    with_images = TINY_MODELS[kind].vision is not None
    write_questions(folder, "train", TRAIN, 2 * seed + 1, with_images=with_images)
    write_questions(folder, "val", VAL, 2 * seed + 2, with_images=with_images)


def pixel_limits(model: Path) -> list[str]:
    """Return options that remove the demo's limits of pixels where they have no effect and are refused."""
    config = AutoConfig.from_pretrained(model)
    family = family_of(config)
    if not isinstance(family, MediaFamily):
        return []
    processor = AutoProcessor.from_pretrained(model)
    if not all(family.sized_by(processor, kind) for kind in family.kinds):
        return []
    return ["data.min_pixels=null", "data.max_pixels=null"]


def train(folder: Path, options: argparse.Namespace, overrides: list[str]) -> Path:
    """Run the trainer and return the folder of its checkpoints."""
    checkpoints = folder / "checkpoints"
    command = [
        sys.executable, "-m", "verl.trainer.main", f"config={QUICKSTART / 'demo.yaml'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'val.jsonl'}",
        f"data.image_dir={folder / 'images'}",
        "data.max_prompt_length=256",  # some families give a small image many tokens
        f"data.seed={options.seed + 1}",
        f"worker.rollout.seed={options.seed + 1}",
        f"worker.rollout.name={options.engine}",
        f"worker.actor.model.model_path={folder / 'model'}",
        f"worker.reward.reward_function={QUICKSTART / 'reward.py'}:compute_score",
        f"trainer.experiment_name={options.kind}",
        f"trainer.save_checkpoint_path={checkpoints}",
        "trainer.find_last_checkpoint=false",
        "trainer.logger=[console, file]",
        f"trainer.n_gpus_per_node={options.processes}",
        f"trainer.max_steps={options.steps}",
        *pixel_limits(folder / "model"),
        *overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT)
    return checkpoints


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of the benchmark, and the remaining ones for the trainer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=sorted(TINY_MODELS), required=True, help="the tiny model")
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm", help="default: vllm")
    parser.add_argument("--steps", type=int, default=150, help="default: 150")
    parser.add_argument("--processes", type=int, default=1, help="default: 1")
    parser.add_argument("--accuracy", type=float, default=0.8, help="what the run must reach (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, questions and sampling")
    parser.add_argument("--folder", type=Path, help="keeps model, questions and checkpoints")
    return parser.parse_known_args()


def main() -> int:
    options, overrides = parse_arguments()
    start = time.time()
    with tempfile.TemporaryDirectory(prefix="families-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        prepare(folder, options.kind, options.seed)
        log = read_log(train(folder, options, overrides))
    accuracies = [(entry["step"], entry[ACCURACY]) for entry in log if ACCURACY in entry]
    differences = [entry[key] for entry in log if (key := "rollout/log_probs_diff_max") in entry]
    summary = {
        "kind": options.kind,
        "engine": options.engine,
        "before": accuracies[0][1],
        "after": accuracies[-1][1],
        "steps": accuracies[-1][0],
        "largest_log_prob_difference": max(differences, default=None),
        "seconds": round(time.time() - start, 1),
    }
    print(json.dumps(summary))
    return 0 if summary["after"] >= options.accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
