# SPDX-License-Identifier: Apache-2.0
"""Weights of models that were released in FP8, read as what they stand for; `fp8_files` describes the files.

transformers' reader of FP8 takes a last, smaller block for one of another size, which is wrong by a tenth of
the largest weight, and on GPUs it makes layers that cannot be trained.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, modeling_utils

from verl.config.files.fp8_files import INCOMPLETE, KEY, SCALES, Block, block_of, scale_problem


def stored_block(path: str) -> Block | None:
    """Return the blocks of a model's weights in FP8, None for others, of a folder or a hub name.

    Raises:
        ValueError: The weights are quantized in another way.
    """
    return block_of(PreTrainedConfig.get_config_dict(path)[0])


def drop_quantization(config: Any) -> None:
    """Let a config describe a model as it is trained: with whole weights, whatever its files have."""
    for part in (config, config.get_text_config()):
        vars(part).pop(KEY, None)


@dataclass(frozen=True)
class Scaled:
    """A weight in FP8, read like the tensors of transformers' state dicts: `[...]` returns its values."""

    stored: Tensor  # (rows, columns) float8
    scales: Tensor  # float32, one for each block
    block: Block

    def __getitem__(self, _: Any) -> Tensor:
        return self.rows(0, len(self.stored))

    def rows(self, start: int, stop: int) -> Tensor:
        """(stop - start, columns) float32."""
        values = self.stored[start:stop].float()
        scales = self.scales.view(self.block.grid(tuple(self.stored.shape)))
        scales = scales[torch.arange(start, stop) // self.block.rows]
        for column, part in enumerate(values.split(self.block.columns, dim=1)):
            part.mul_(scales[:, column, None])
        return values


@contextmanager
def weights_in_fp8(path: str) -> Iterator[None]:
    """Let `from_pretrained` multiply weights of this model by their scales; its config must be a dropped one.

    Raises:
        ValueError: The weights are quantized in another way.
    """
    module: Any = modeling_utils
    load, block = module.convert_and_load_state_dict_in_model, stored_block(path)

    def load_scaled(*args: Any, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        return load(*args, state_dict=with_scales(state_dict, block), **kwargs)

    module.convert_and_load_state_dict_in_model = load_scaled
    try:
        yield
    finally:
        module.convert_and_load_state_dict_in_model = load


def with_scales(state_dict: Mapping[str, Any], block: Block | None) -> dict[str, Any]:
    """Return tensors of files, as slices of safetensors, with those in FP8 joined to their scales.

    Raises:
        ValueError: Scales are missing, do not fit, or are not numbers of zero or more.
    """
    kinds = {name: each.get_dtype() for name, each in state_dict.items() if hasattr(each, "get_dtype")}
    joined = dict(state_dict)
    for name, kind in kinds.items():
        if not kind.startswith("F8") or name.endswith(SCALES):
            continue
        weight, scales = state_dict[name], state_dict.get(name + SCALES)
        found = None if scales is None else (tuple(scales.get_shape()), kinds[name + SCALES])
        problem = scale_problem(name, tuple(weight.get_shape()), kind, found, block)
        if problem is not None:
            raise ValueError(f"{problem}: {INCOMPLETE}")
        assert scales is not None and block is not None, "else there was a problem"
        factors = scales[...].float()
        if not bool((factors >= 0).all() & factors.isfinite().all()):
            raise ValueError(f"{name}{SCALES} has negative or infinite numbers, or none (NaN): {INCOMPLETE}")
        joined[name] = Scaled(weight[...], factors, block)
        del joined[name + SCALES]
    return joined
