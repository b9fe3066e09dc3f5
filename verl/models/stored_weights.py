# SPDX-License-Identifier: Apache-2.0
"""Weights that stay in their files until they are read, one tensor after another.

transformers maps safetensors files into memory. It copies what it casts to another dtype, and what it joins
of several tensors: the experts of a mixture. Both wait here, so that reading a model takes no memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import core_model_loading as loading

JOINT = 3  # dimensions of the weights of all experts of a layer


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
        if any(_only(each).ndim != JOINT for each in shapes.values()):
            return result_for(tensors)
        return {
            key: _later(_only(each), partial(_part, result_for, tensors, key)) for key, each in shapes.items()
        }

    loading.spawn_materialize, loading.WeightConverter.convert = as_stored, convert_later
    try:
        yield
    finally:
        loading.spawn_materialize, loading.WeightConverter.convert = spawn, convert


def stored_value(tensor: Tensor) -> Tensor:
    """Return the value of a parameter or buffer, of the dtype of its file."""
    return getattr(tensor, "read", tensor.detach)()


def _later(like: Tensor, read: Callable[[], Tensor]) -> nn.Parameter:
    # of its shape and dtype, but without memory
    param = nn.Parameter(torch.zeros((), dtype=like.dtype).expand(like.shape))
    param.read = read  # pyright: ignore[reportAttributeAccessIssue]
    return param


def _part(result_for: Callable[[Any], dict[str, Any]], tensors: Any, key: str) -> Tensor:
    return _only(result_for(tensors)[key])


def _only(result: Any) -> Tensor:
    return result[0] if isinstance(result, list) else result
