# SPDX-License-Identifier: Apache-2.0
"""Arguments of the quickstart's scripts, fine-tuning, and curves of a run's log."""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from verl.config.files.paths import writable_folder

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
    """Return the given folder, or that of a script's name; end the script if it cannot be written."""
    try:
        return Path(writable_folder(str(folder or ROOT / "outputs" / "quickstart" / name))).resolve()
    except ValueError as error:
        raise SystemExit(f"error: `--folder` {error}") from None


def model_folder(folder: Path, kind: str) -> Path:
    """Return the folder for a model of this kind in a script's folder, without another script's model.

    `model.txt` says of which kind it is; a model that no script wrote stays.
    """
    model, note = folder / "model", folder / "model.txt"
    if note.is_file() and note.read_text() != kind:
        shutil.rmtree(model, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(kind)
    return model


def run_command(command: Sequence[str], overrides: Sequence[str] = ()) -> None:
    """Run a command; end this script with its exit status if it fails, or if it got a switch.

    No switch of the trainer, such as `--dry-run`, trains anything.
    """
    status = subprocess.run(command, cwd=ROOT).returncode
    if status or any(each.startswith("-") for each in overrides):
        raise SystemExit(status)


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
    run_command(command, overrides)
    return checkpoints


def curve(log: list[dict], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of one metric."""
    points = [(entry["step"], entry[key]) for entry in log if key in entry]
    return [step for step, _ in points], [value for _, value in points]
