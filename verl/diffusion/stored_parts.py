# SPDX-License-Identifier: Apache-2.0
"""Models of a pipeline that are mapped from their files, whose pages the processes of a node share."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import nn
from transformers import PreTrainedModel

from verl.checkpoint.pipelines import TRANSFORMER, stored_weights
from verl.workers.stored_weights import weights_in_files

VAE = "vae"
CONFIG = "config.json"


def open_pipeline(folder: Path, dtype: torch.dtype, computes_in: torch.dtype) -> Any:
    """Open a pipeline: its frozen models have the weights of their files, in the data types of these.

    Args:
        dtype: Data type of the transformer, whose weights take no memory; its buffers have values.
        computes_in: Data type of the text encoders while they run.
    """
    transformer, vae = empty_part(folder / TRANSFORMER, dtype), stored_part(folder / VAE, torch.float32)
    with weights_in_files(casts=False):
        return DiffusionPipeline.from_pretrained(
            folder, **{TRANSFORMER: transformer, VAE: vae}, dtype=computes_in
        )


def stored_part(folder: Path, dtype: torch.dtype) -> Any:
    """Build a model of diffusers whose weights are mapped from its files.

    Raises:
        FileNotFoundError: Files or weights are missing.
        ValueError: The weights do not fit the config.
    """
    remedy = "download the model again, or save it with `save_pretrained`"
    model, tensors = empty_part(folder, dtype), stored_weights(folder, remedy)
    model._fix_state_dict_keys_on_load(tensors)  # names of earlier versions
    try:
        missing = model.load_state_dict(tensors, strict=False, assign=True).missing_keys
    except RuntimeError as error:
        raise ValueError(f"the weights in {folder} do not fit its {CONFIG} ({error}): {remedy}") from error
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} weights, for example {sorted(missing)[:3]}: {remedy}"
        )
    return model


def empty_part(folder: Path, dtype: torch.dtype) -> Any:
    """Build a model of diffusers as `from_pretrained` does: on the meta device, but for buffers."""
    kind: Any = getattr(diffusers, json.loads((folder / CONFIG).read_bytes())["_class_name"])
    with init_empty_weights(), _default_dtype(dtype):
        model = kind.from_config(kind.load_config(folder))
    wanted = data_types(model, dtype)
    for held, key, name, tensor in tensors_of(model):
        held[key].data = tensor.data.to(wanted.get(name, tensor.dtype))
    return model.eval()


def data_types(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the data types that `from_pretrained` gives to tensors of files, of which some stay float32."""
    is_text = isinstance(model, PreTrainedModel)
    kept = set(model._get_dtype_plan(dtype) if is_text else model._keep_in_fp32_modules or ())
    return {
        name: dtype if kept.isdisjoint(name.split(".")) else torch.float32
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }


def tensors_of(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, str, torch.Tensor]]:
    """Yield weights and buffers with the dictionaries that hold them, their keys and their names."""
    for prefix, module in list(model.named_modules()):
        for held in (module._parameters, module._buffers):
            for key, tensor in list(held.items()):
                if tensor is not None:
                    yield held, key, f"{prefix}.{key}".removeprefix("."), tensor


def replace_tensors(model: nn.Module, function: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace every weight and buffer by what a function makes of its name and values; ties remain."""
    made: dict[int, torch.Tensor] = {}
    for held, key, name, tensor in list(tensors_of(model)):  # which keeps them, and so their ids
        if id(tensor) not in made:
            found = function(name, tensor.detach())
            made[id(tensor)] = nn.Parameter(found, False) if isinstance(tensor, nn.Parameter) else found
        held[key] = made[id(tensor)]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
