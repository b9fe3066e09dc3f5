# SPDX-License-Identifier: Apache-2.0
"""Write a folder that trains as it is: rows, template, reward function, config and a tiny model.

    verl-init my-run                             # questions about images
    verl-init my-run --kind sft                  # conversations, for supervised fine-tuning
    verl-init my-run --model Qwen/Qwen2.5-VL-3B-Instruct

The tiny model has random weights and learns in two minutes on a CPU; with `--model` the config names that
model, and none is made. Replace the rows by your own, then the template, the reward function and the model.

Exit status: 0; 1 if the folder cannot be written; 2 if it holds something.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from verl.config.parsing import yaml_text
from verl.utils.typed_command import command_parser, command_path

TINY = "tiny-model"  # folder of the model that is made
TEMPLATE_WORDS = ["Answer", "with", "one", "word"]
BAD_INPUT = 2


@dataclass(frozen=True)
class Kind:
    """A kind of run, and what its folder says about it."""

    name: str
    task: str
    train: str
    val: str
    family: str  # of the tiny model, see `verl/models/tiny.py`
    example: str  # a real model for these rows
    steps: int
    rows: int
    val_rows: int
    word_columns: tuple[str, ...]  # whose words become tokens of the tiny model
    media: str = ""  # folder of images or videos
    prompt_length: int = 128


INIT_FILES = files("verl.cli") / "init_files"
KINDS = {
    name: Kind(name=name, **entry)
    for name, entry in yaml.safe_load((INIT_FILES / "kinds.yaml").read_text(encoding="utf-8")).items()
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("verl-init", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new or an empty folder")
    parser.add_argument("--kind", choices=KINDS, default="image", help="what the rows hold (default: image)")
    parser.add_argument("--model", metavar="NAME", help="a model's folder or hub name; default: a tiny model")
    options = parser.parse_args(arguments)
    kind, folder = KINDS[options.kind], options.folder
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise FileExistsError(f"{folder} is not empty: name a new folder, nothing is overwritten")
        if folder.exists() and not folder.is_dir():
            raise FileExistsError(f"{folder} is a file: name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_folder(folder, kind, options.model)
    except FileExistsError as error:
        sys.stderr.write(f"verl-init: {error}\n")
        return BAD_INPUT
    except OSError as error:
        sys.stderr.write(f"verl-init: {folder} cannot be written: {error}\n")
        return 1
    _say(folder, kind, commands_of(kind))
    return 0


def write_folder(folder: Path, kind: Kind, model: str | None) -> None:
    """Write everything that a run of this kind needs; without `model` also a tiny one."""
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - `--help` needs none of these

    from verl.cli.init_rows import WRITERS, write_rows  # noqa: PLC0415

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    path = str(Path(model).resolve()) if model and Path(model).is_dir() else model
    facts: dict[str, Any] = {
        "kind": kind,
        "tiny": model is None,
        "model": yaml_text(path or TINY),
        "project": yaml_text(folder.resolve().name),
        "marker": f"<{kind.name}>" if kind.media else "",
        "commands": commands_of(kind),
    }
    names = ["run.yaml.jinja", "README.md.jinja"]
    if kind.name != "sft":
        names += ["prompt.jinja", "reward.py.jinja"]
    for name in names:
        text = (INIT_FILES / name).read_text(encoding="utf-8")
        target = name if name == "prompt.jinja" else name.removesuffix(".jinja")
        (folder / target).write_text(environment.from_string(text).render(facts), encoding="utf-8")
    for number, (name, count) in enumerate(((kind.train, kind.rows), (kind.val, kind.val_rows))):
        write_rows(folder / name, WRITERS[kind.name](folder, Path(name).stem, count, number))
    if model is None:
        make_model(folder, kind)


def make_model(folder: Path, kind: Kind) -> None:
    """Make the tiny model, with the words of the rows and of the template as tokens."""
    from verl.cli.tiny_model import words_of_rows  # noqa: PLC0415
    from verl.utils.cuda_builds import repair_cuda_builds  # noqa: PLC0415

    repair_cuda_builds()
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    from verl.models.tiny import save_tiny_model  # noqa: PLC0415

    disable_progress_bar()
    words = words_of_rows([(str(folder / kind.train), column) for column in kind.word_columns])
    words += TEMPLATE_WORDS
    save_tiny_model(folder / TINY, kind.family, words=words)


def commands_of(kind: Kind) -> list[tuple[str, str]]:
    """Return the next commands in the folder, and what each does."""
    if kind.name == "sft":
        return [
            ("verl-data-check --sft config=run.yaml", "what the model will see"),
            ("verl-sft config=run.yaml", "train"),
            ("verl-view checkpoints", "curves in the browser"),
        ]
    return [
        ("verl-data-check config=run.yaml", "what the model will see"),
        ("verl-reward-check config=run.yaml", "what the reward function says"),
        ("verl-train config=run.yaml", "train"),
        ("verl-view checkpoints", "curves and every response, in the browser"),
    ]


def _say(folder: Path, kind: Kind, commands: list[tuple[str, str]]) -> None:
    split = [(*command.split(), what) for command, what in commands]
    shown = [(shlex.join([str(command_path(name)), *rest]), what) for name, *rest, what in split]
    width = max(len(command) for command, _ in shown)
    lines = [f"  {command.ljust(width)}  # {what}\n" for command, what in shown]
    sys.stdout.write(f"{folder}: {kind.task}\nnext:\n  cd {folder}\n{''.join(lines)}")
