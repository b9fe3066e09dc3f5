# SPDX-License-Identifier: Apache-2.0
"""Arguments of the quickstart's scripts, fine-tuning, and curves of a run's log."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


class Arguments(NamedTuple):
    """The command line of a script, read."""

    folder: Path  # for all that the script writes
    seed: int
    overrides: list[str]  # a.b=c, for the trainer


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser of the arguments that all scripts take."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=None, help="output folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, questions and sampling")
    return parser


def read_arguments(description: str | None, name: str) -> Arguments:
    """Read the command line of a script without options of its own."""
    arguments, overrides = make_parser(description).parse_known_args()
    return Arguments(output_folder(arguments.folder, name), arguments.seed, overrides)


def output_folder(folder: Path | None, name: str) -> Path:
    """Return the given folder, or that of a script's name."""
    return (folder or ROOT / "outputs" / "quickstart" / name).resolve()


def fine_tune(folder: Path, seed: int, steps: int, rows: tuple[Path, Path], *overrides: str) -> Path:
    """Fine-tune the model in `folder` on training rows and validation rows; return its checkpoints."""
    checkpoints = folder / "sft"
    command = [
        sys.executable, "-m", "verl.trainer.sft", f"config={HERE / 'cold_start.yaml'}",
        f"data.train_files={rows[0]}",
        f"data.val_files={rows[1]}",
        f"data.seed={seed + 1}",
        f"worker.actor.model.model_path={folder / 'model'}",
        f"trainer.save_checkpoint_path={checkpoints}",
        f"trainer.max_steps={steps}",
        "trainer.find_last_checkpoint=false",
        *overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT)
    return checkpoints


def curve(log: list[dict], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of one metric."""
    points = [(entry["step"], entry[key]) for entry in log if key in entry]
    return [step for step, _ in points], [value for _, value in points]
