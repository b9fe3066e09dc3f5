# SPDX-License-Identifier: Apache-2.0
"""Weights left in their files until their values are needed.

transformers maps files into memory, but copies tensors that it casts, or joins to the experts of a layer.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import core_model_loading as loading

from verl.models.fp8_weights import Scaled

Rows = Callable[[int, int], Tensor]  # of a tensor, from a first one up to the one that is not included


@contextmanager
def weights_in_files(*, casts: bool) -> Iterator[None]:
    """Let `from_pretrained` return parameters that `stored_rows` reads, of the dtype of their files.

    With `casts` they are of the model's dtype: then only experts and weights in FP8 are read later.
    """
    spawn, convert = loading.spawn_materialize, loading.WeightConverter.convert

    def as_stored(pool: Any, tensor: Any, device: Any = None, dtype: Any = None, **kwargs: Any) -> Any:
        dtype = dtype if casts else None
        if not isinstance(tensor, Scaled):
            return spawn(pool, tensor, device, dtype, **kwargs)
        like = torch.empty(tensor.stored.shape, dtype=dtype or torch.float32, device="meta")
        return pool.submit(_later, like, tensor.rows) if pool else partial(_later, like, tensor.rows)

    def convert_later(self: Any, layer_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        tensors = self.materialize_tensors()

        def result_for(tensors: dict[str, list[Tensor]]) -> dict[str, Any]:
            self.collected_tensors = tensors  # which `convert` empties
            return convert(self, layer_name, *args, **kwargs)

        empty = {key: [each.to("meta") for each in every] for key, every in tensors.items()}
        first, whole = result_for(_experts(empty, 0, 1)), result_for(empty)
        if any(_only(first[key]).shape != (1, *_only(whole[key]).shape[1:]) for key in whole):
            return result_for(_experts(tensors))  # no experts of a layer

        def rows_of(key: str, start: int, stop: int) -> Tensor:
            return _only(result_for(_experts(tensors, start, stop))[key])

        return {key: _later(_only(each), partial(rows_of, key)) for key, each in whole.items()}

    loading.spawn_materialize, loading.WeightConverter.convert = as_stored, convert_later
    try:
        yield
    finally:
        loading.spawn_materialize, loading.WeightConverter.convert = spawn, convert


def stored_rows(tensor: Tensor, start: int, stop: int | None) -> Tensor:
    """Return some rows of a parameter or buffer, of the dtype of its file, or float32 if that is FP8."""
    read: Rows | None = getattr(tensor, "read_rows", None)
    return (tensor.detach()[start:stop] if read is None else read(start, stop or len(tensor))).contiguous()


def stored_value(tensor: Tensor) -> Tensor:
    """Return all values of a parameter or buffer."""
    return stored_rows(tensor, 0, len(tensor)) if tensor.ndim else tensor.detach()


def _experts(
    tensors: Mapping[str, list[Tensor]], start: int = 0, stop: int | None = None
) -> dict[str, list[Tensor]]:
    """Return what some experts, by default all, are made of: their tensors, or their rows of joint ones."""
    return {
        key: [stored_rows(each, start, stop) for each in every]
        if every[0].ndim == 3
        else [stored_value(each) for each in every[start:stop]]
        for key, every in tensors.items()
    }


def _later(like: Tensor, read: Rows) -> nn.Parameter:
    # takes no memory; whatever computes with it does not go unnoticed
    param = nn.Parameter(torch.full((), torch.nan, dtype=like.dtype).expand(like.shape))
    param.read_rows = read  # pyright: ignore[reportAttributeAccessIssue]
    return param


def _only(result: Any) -> Tensor:
    return result[0] if isinstance(result, list) else result
