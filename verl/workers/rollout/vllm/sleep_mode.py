# SPDX-License-Identifier: Apache-2.0
"""Sleep mode of vLLM: which memory it keeps while training has the GPU, and what is restored on waking.

Level 1 copies the weights to pinned host memory and back. Level 2 discards them, which saves both copies and
the host memory, but everything else in the memory pool of the weights is lost with them: vLLM restores the
module's buffers only.
"""

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from verl.distributed.device import empty_cache, is_gpu
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)

KEPT, DISCARDED = 1, 2  # levels of `LLM.sleep`
RUNNER_STATE = "vllm.v1.worker.gpu."  # classes that hold tensors next to the module: of the V2 runner
KNOWN_STATE = "DefaultModelState"
ATTENTION_CACHE = "kv_cache"  # attribute of attention layers, in a memory pool of its own


def sleep_level(runner: Any, *, takes_adapter: bool, is_quantized: bool = False) -> int:
    """Return the deepest level of sleep from which a sync and `restore` recover everything."""
    if takes_adapter:  # a sync brings the adapter only
        return KEPT
    # captured graphs read what kernels of quantized layers keep next to the parameters, in objects that
    # `loose_tensors` does not see and that a sync replaces
    if is_quantized:
        return KEPT
    state = getattr(runner, "model_state", None)  # the V1 runner has none
    if state is None or type(state).__name__ == KNOWN_STATE:
        return DISCARDED
    logger.info("sleeping keeps the engine's weights in host memory, because of %s", type(state).__name__)
    return KEPT


def loose_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of modules that are neither parameters nor buffers, by name: scales of attention layers."""
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and id(value) not in known and key != ATTENTION_CACHE
    }


def host_copies(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a loose tensor on the GPU and its copy, to be made before the weights are discarded."""
    return [(tensor, tensor.cpu()) for tensor in loose_tensors(model).values() if is_gpu(tensor.device)]


def release_cache(device: str) -> None:
    """Give the memory that torch keeps for training to the engine, which allocates outside of torch."""
    gc.collect()
    empty_cache(device)


def restore(copies: list[tuple[Tensor, Tensor]], runner: Any) -> None:
    """Restore what lies next to the discarded weights after waking; no request may be running."""
    with torch.inference_mode():  # in which vLLM may have made them
        for tensor, copy in copies:
            tensor.copy_(copy)
        # requests write what they read, but captured graphs also read the positions of unused slots, as an
        # index into the rotary table
        for tensor in _tensors_of(getattr(runner, "model_state", None), set()):
            tensor.zero_()


def _tensors_of(state: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(state) in seen or not type(state).__module__.startswith(RUNNER_STATE):
        return
    seen.add(id(state))
    for value in getattr(state, "__dict__", {}).values():
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _tensors_of(value, seen)
