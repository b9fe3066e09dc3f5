# SPDX-License-Identifier: Apache-2.0
"""The log that lies beside the checkpoints, and its reader.

    experiment_config.json   the resolved config; an earlier start's is kept as experiment_config.1.json
    experiment_log.jsonl     one line for each step: {"step": 3, "actor": {"pg_loss": ...}, ...}
    generations.log          validation responses

A resumed run goes on in the same files. Steps that it repeats stand there twice; the later line counts.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.logger.base import LOGGERS, Generation, Logger, Metrics, Run, flatten, nest

CONFIG_FILE = "experiment_config.json"
METRICS_FILE = "experiment_log.jsonl"
GENERATIONS_FILE = "generations.log"


@LOGGERS.register("file")
class FileLogger(Logger):
    """Writes to the run's folder; every line is on disk when `log` returns."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        try:
            run.directory.mkdir(parents=True, exist_ok=True)
            _write_config(run.directory, run.config)
            _end_last_line(run.directory / METRICS_FILE)
        except OSError as error:
            raise type(error)(
                f"`trainer.save_checkpoint_path`: cannot write to {run.directory}: {error}"
            ) from error

    def log(self, metrics: Metrics, step: int) -> None:
        """Append one line."""
        values = {
            key: value if math.isfinite(value) else None for key, value in metrics.items()
        }  # JSON has no nan
        _append(self.run.directory / METRICS_FILE, json.dumps({"step": step} | nest(values)) + "\n")

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Append each response with its prompt, ground truth and score."""
        for generation in generations:
            fields = {"step": step, **generation._asdict()}
            text = "\n".join(f"[{name}] {value}" for name, value in fields.items())
            _append(self.run.directory / GENERATIONS_FILE, f"{text}\n\n")


def read_log(directory: Path) -> list[dict[str, Any]]:
    """Read what `FileLogger` wrote: for each step, in order, `{"step": 3, "actor/pg_loss": ...}`.

    Of a step that was logged twice, because a run resumed before it, the later line counts for each metric.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in (directory / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # a run was killed while it wrote
        steps.setdefault(entry["step"], {}).update(flatten(entry))
    return [steps[step] for step in sorted(steps)]


def _write_config(directory: Path, config: dict[str, Any]) -> None:
    path = directory / CONFIG_FILE
    text = json.dumps(config, indent=2, default=str) + "\n"
    if path.exists():
        if path.read_text(encoding="utf-8") == text:
            return
        path.rename(
            directory / f"experiment_config.{len(list(directory.glob('experiment_config.*.json'))) + 1}.json"
        )
    path.write_text(text, encoding="utf-8")


def _end_last_line(path: Path) -> None:
    """Begin on a new line after a run that was killed while it wrote."""
    if path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size:
        _append(path, "\n")


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
