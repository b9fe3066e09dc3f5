# SPDX-License-Identifier: Apache-2.0
"""Memory and operations of code that runs on the meta device, where tensors have shapes and no values.

The layers of diffusion models differ too much for formulas: a model is run once without memory, in seconds.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from verl.planning.diffusion.planned import Work

_aten: Any = torch.ops.aten
ATTENTION = "scaled_dot_product"  # in the names of its kernels


def traced(function: Callable[[], Any]) -> Work:
    """Run a function without gradients."""
    with torch.no_grad(), _Trace() as trace, _gpu_attention():
        function()
    return trace.work()


def traced_update(function: Callable[[], Tensor], model: nn.Module) -> Work:
    """Run a function and its backward pass; gradients of weights are not counted as memory."""
    hooks = [
        param.register_post_accumulate_grad_hook(_drop_gradient)
        for param in model.parameters()
        if param.requires_grad
    ]
    try:
        # In another thread the mode would not be active.
        with torch.autograd.set_multithreading_enabled(False), _Trace() as trace, _gpu_attention():
            loss = function().sum()
            kept = trace.live
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return trace.work(kept)


def _drop_gradient(param: Tensor) -> None:
    param.grad = None


class _Trace(TorchDispatchMode):
    """Counts operations, and the bytes of tensors that are made inside the block and still held."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.products = self.attention = self.moved = 0.0
        self._held: set[int] = set()

    def work(self, kept: int = 0) -> Work:
        return Work(self.products, self.attention, self.moved, self.peak, kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, made = _tensors((args, kwargs)), _tensors(out)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            count = formula(*args, **(kwargs or {}), out_val=out)
            if ATTENTION in func.__name__:
                self.attention += count
            else:
                self.products += count
        elif not func.is_view:
            self.moved += sum(tensor.nbytes for tensor in (*read, *made))
        given = {id(tensor.untyped_storage()) for tensor in read}
        for tensor in made:
            if id(tensor.untyped_storage()) not in given:  # else a view, also of weights
                self._hold(tensor.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._held:
            return
        size = storage.nbytes()
        self._held.add(key)
        weakref.finalize(storage, self._free, key, size).atexit = False
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.live -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def _gpu_attention() -> Iterator[None]:
    """Take the kernel of GPUs, which keeps no scores, instead of the one that other devices have."""
    # A `TorchFunctionMode` would be off where checkpointing computes a block again.
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _flash
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return _aten._scaled_dot_product_flash_attention(query, key, value)[0]
