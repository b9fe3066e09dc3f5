# SPDX-License-Identifier: Apache-2.0
"""Log files next to the checkpoints, and their reader.

    experiment_config.json   the resolved config; that of an earlier start becomes experiment_config.1.json
    experiment_log.jsonl     one line per step: {"step": 3, "actor": {"pg_loss": ...}, ...}
    generations.log          validation responses

A resumed run appends to the same files. Steps that it repeats appear twice; the later line counts. A run that
starts at step 0 renames the logs of an earlier one to `experiment_log.1.jsonl` and `generations.1.log`.
"""

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.logger.base import LOGGERS, Generation, Logger, Metrics, Run, flatten, json_line

CONFIG_FILE = "experiment_config.json"
METRICS_FILE = "experiment_log.jsonl"
GENERATIONS_FILE = "generations.log"


@LOGGERS.register("file")
class FileLogger(Logger):
    """Writes to the run's folder; every line is on disk when `log` returns."""

    is_local = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        try:
            run.directory.mkdir(parents=True, exist_ok=True)
            _write_config(run.directory, run.config)
            log = run.directory / METRICS_FILE
            for old in (log, run.directory / GENERATIONS_FILE):
                if run.resumed_step is None and old.exists():
                    _set_aside(old)
            # A run that was killed while writing leaves an incomplete line.
            if log.exists() and not log.read_bytes().endswith(b"\n") and log.stat().st_size:
                _append(log, "\n")
        except OSError as error:
            problem = f"`trainer.save_checkpoint_path`: cannot write to {run.directory}: {error}"
            raise type(error)(problem) from error

    def log(self, metrics: Metrics, step: int) -> None:
        _append(self.run.directory / METRICS_FILE, json_line(metrics, step))

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        for generation in generations:
            text = f"[step] {step}\n{generation.as_text()}\n\n"
            _append(self.run.directory / GENERATIONS_FILE, text)


def read_log(directory: Path) -> list[dict[str, Any]]:
    """Read the log of a `FileLogger`: one `{"step": 3, "actor/pg_loss": ...}` per step, in order."""
    steps: dict[int, dict[str, Any]] = {}
    for line in (directory / METRICS_FILE).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            flat = flatten(entry) if isinstance(entry, dict) else {}
        except (ValueError, RecursionError):
            continue  # the run was killed while writing, or the line is damaged
        if isinstance(flat.get("step"), int):
            steps.setdefault(flat["step"], {}).update(flat)
    return [steps[step] for step in sorted(steps)]


def _write_config(directory: Path, config: dict[str, Any]) -> None:
    path = directory / CONFIG_FILE
    text = json.dumps(config, indent=2, default=str) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    partial = path.with_suffix(".tmp")
    try:
        partial.write_text(text, encoding="utf-8")
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if path.exists():
        _set_aside(path)
    partial.rename(path)


def _set_aside(path: Path) -> None:
    """Rename a file of an earlier start to `NAME.1.SUFFIX`, or the next number."""
    number = len(list(path.parent.glob(f"{path.stem}.*{path.suffix}"))) + 1
    path.rename(path.with_name(f"{path.stem}.{number}{path.suffix}"))


def _append(path: Path, text: str) -> None:
    """Append a text whole; a full disk leaves the file as it was."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        content = text.encode()
        try:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(size)
            raise
