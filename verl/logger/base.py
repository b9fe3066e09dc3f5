# SPDX-License-Identifier: Apache-2.0
"""What a logger is. To add one: a subclass of `Logger`, registered under its name in `trainer.logger`.

console.py    progress on a terminal, lines elsewhere
file.py       the run's folder
services.py   tensorboard, wandb, swanlab, mlflow
tracker.py    all loggers of a run as one
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from verl.utils.registry import Registry

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """What loggers know of a run."""

    project_name: str
    experiment_name: str
    directory: Path  # where its checkpoints are, too
    config: dict[str, Any] = field(default_factory=dict)  # nested plain values
    total_steps: int | None = None


class Generation(NamedTuple):
    """One response of a validation."""

    prompt: str
    response: str
    ground_truth: str
    score: float


class Logger:
    """Where the metrics of a run go; by default nowhere.

    Attributes:
        module: What it imports when it is asked for, which not every installation has; "" for nothing.
    """

    module: ClassVar[str] = ""

    def __init__(self, run: Run) -> None:
        self.run = run

    def log(self, metrics: Metrics, step: int) -> None:
        """Log the metrics of a step."""

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Log responses of the validation at a step."""

    def begin_step(self, step: int) -> None:
        """A step begins."""

    def stage(self, name: str) -> None:
        """The step is doing this from now on."""

    def progress(self, done: int, total: int, unit: str) -> None:
        """The stage has done so many of its units (responses, micro-batches)."""

    def close(self, failed: bool = False) -> None:
        """The run is over; `failed` if an exception ended it."""


LOGGERS: Registry[type[Logger]] = Registry("trainer.logger")


def import_optional(package: str, logger: str) -> ModuleType:
    """Import what one logger needs and a run without that logger does not."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`trainer.logger` {logger!r} needs the package {error.name}: pip install 'verl[{logger}]'"
        ) from error


def nest(flat: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Turn `{"a/b": 1}` into `{"a": {"b": 1}}`; a key that is both a value and a folder stays flat."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *folders, leaf = key.split(separator)
        node: Any = nested
        for folder in folders:
            node = node.setdefault(folder, {}) if isinstance(node, dict) else None
        if isinstance(node, dict) and leaf not in node:
            node[leaf] = value
        else:
            nested[key] = value
    return nested


def flatten(nested: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """The inverse of `nest`; an empty folder stays as an empty dict."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}{separator}{inner}": leaf for inner, leaf in flatten(value, separator).items()}
        else:
            flat[key] = value
    return flat
