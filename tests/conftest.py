# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: lets transformers be imported where torch is CPU-only and torchvision is not."""

import os

from verl.utils.cuda_builds import repair_cuda_builds

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share the cores
repair_cuda_builds()
