# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning for language, vision-language and video models."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from verl.utils.cuda_builds import warn_if_broken
from verl.utils.quiet import quiet_packages

if TYPE_CHECKING:
    from verl.api import TrainingResult, build, evaluate, train
    from verl.config.ppo import PPOConfig
    from verl.config.schema import ConfigError
    from verl.config.sft import SFTConfig
    from verl.trainer.evaluation.report import Evaluation

__version__ = "0.1.0"
__all__ = [
    "ConfigError", "Evaluation", "PPOConfig", "SFTConfig", "TrainingResult", "__version__", "build",
    "evaluate", "train",
]  # fmt: skip

_HOMES = {  # imported when they are used, since most processes that import this package use none of them
    "ConfigError": "verl.config.schema",
    "Evaluation": "verl.trainer.evaluation.report",
    "PPOConfig": "verl.config.ppo",
    "SFTConfig": "verl.config.sft",
    "TrainingResult": "verl.api",
    "build": "verl.api",
    "evaluate": "verl.api",
    "train": "verl.api",
}

quiet_packages()
if "transformers" in sys.modules:
    warn_if_broken()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
