# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning for language, vision-language and video models."""

import sys

from verl.utils.cuda_builds import warn_if_broken
from verl.utils.quiet import quiet_packages

__version__ = "0.1.0"

quiet_packages()
if "transformers" in sys.modules:
    warn_if_broken()
