# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model that its memory follows from, read off a model without memory."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from verl.distributed.fsdp import fsdp_blocks
from verl.models.lora import adapted_layers, joint_experts
from verl.models.registry import model_type_of
from verl.planning.memory_model import ModelShape, Stack


def model_shape(model: PreTrainedModel) -> ModelShape:
    """Count the weights of a model, on the meta device or not; `requires_grad` says which of them learn."""
    config: Any = model.config
    blocks = fsdp_blocks(model)
    tower_name = model_type_of(config).vision_tower
    tower = [] if tower_name is None else list(model.get_submodule(tower_name).modules())
    tower_blocks = [block for block in blocks if any(block is module for module in tower)]
    text_blocks = [block for block in blocks if all(block is not one for one in tower_blocks)]
    in_blocks = {id(param) for block in blocks for param in block.parameters()}
    params = list(model.parameters())
    learning = [param for param in params if param.requires_grad]
    outside = [param for param in params if id(param) not in in_blocks]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return ModelShape(
        params=_count(params),
        stored=_bytes(params),
        learning=_count(learning),
        learning_stored=_bytes(learning),
        root=_count(outside),
        learning_root=_count(param for param in outside if param.requires_grad),
        largest_stored=max(param.numel() * param.element_size() for param in params),
        vocab=1 if head is None else len(head.weight),
        is_tied=head is not None and head.weight is embedding.weight,
        text=_text_stack(config.get_text_config(), text_blocks),
        tower=_tower_stack(config.vision_config, tower_blocks) if tower_blocks else None,
        bare_experts=_bare_experts(model),
    )


def _bare_experts(model: PreTrainedModel) -> int:
    """The joint tensors of experts that are left as they are beside adapters."""
    if not adapted_layers(model):
        return 0
    return sum(not model.get_parameter(name).requires_grad for name in joint_experts(model))


def _count(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


def _bytes(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() * param.element_size() for param in params)


def _text_stack(config: Any, blocks: list[nn.Module]) -> Stack:
    heads, width = config.num_attention_heads, config.intermediate_size
    if getattr(config, "moe_intermediate_size", None):
        width = config.num_experts_per_tok * config.moe_intermediate_size
    names = {name.rpartition(".")[2] for block in blocks for name, _ in block.named_modules()}
    return Stack(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=width,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        params=max(_count(block.parameters()) for block in blocks),
        has_head_norms="q_norm" in names,
    )


def _tower_stack(config: Any, blocks: list[nn.Module]) -> Stack:
    """Of a vision tower; Qwen2-VL calls its width `embed_dim` and gives the MLP's as a ratio."""
    hidden = getattr(config, "embed_dim", None) or config.hidden_size
    return Stack(
        layers=config.depth,
        hidden=hidden,
        intermediate=getattr(config, "intermediate_size", None) or int(hidden * config.mlp_ratio),
        heads=config.num_heads,
        kv_heads=config.num_heads,
        head_dim=hidden // config.num_heads,
        params=max(_count(block.parameters()) for block in blocks),
    )
