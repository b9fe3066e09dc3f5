# SPDX-License-Identifier: Apache-2.0
"""Load synced weights into SGLang's module, and see that they reach all of it.

SGLang's loaders skip names that they do not know, and leave a head that its config ties to the embedding as
it was where the family's module has a head of its own.
"""

import importlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from verl.distributed.weights.buckets import BucketLayout

FLAT, LAYOUT = "flat", "layout"  # keys of a bucket of weights
TIED_HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def marking(theirs: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return `WeightUpdater.begin_weight_update` that also marks every parameter as one without values."""

    def begin_weight_update(updater: Any) -> None:
        theirs(updater)
        for param in updater.get_model().parameters():
            if param.is_floating_point():
                param.data.fill_(torch.nan)

    return begin_weight_update


def load_bucket(
    updater: Any, named_tensors: dict[str, Any], load_format: str | None = None
) -> tuple[bool, str]:
    """Load a bucket of weights, made by `flatten`, as `WeightUpdater.update_weights_from_tensor`."""
    model = updater.get_model()
    weights = list(unflatten(named_tensors))
    if has_own_head(model, updater.model_config.hf_config):
        weights += [(TIED_HEAD, value) for name, value in weights if name.endswith(EMBEDDING)]
    model.load_weights(weights)
    return True, ""


def checking(theirs: Callable[..., None]) -> Callable[..., None]:
    """Return `WeightUpdater.end_weight_update` that raises RuntimeError if a parameter got no values."""

    def end_weight_update(updater: Any, **named: Any) -> None:
        theirs(updater, **named)
        missing = sorted(
            name
            for name, param in updater.get_model().named_parameters()
            if param.is_floating_point() and param.isnan().any()
        )
        if missing:
            raise RuntimeError(f"weight sync did not reach parameters of the rollout engine: {missing}")
        mm_schedule = importlib.import_module("sglang.srt.managers.mm_schedule")
        if mm_schedule.embedding_cache is not None:  # of media, by the weights before
            mm_schedule.embedding_cache.clear()

    return end_weight_update


def has_own_head(model: nn.Module, config: Any) -> bool:
    """Return whether a module has a head of its own that its config ties to the embedding."""
    if not config.get_text_config().tie_word_embeddings:
        return False
    params = dict(model.named_parameters(remove_duplicate=False))
    embeddings = [param for name, param in params.items() if name.endswith(EMBEDDING)]
    return TIED_HEAD in params and all(params[TIED_HEAD] is not each for each in embeddings)


def flatten(bucket: list[tuple[str, Tensor]]) -> dict[str, Any]:
    """Copy tensors into one of bytes, with the layout by which `unflatten` takes them apart."""
    layout = BucketLayout.of(0, bucket)
    flat = torch.empty(layout.num_bytes, dtype=torch.uint8, device=bucket[0][1].device)
    for (_, copy), (_, tensor) in zip(layout.views(flat), bucket, strict=True):
        copy.copy_(tensor)
    return {FLAT: flat, LAYOUT: pickle.dumps(layout)}  # SGLang unpickles no classes but its own


def unflatten(flattened: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors that `flatten` joined; they share its memory."""
    return pickle.loads(flattened[LAYOUT]).views(flattened[FLAT])


def wide_weights(model: nn.Module) -> list[str]:
    """Return the names of float32 parameters: rounded to less, a router's biases would choose others."""
    return [name for name, param in model.named_parameters() if param.dtype == torch.float32]
