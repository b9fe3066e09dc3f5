# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: lets transformers be imported where torch is CPU-only and torchvision is not."""

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()
