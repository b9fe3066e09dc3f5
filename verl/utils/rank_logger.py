# SPDX-License-Identifier: Apache-2.0
"""Logging on rank 0.

    logger = get_logger(__name__)
    logger.info("checkpoint saved: path=%s step=%d seconds=%.1f", path, step, seconds)

`VERL_LOGGING_LEVEL` (default INFO) sets the level of all loggers.
"""

import logging
import os
import sys

ROOT = "verl"
FORMAT = "%(asctime)s %(levelname)s %(rank)s%(name)s: %(message)s"


def get_logger(name: str, all_ranks: bool = False) -> logging.Logger:
    """Return the logger `name`, silent on every rank but 0 unless `all_ranks`; then each names its rank."""
    _set_up_root()
    logger = logging.getLogger(name if name.split(".")[0] == ROOT else f"{ROOT}.{name}")
    if not all_ranks and not any(isinstance(one, _RankZeroOnly) for one in logger.filters):
        logger.addFilter(_RankZeroOnly())
    return logger


def rank() -> int:
    """Rank of this process; 0 outside a worker group."""
    return int(os.environ.get("RANK", "0"))


class _RankZeroOnly(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return rank() == 0


class _CurrentStderr(logging.Handler):
    """Writes to the current `sys.stderr`, so that a progress bar that replaced it is not broken up."""

    def emit(self, record: logging.LogRecord) -> None:
        record.rank = f"[rank {rank()}] " if "RANK" in os.environ else ""
        sys.stderr.write(f"{self.format(record)}\n")
        sys.stderr.flush()


def _set_up_root() -> None:
    root = logging.getLogger(ROOT)
    if any(isinstance(handler, _CurrentStderr) for handler in root.handlers):
        return
    level, levels = os.environ.get("VERL_LOGGING_LEVEL", "INFO").upper(), logging.getLevelNamesMapping()
    if level not in levels:
        raise ValueError(f"`VERL_LOGGING_LEVEL` must be one of {sorted(levels)}, got {level!r}")
    handler = _CurrentStderr()
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(level)
