# SPDX-License-Identifier: Apache-2.0
"""Reinforcement-learning training of language and vision-language models."""

from verl.utils.quiet import quiet_torchao
from verl.utils.torchvision_ops import install

__version__ = "0.1.0"

quiet_torchao()
install()  # acts when torchvision, torchaudio or torchcodec is imported beside a CPU-only torch
