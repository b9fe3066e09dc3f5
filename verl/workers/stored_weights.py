# SPDX-License-Identifier: Apache-2.0
"""Weights left in their files until their values are needed.

transformers maps files into memory, but copies tensors that it casts, or joins to the experts of a layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import core_model_loading as loading


@contextmanager
def weights_in_files(*, casts: bool) -> Iterator[None]:
    """Let `from_pretrained` return parameters that `stored_value` reads, of the dtype of their files.

    With `casts` they are of the model's dtype: then only experts are read later.
    """
    spawn, convert = loading.spawn_materialize, loading.WeightConverter.convert

    def as_stored(pool: Any, tensor: Any, device: Any = None, dtype: Any = None, **kwargs: Any) -> Any:
        return spawn(pool, tensor, device, dtype if casts else None, **kwargs)

    def convert_later(self: Any, layer_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        tensors = self.materialize_tensors()

        def result_for(tensors: dict[str, list[Tensor]]) -> dict[str, Any]:
            self.collected_tensors = dict(tensors)
            return convert(self, layer_name, *args, **kwargs)

        shapes = result_for({key: [each.to("meta") for each in every] for key, every in tensors.items()})
        if any(_only(each).ndim != 3 for each in shapes.values()):  # no experts of a layer
            return result_for(tensors)
        return {key: _later(_only(each), key, partial(result_for, tensors)) for key, each in shapes.items()}

    loading.spawn_materialize, loading.WeightConverter.convert = as_stored, convert_later
    try:
        yield
    finally:
        loading.spawn_materialize, loading.WeightConverter.convert = spawn, convert


def stored_value(tensor: Tensor) -> Tensor:
    """Return the value of a parameter or buffer, of the dtype of its file."""
    return getattr(tensor, "read", tensor.detach)().contiguous()


def _later(like: Tensor, key: str, read: Callable[[], dict[str, Any]]) -> nn.Parameter:
    param = nn.Parameter(torch.zeros((), dtype=like.dtype).expand(like.shape))  # takes no memory
    param.read = lambda: _only(read()[key])  # pyright: ignore[reportAttributeAccessIssue]
    return param


def _only(result: Any) -> Tensor:
    return result[0] if isinstance(result, list) else result
