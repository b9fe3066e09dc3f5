# SPDX-License-Identifier: Apache-2.0
"""Page-locked host memory: a GPU copies from and to it without an intermediate buffer."""

import weakref
from typing import Any

import torch
from torch import Tensor

from verl.distributed.backends import USUAL_GPU
from verl.distributed.device import module_of

PAGE = 4096


def host_buffer(num_bytes: int, device: torch.device, owner: Any) -> Tensor:
    """Allocate bytes in host memory, page-locked for devices of CUDA until `owner` is gone."""
    if device.type != USUAL_GPU:
        return torch.empty(num_bytes, dtype=torch.uint8)
    # torch's own page-locked memory comes in powers of two, which would waste up to half of it.
    whole = torch.empty(-(-num_bytes // PAGE) * PAGE + PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    part = whole[start : start + -(-num_bytes // PAGE) * PAGE]  # shares no page with other memory
    runtime = module_of(USUAL_GPU).cudart()
    code = int(runtime.cudaHostRegister(part.data_ptr(), part.nbytes, 0))
    if code:
        raise RuntimeError(
            f"CUDA cannot lock {part.nbytes / 2**30:.1f} GiB of host memory (error {code}): give the"
            " machine or container more memory, or set `offload.offload_params=false` and"
            " `offload.offload_optimizer=false` in the sections of `worker`, or"
            " `worker.rollout.weight_transport=object_store`"
        )
    weakref.finalize(owner, _unlock, runtime, part).atexit = False
    return part[:num_bytes]


def _unlock(runtime: Any, buffer: Tensor) -> None:
    runtime.cudaHostUnregister(buffer.data_ptr())
