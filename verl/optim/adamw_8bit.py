# SPDX-License-Identifier: Apache-2.0
"""AdamW with 8-bit moments, using torchao's kernels. Importing this module needs torchao."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torchao.optim.adam import single_param_adam  # pyright: ignore[reportMissingImports] - optional
from torchao.optim.subclass_8bit import (  # pyright: ignore[reportMissingImports] - optional
    OptimState8bit,
    get_qmap_signed,
    get_qmap_unsigned,
)

from verl.distributed.device import is_gpu
from verl.distributed.fsdp import local_part, zeros_sharded_like
from verl.optim.adamw import LocalAdamW, seed_of_update

# torchao quantizes each rank's shard in blocks of 256 from its start, so its state fits only one number of
# ranks. Here a block lies within a row of the full parameter: the state consists of ordinary sharded tensors
# that load on any number of ranks.
BLOCK = 256  # maximum numbers that share a scale
SMALLEST_BLOCK = 64  # with smaller blocks the scales take too much memory
SMALLEST = 4096  # smaller parameters keep float32 moments
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether it has a sign


class AdamW8bit(LocalAdamW):
    """AdamW with both moments in blocks of 8-bit numbers and a float32 scale for each block.

    Parameters without a `block_size` keep float32 moments. bfloat16 weights are rounded stochastically.

    Source: 8-bit Optimizers via Block-wise Quantization (https://arxiv.org/abs/2110.02861).
    """

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        state = self.state[param]
        weight = local_part(param)
        if not weight.numel():  # more ranks than rows
            return
        moments = [self._moment(state, key) for key in MOMENTS]
        rounds = weight.dtype == torch.bfloat16
        beta1, beta2 = group["betas"]
        rate = torch.tensor(group["lr"], dtype=torch.float32)
        seed = seed_of_update(param, state["step"].item(), number)
        with _seeded(weight.device, seed) if rounds else nullcontext():
            update_kernel(is_gpu(weight.device))(
                weight.detach(), local_part(grad), state["step"], *moments, None,
                rate, beta1, beta2, group["weight_decay"], group["eps"], True, rounds,
            )  # fmt: skip

    def _start(self, param: Tensor, state: dict[str, Tensor]) -> None:
        block = block_size(param.shape)
        for key in MOMENTS:
            if block is None:
                state[key] = torch.zeros_like(param, dtype=torch.float32, requires_grad=False)
                continue
            state[key] = torch.zeros_like(param, dtype=torch.uint8, requires_grad=False)
            blocks = math.prod(param.shape[1:]) // block
            state[f"{key}_scale"] = zeros_sharded_like(param, (param.shape[0], blocks), torch.float32)

    @staticmethod
    def _moment(state: dict[str, Tensor], key: str) -> Tensor:
        values = local_part(state[key])
        if f"{key}_scale" not in state:
            return values
        # As torchao's kernels read and write it.
        numbers = get_qmap_signed() if MOMENTS[key] else get_qmap_unsigned()
        table = torch.tensor(numbers, dtype=torch.float32, device=values.device)
        scale = local_part(state[f"{key}_scale"]).view(-1)
        return OptimState8bit(values, scale, table, MOMENTS[key], dtype=torch.float32)


def block_size(shape: torch.Size) -> int | None:
    """Return the largest divisor of a row's length from 64 to 256; None keeps float32 moments."""
    if len(shape) < 2 or shape.numel() < SMALLEST:
        return None
    row = math.prod(shape[1:])
    return next((size for size in range(BLOCK, SMALLEST_BLOCK - 1, -1) if row % size == 0), None)


def update_kernel(is_compiled: bool) -> Callable[..., None]:
    """Return torchao's update of one tensor, on CUDA compiled to one kernel for each shape."""
    if not is_compiled:  # on CPU compiling takes longer than it saves
        return single_param_adam
    compiled = torch.compile(single_param_adam, fullgraph=True, dynamic=False)

    def update(*args: Any) -> None:
        with torch._dynamo.utils.disable_cache_limit():  # as torchao does: a model has few shapes
            compiled(*args)

    return update


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Run torchao, which draws from the global generators, with a seed; restore them afterwards."""
    with torch.random.fork_rng([device] if is_gpu(device) else [], device_type=device.type):
        torch.manual_seed(seed)
        yield
