# SPDX-License-Identifier: Apache-2.0
"""Prompts of `verl-longvideo-reason`: Jinja files and the categories, each of which a folder may replace."""

from collections.abc import Mapping
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import yaml
from jinja2.sandbox import SandboxedEnvironment

CAPTION, REASON, REWRITE, QUESTION = "caption.jinja", "reason.jinja", "rewrite.jinja", "question.jinja"
CATEGORIES = "categories.yaml"
SHIPPED = (CAPTION, REASON, REWRITE, QUESTION, CATEGORIES)
ENVIRONMENT = SandboxedEnvironment(undefined=jinja2.StrictUndefined)
SAMPLE = {  # variables of each prompt, to try it before anything is sent
    CAPTION: {"video": "a.mp4", "start": "0:00:00", "end": "0:00:10"},
    REASON: {
        "timeline": "[0:00:00 - 0:00:10] A man runs.", "duration": "0:00:10", "category": "temporal",
        "description": "What comes first.", "number": 1,
    },
    REWRITE: {
        "question": "Why?", "options": {"A": "Yes.", "B": "No."}, "answer": "A", "reasons": ["He runs."],
        "category": "temporal",
    },
    QUESTION: {"content": "<video>Why?"},
}  # fmt: skip


class Prompts:
    """The texts of the prompts: those of a folder, and the shipped ones where it has no file of the name."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def render(self, name: str, values: Mapping[str, Any]) -> str:
        """Render a prompt.

        Raises:
            ValueError: The template is wrong; the error names its file.
        """
        try:
            return ENVIRONMENT.from_string(self.text(name)).render(values).strip()
        except jinja2.TemplateError as error:
            raise ValueError(
                f"`--prompts`: {self.where(name)} cannot be rendered: {error}: it may read {sorted(values)}"
            ) from error

    def text(self, name: str) -> str:
        own = None if self.folder is None else self.folder / name
        if own is not None and own.is_file():
            return own.read_text(encoding="utf-8")
        return _shipped(name)

    def where(self, name: str) -> Path:
        return Path(name) if self.folder is None else self.folder / name

    @cached_property
    def categories(self) -> dict[str, str]:
        """Descriptions of the categories of questions, by name."""
        try:
            read = yaml.safe_load(self.text(CATEGORIES))
        except yaml.YAMLError as error:
            raise ValueError(f"`--prompts`: {self.where(CATEGORIES)} is no YAML: {error}") from error
        if not isinstance(read, dict) or not read:
            raise ValueError(f"`--prompts`: {self.where(CATEGORIES)} must map names of categories to texts")
        found = {str(name): str(text).strip() for name, text in read.items()}
        for name in found:
            if not name or name.startswith(".") or "/" in name:
                raise ValueError(
                    f"`--prompts`: {self.where(CATEGORIES)} has the category {name!r}: its name becomes that"
                    " of a file, so it must not be empty, begin with a dot or have a slash"
                )
        return found

    def check(self) -> None:
        """Raise a ValueError unless every prompt can be rendered."""
        if self.folder is not None and not self.folder.is_dir():
            raise ValueError(f"`--prompts` ({self.folder}) must be a folder, which `--write-prompts` makes")
        if self.folder is not None and not any((self.folder / name).is_file() for name in SHIPPED):
            raise ValueError(f"`--prompts` ({self.folder}) has none of the files {', '.join(SHIPPED)}")
        for name, values in SAMPLE.items():
            if not self.render(name, values):
                raise ValueError(f"`--prompts`: {self.where(name)} renders nothing")
        if "<video>" not in self.render(QUESTION, SAMPLE[QUESTION]):
            raise ValueError(f"`--prompts`: {self.where(QUESTION)} must keep the <video> marker of `content`")
        _ = self.categories


def _shipped(name: str) -> str:
    return (files("verl_longvideo") / "prompt_files" / name).read_text(encoding="utf-8")


def write_prompts(folder: Path) -> None:
    """Copy the shipped prompts into a folder, to change them.

    Raises:
        FileExistsError: One of the files is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken = [name for name in SHIPPED if (folder / name).exists()]
    if taken:
        raise FileExistsError(f"`--write-prompts` ({folder}) has {', '.join(taken)}: nothing is overwritten")
    for name in SHIPPED:
        (folder / name).write_text(_shipped(name), encoding="utf-8")
