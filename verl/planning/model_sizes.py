# SPDX-License-Identifier: Apache-2.0
"""Sizes of the models that a worker will hold, from their configs alone; no weights are read."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.config.model import FSDPConfig, ModelConfig
from verl.distributed.fsdp import fsdp_blocks
from verl.models.divided_layers import check_divides, tensor_option
from verl.models.families.interface import DEFAULT_PATCHES, is_part
from verl.models.families.registry import family_of
from verl.models.hub_names import meta_model
from verl.models.layer_configs import experts_per_token, layer_heads
from verl.models.lora import (
    adapted_expert_weights,
    adapted_layers,
    adapted_parameters,
    experts_without_adapter,
)
from verl.models.mixture.experts import (
    check_divisible,
    divisible_experts,
    expert_modules,
    expert_option,
    has_biases,
)
from verl.models.mixture.routing import check_replay, logits_per_token, route_bytes
from verl.models.scalar_head import make_scalar
from verl.models.tiled_mlp import has_tiles, tile_mlps
from verl.models.trainable import select_trainable
from verl.optim.build import parameter_groups
from verl.planning.layer_caches import layer_caches
from verl.planning.layer_sizes import Latent, Stack
from verl.planning.memory_model import ModelShape
from verl.planning.planned_model import PlannedModel
from verl.planning.stored_shape import tower_stack
from verl.workers.model_builder import adapter_config, load_model_config, weights_dtype


def read_shape(
    model: ModelConfig, fsdp: FSDPConfig, *, option: str, is_trained: bool, head: str = "causal"
) -> ModelShape:
    """Build a model on the meta device, as `build_model` does, and count its weights.

    `option` is the key of `model` in the config; `head` is "causal" or "scalar".

    Raises:
        FileNotFoundError: The folder has no config that can be read.
        ValueError: `override_config`, `lora`, the patterns of parameters or `expert_parallel_size` do not fit
            the model.
    """
    adapter = adapter_config(model, option) if is_trained else None
    empty = _meta_model(model, option, head, weights_dtype(fsdp, is_whole=is_trained and adapter is None))
    if is_trained:
        select_trainable(empty, model, option, adapter)
    else:
        empty.requires_grad_(False)
    if fsdp.expert_parallel_size > 1:
        check_divisible(empty, fsdp.expert_parallel_size, expert_option(option))
    if model.runs_tiles(is_trained=is_trained):
        tile_mlps(empty)
    shape = replace(
        model_shape(empty),
        routes=route_bytes(empty) if is_trained else 0,
    )
    if is_trained and model.router_aux_loss_coef > 0:
        shape = replace(shape, router_logits=logits_per_token(empty))
    return shape


def check_model(planned: PlannedModel, ulysses: int = 1) -> ModelShape | None:
    """Check which weights of a model a run trains, and how, and that it can be divided as asked.

    Needs no weights and no devices; `ulysses` ranks share heads. Returns the sizes of a trained model.

    Raises:
        FileNotFoundError: The folder has no config that can be read.
        ValueError: A pattern matches nothing, an adapter cannot be used, nothing is left to train, the
            experts of its tokens cannot be replayed, `expert_parallel_size` and the optimizer cannot divide
            them, or `tensor_parallel_size` cannot divide its layers.
    """
    optim, option, size = planned.optim, planned.option, planned.fsdp.expert_parallel_size
    ranks = planned.fsdp.tensor_parallel_size
    if optim is None and size == ranks == 1:
        return None
    empty = _meta_model(planned.model, option, planned.head)
    if optim is not None:
        check_replay(empty, planned.router_replay)
        select_trainable(empty, planned.model, option, adapter_config(planned.model, option))
        parameter_groups(empty, optim.lr, optim.lr_factors, f"{planned.section}.optim")
    if ranks > 1:
        check_divides(empty, ranks, tensor_option(option), ulysses)
    if size > 1:
        check_divisible(empty, size, expert_option(option))
        if optim is not None and optim.strategy == "muon" and has_biases(empty):
            raise ValueError(
                f"`{expert_option(option)}` ({size}) must be 1 with `{planned.section}.optim.strategy` (muon)"
                f" for {type(empty).__name__}, whose experts have biases: use adamw"
            )
    return None if optim is None else model_shape(empty)


def _meta_model(
    model: ModelConfig, option: str, head: str, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    config = load_model_config(model, option)
    if head == "scalar":
        make_scalar(config, has_bias=True)
    return meta_model(config, dtype, model.trust_remote_code)


def model_shape(model: PreTrainedModel) -> ModelShape:
    """Count the weights of a model; those with `requires_grad` are trained."""
    config: Any = model.config
    blocks = fsdp_blocks(model)
    encoder = family_of(config).encoder
    in_tower = {module for name, module in model.named_modules() if is_part(name, encoder)}
    # A media token may come from any encoder: the plan has the one that keeps most for it.
    tower = max(_towers(model, blocks), key=lambda each: each.kept, default=NO_TOWER)
    text_blocks = [block for block in blocks if block not in in_tower]
    experts = _experts(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_adapted = bool(adapted_layers(model) or adapted_parameters(model))
    return ModelShape(
        **weight_counts(model, [*text_blocks, *tower.blocks]),
        vocab=1 if head is None else len(head.weight),
        is_tied=head is not None and head.weight is embedding.weight,
        text=_text_stack(config.get_text_config(), text_blocks),
        tower=tower.stack,
        patches_per_token=tower.patches_per_token,
        frozen_experts=len(experts_without_adapter(model)) if is_adapted else 0,
        experts=count(experts),
        trained_experts=count(param for param in experts if param.requires_grad),
        divisible_experts=divisible_experts(model),
        has_expert_biases=has_biases(model),
    )


def _experts(model: nn.Module) -> list[nn.Parameter]:
    return [param for module in expert_modules(model) for param in module.parameters()]


def weight_counts(model: nn.Module, blocks: Iterable[nn.Module]) -> dict[str, Any]:
    """Return the counts and bytes of a `ModelShape`; weights outside of `blocks` are `root`."""
    in_blocks = {id(param) for block in blocks for param in block.parameters()}
    params = list(model.parameters())
    trained = [param for param in params if param.requires_grad]
    root = [param for param in params if id(param) not in in_blocks]
    return dict(
        params=count(params),
        stored=sum(param.nbytes for param in params),
        trained=count(trained),
        trained_stored=sum(param.nbytes for param in trained),
        root=count(root),
        trained_root=count(param for param in root if param.requires_grad),
        largest_stored=max(param.nbytes for param in params),
        largest_row=max(torch.float32.itemsize * param[0].numel() for param in params),
    )


def count(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


class _Tower(NamedTuple):
    blocks: list[nn.Module]
    stack: Stack | None
    patches_per_token: int

    @property
    def kept(self) -> int:
        """Numbers that its layers keep for a token."""
        return 0 if self.stack is None else self.stack.layers * self.stack.hidden * self.patches_per_token


NO_TOWER = _Tower([], None, DEFAULT_PATCHES)


def _towers(model: PreTrainedModel, blocks: list[nn.Module]) -> list[_Tower]:
    config: Any = model.config
    family, names = family_of(config), {module: name for name, module in model.named_modules()}
    towers = []
    for sense, parts in family.encoders.items():
        own = [block for block in blocks if is_part(names[block], parts)]
        if own:
            # FSDP gathers embeddings or a merger like a block, and the plan counts them among the rest.
            [(usual, _)] = Counter(map(type, own)).most_common(1)
            own = [block for block in own if type(block) is usual]
            largest = max(count(block.parameters()) for block in own)
            own_config, is_tiled = getattr(config, f"{sense}_config"), all(map(has_tiles, own))
            stack = tower_stack(own_config, len(own), largest, is_tiled=is_tiled)
            towers.append(_Tower(own, stack, family.patches_per_token(config, sense)))
    return towers


def _text_stack(config: Any, blocks: list[nn.Module]) -> Stack:
    # Of layers that differ, the plan has the largest.
    heads = max(layer_heads(config), key=lambda layer: layer.queries * layer.dim)
    width, latent = config.intermediate_size, _latent(config)
    if getattr(config, "moe_intermediate_size", None):
        shared = getattr(config, "n_shared_experts", None) or 0
        width = (experts_per_token(config) + shared) * config.moe_intermediate_size
    names = {name.rpartition(".")[2] for block in blocks for name, _ in block.named_modules()}
    return Stack(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=width,
        heads=heads.queries,
        kv_heads=heads.keys,
        head_dim=heads.dim if latent is None else config.qk_nope_head_dim + config.qk_rope_head_dim,
        params=max(count(block.parameters()) for block in blocks),
        has_head_norms="q_norm" in names,
        adapted_experts=max(map(adapted_expert_weights, blocks)),
        is_tiled=all(map(has_tiles, blocks)),
        experts=max(sum(count(part.parameters()) for part in expert_modules(block)) for block in blocks),
        choices=experts_per_token(config),
        caches=layer_caches(config),
        latent=latent,
        undivided=max(
            count(block.parameters()) - sum(count(part.parameters()) for part in expert_modules(block))
            for block in blocks
        ),
    )


def _latent(config: Any) -> Latent | None:
    if not getattr(config, "kv_lora_rank", None):
        return None
    queries = getattr(config, "q_lora_rank", None) or 0
    return Latent(queries, config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim)
