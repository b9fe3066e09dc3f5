# SPDX-License-Identifier: Apache-2.0
"""Interface of a logger. To add one, register a subclass of `Logger` under its name in `trainer.logger`."""

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from verl.utils.registry import Registry

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """Description of a run for its loggers."""

    project_name: str
    experiment_name: str
    directory: Path  # also holds its checkpoints
    config: dict[str, Any] = field(default_factory=dict)  # nested plain values
    total_steps: int | None = None
    resumed_step: int | None = None  # of the checkpoint in `directory` that it continues
    console: str = "compact"  # form of the console's output: `trainer.console`


class Generation(NamedTuple):
    """One response of a validation."""

    prompt: str
    response: str
    ground_truth: str
    score: float

    def as_text(self) -> str:
        text = "\n".join(f"[{name}] {value}" for name, value in self._asdict().items())
        return text.encode(errors="replace").decode()  # a lone surrogate has no bytes


class Logger:
    """Destination of a run's metrics; the methods here do nothing. An exception costs only its own lines."""

    module: ClassVar[str] = ""  # optional package that it imports on use
    is_local: ClassVar[bool] = False  # writes at once; others get a thread, since services may hang

    def __init__(self, run: Run) -> None:
        self.run = run

    @classmethod
    def check(cls) -> None: ...  # raises what is in the way, before anything starts; not in a restart

    def log(self, metrics: Metrics, step: int) -> None: ...

    def log_generations(self, generations: Sequence[Generation], step: int) -> None: ...

    def begin_step(self, step: int) -> None: ...

    def stage(self, name: str) -> None: ...  # what the step does from now on

    def progress(self, done: int, total: int, unit: str) -> None: ...  # of the stage, such as responses

    def close(self, failed: bool = False) -> None: ...  # failed: by an exception


LOGGERS: Registry[type[Logger]] = Registry("trainer.logger")
PIP_NAMES = {"mlflow": "mlflow-skinny"}  # what to install, if its name is not the module's


def import_optional(package: str, logger: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`trainer.logger` {logger!r} needs the package {error.name}:"
            f" pip install {PIP_NAMES.get(package, error.name)}, or leave {logger!r} out of `trainer.logger`"
        ) from error


def json_line(metrics: Metrics, step: int) -> str:
    """Return a line of JSON Lines: `{"step": 3, "actor": {"pg_loss": ...}, ...}`."""
    # JSON has no NaN.
    values = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
    return json.dumps(nest({"step": step} | values)) + "\n"


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `{"a/b": 1}` into `{"a": {"b": 1}}`; a key inside of one that has a value stays flat."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *folders, leaf = key.split("/")
        if any(folder in flat for folder in accumulate(folders, "{}/{}".format)):
            nested[key] = value
        else:
            node = nested
            for folder in folders:
                node = node.setdefault(folder, {})
            node[leaf] = value
    return nested


def flatten(nested: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Undo `nest`; an empty folder stays an empty dict."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}{separator}{inner}": leaf for inner, leaf in flatten(value, separator).items()}
        else:
            flat[key] = value
    return flat
