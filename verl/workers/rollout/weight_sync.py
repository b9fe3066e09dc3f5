# SPDX-License-Identifier: Apache-2.0
"""Trained weights into vLLM, one parameter at a time.

Names come as on the hub (`verl.models.hub_names`), which every loader of vLLM reads; vLLM cuts full tensors
for its tensor-parallel rank by itself. To add a model whose tensors on the hub are laid out otherwise than
transformers saves them: one entry in `TRANSPOSED_EXPERTS`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

TIED_HEAD = "lm_head.weight"
TRANSPOSED_EXPERTS = (
    "qwen3_vl_moe",
)  # model types whose joint experts' weights are (experts, in, out) on the hub


def engine_weights(
    named_tensors: Iterable[tuple[str, Tensor]], hf_config: Any, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Turn trained weights into what vLLM's `load_weights` reads.

    With tied embeddings the head is left out, but still consumed: producing it may be a collective operation.

    Args:
        named_tensors: Full tensors under their hub names; consumed one by one.
        hf_config: The model's transformers config.
        dtype: Of the engine; vLLM warns about every tensor of another one.

    Yields:
        Names and tensors.
    """
    hidden_size = hf_config.get_text_config().hidden_size
    for name, tensor in named_tensors:
        if hf_config.tie_word_embeddings and name.endswith(TIED_HEAD):
            continue
        if hf_config.model_type in TRANSPOSED_EXPERTS:
            tensor = hub_experts(name, tensor, hidden_size)
        yield name, tensor.detach().to(dtype) if tensor.is_floating_point() else tensor


def hub_experts(name: str, tensor: Tensor, hidden_size: int) -> Tensor:
    """Joint experts' weights as (experts, in, out); other tensors as they are.

    transformers holds them as (experts, out, in), and since 5.10 also saves them so; the hub has them
    transposed. Where the shape says nothing, because in equals out, they are taken as transformers holds
    them.
    """
    in_dim = {"experts.gate_up_proj": -1, "experts.down_proj": -2}  # where transformers has the hidden size
    for suffix, dim in in_dim.items():
        if name.endswith(suffix):
            return tensor.transpose(-1, -2) if tensor.shape[dim] == hidden_size else tensor
    return tensor


def load_into(
    model: Any, named_tensors: Iterable[tuple[str, Tensor]], hf_config: Any, dtype: torch.dtype
) -> None:
    """Load trained weights into a model of vLLM.

    Args:
        model: The engine's module.
        named_tensors: Full tensors under their hub names; consumed to the end.
        hf_config: The model's transformers config.
        dtype: Of the engine.

    Raises:
        RuntimeError: Some of the engine's parameters got no value.
    """
    weights = engine_weights(named_tensors, hf_config, dtype)
    loaded = model.load_weights(weights)
    for _ in weights:  # a loader may stop early, but gathering is collective
        pass
    missing = {name for name, _ in model.named_parameters()} - set(loaded)
    if missing:
        raise RuntimeError(
            f"weight sync left parameters of the rollout engine as they were: {sorted(missing)}"
        )


def clear_caches(engine: Any) -> None:
    """Forget what the engine computed with older weights: attention states, embeddings of media.

    Without the second, an image seen before keeps its old embeddings (log-probs off by more than 1).

    Args:
        engine: vLLM's `LLMEngine`, with no request under way.
    """
    if not engine.reset_prefix_cache():
        raise RuntimeError("vLLM did not clear its prefix cache: requests are still running")
    engine.reset_encoder_cache()
