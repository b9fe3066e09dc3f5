# SPDX-License-Identifier: Apache-2.0
"""Layers of a dense language model that are divided over the ranks of tensor parallelism.

transformers' plan of a model says how: projections into heads and into the MLP by columns, those back by
rows, and norms of heads as copies whose gradients are summed. The vocabulary is divided by rows of embedding
and head, which may be one weight. All other parameters are whole, and all ranks compute the same with them.

Of an adapter, the factor next to the divided side of its layer is divided like it, and the other is a copy.
"""

import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from verl.distributed.tensor_parallel import (
    divide,
    joined_columns,
    own_copy,
    own_part,
    sum_gradients,
    sum_parts,
)
from verl.models.deferred_logits import DeferredLogits, DeferringHead
from verl.models.head.divided_vocabulary import VocabularyPart
from verl.models.head.logit_chunks import HeadLogits, LogitTransform
from verl.models.lora import adapted_layers
from verl.models.scalar_head import is_scalar

# Types of models that were compared with one process; the file names the tests.
TESTED = tuple(
    line
    for line in Path(__file__).with_name("divided_types.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)
COLUMNS, ROWS, COPIES = "colwise", "rowwise", "replicated_with_grad_allreduce"  # transformers' names


def check_divides(model: PreTrainedModel, size: int, option: str, ulysses: int = 1) -> None:
    """Raise a ValueError unless the layers of a model can be divided over `size` ranks.

    `option` is the key of `tensor_parallel_size`. Of the heads of a part, `ulysses` ranks have a share each.
    """
    config, name = model.config, type(model).__name__
    if config.model_type not in TESTED:
        raise ValueError(
            f"`{option}` ({size}) must be 1 for {name} ({config.model_type}): layers of"
            f" {', '.join(TESTED)} can be divided; use `fsdp.fsdp_size` and `ulysses_size`"
        )
    if reason := _obstacle(model):
        raise ValueError(f"`{option}` ({size}) must be 1 for {name}, {reason}")
    if any(layer.lora_variant for layer in adapted_layers(model).values()):
        raise ValueError(f"`{option}` ({size}) must be 1 with DoRA, which needs the norms of whole rows")
    lengths = _lengths(config)
    for what, length in lengths.items():
        if length % size:
            fitting = math.gcd(*lengths.values())
            below = max(number for number in range(1, size) if fitting % number == 0)
            raise ValueError(
                f"`{option}` ({size}) must divide the {length} {what} of {name}: set it to {below}"
            )
    if config.num_attention_heads % (size * ulysses):
        raise ValueError(
            f"`{option}` ({size}) x `worker.actor.ulysses_size` ({ulysses}) must divide the"
            f" {config.num_attention_heads} attention heads of {name}: use `ring_size` instead"
        )


def _obstacle(model: PreTrainedModel) -> str | None:
    """Describe a part of a model that would not be divided, or computed otherwise."""
    plan = _plan(model.config)
    unknown = sorted(set(plan.values()) - {COLUMNS, ROWS, COPIES})
    if unknown or COLUMNS not in plan.values():
        return f"whose plan has {', '.join(unknown) or 'no layers'}"
    if type(model.get_input_embeddings()) is not nn.Embedding:
        return f"whose embedding is a {type(model.get_input_embeddings()).__name__}"
    named = {name: _kind(plan, name) for name, _ in _layers(model)}
    planned = tuple(f"{name}." for name, kind in named.items() if kind is not None)
    inside = tuple({f"{name.rpartition('.')[0]}." for name, kind in named.items() if kind == COLUMNS})
    for name, _ in model.named_parameters():
        if name.startswith(inside) and not name.startswith(planned):
            return f"whose plan lacks `{name}`"
    return None


def tensor_option(model_option: str) -> str:
    """Return the key of `tensor_parallel_size` of a model, such as `worker.actor.model` or a teacher."""
    return f"{model_option.removesuffix('.model')}.fsdp.tensor_parallel_size"


def divide_layers(model: PreTrainedModel, axis: DeviceMesh, option: str) -> None:
    """Divide the layers of a prepared model on the meta device over the ranks of an axis.

    Raises what `check_divides` does.
    """
    check_divides(model, axis.size(), option)
    group = axis.get_group()
    fed: dict[nn.Module, None] = {}  # modules whose first layers are divided by columns
    for name, module in _layers(model):
        kind = _kind(_plan(model.config), name)
        if kind is None:
            continue
        _DIVIDE[kind](module, axis)
        if kind == COLUMNS:
            fed[model.get_submodule(name.rpartition(".")[0])] = None
    for module in fed:
        module.register_forward_pre_hook(functools.partial(_sum_input_gradients, group), with_kwargs=True)
    _divide_vocabulary(model, axis)


def _plan(config: PretrainedConfig) -> dict[str, str]:
    """Return how each layer of the blocks is divided; the vocabulary is not among them."""
    plan = config.base_model_tp_plan or {}
    return {name: kind for name, kind in plan.items() if name.startswith("layers.")}


def _layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules below the head by their names in the whole model."""
    prefix = model.base_model_prefix
    yield from ((f"{prefix}.{name}", module) for name, module in model.base_model.named_modules())


def _kind(plan: dict[str, str], name: str) -> str | None:
    inner = re.sub(r"\.\d+\.", ".*.", name.partition(".")[2])
    return plan.get(inner)


def _lengths(config: PretrainedConfig) -> dict[str, int]:
    return {
        "attention heads": config.num_attention_heads,
        "heads of keys and values": config.num_key_value_heads,
        "columns of the MLP (`intermediate_size`)": config.intermediate_size,
        "tokens of the vocabulary": config.vocab_size,
    }


def _by_columns(module: nn.Module, axis: DeviceMesh) -> None:
    linear, first, second = _with_adapters(module)
    for each in (linear, *second):
        for name, _ in list(each.named_parameters(recurse=False)):
            divide(each, name, axis, 0)
        each.__class__ = ColumnLinear
    for each in first:
        _as_copies(each, axis)


def _by_rows(module: nn.Module, axis: DeviceMesh) -> None:
    linear, first, second = _with_adapters(module)
    for each in (linear, *first):
        divide(each, "weight", axis, 1)
        if each.bias is not None:
            divide(each, "bias", axis, None)
        each.__class__ = RowLinear
        vars(each)["parts"] = axis.size()
    for each in second:  # applied to summands, so that an adapter and its layer are summed together
        _as_copies(each, axis)
    module.register_forward_hook(functools.partial(_sum_output, axis.get_group()))


def _with_adapters(module: nn.Module) -> tuple[Any, list[Any], list[Any]]:
    """Return a linear layer, and the first and the second factors of its adapters."""
    if not isinstance(module, LoraLayer):
        return module, [], []
    return module.get_base_layer(), list(module.lora_A.values()), list(module.lora_B.values())


def _as_copies(module: nn.Module, axis: DeviceMesh) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        divide(module, name, axis, None)
    module.__class__ = _copied(type(module))


_DIVIDE = {COLUMNS: _by_columns, ROWS: _by_rows, COPIES: _as_copies}


def _divide_vocabulary(model: PreTrainedModel, axis: DeviceMesh) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    divide(embedding, "weight", axis, 0)
    group, rows = axis.get_group(), len(own_part(embedding.get_parameter("weight")))
    part = VocabularyPart(axis.get_local_rank() * rows, rows, group)
    embedding.__class__ = VocabularyEmbedding
    vars(embedding)["part"] = part
    if head is None or is_scalar(model.config):
        return  # every rank computes scores
    if is_tied:
        head.weight = embedding.weight
    else:
        divide(head, "weight", axis, 0)
    if head.bias is not None:
        divide(head, "bias", axis, 0)
    head.__class__ = VocabularyHead
    vars(head)["part"] = part


def _sum_input_gradients(
    group: dist.ProcessGroup, _module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    # once for all layers that read the input, instead of once for each
    if args:
        return (sum_gradients(args[0], group), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": sum_gradients(kwargs["hidden_states"], group)}


def _sum_output(group: dist.ProcessGroup, _module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
    return sum_parts(output, group)


class ColumnLinear(nn.Linear):
    """A linear layer with some of the outputs on each rank."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, own_part(self.weight), own_part(self.bias))


class RowLinear(nn.Linear):
    """A linear layer with some of the inputs on each rank: its outputs are summands."""

    parts: int

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else own_copy(self.bias) / self.parts
        return F.linear(hidden, own_part(self.weight), bias)


class VocabularyEmbedding(nn.Embedding):
    """An embedding with some of the tokens on each rank."""

    part: VocabularyPart

    def forward(self, ids: Tensor) -> Tensor:
        own = self.part.own(ids)
        unlearned = None if self.padding_idx is None else self.padding_idx - self.part.start
        if unlearned not in range(self.part.size):
            unlearned = None
        found = F.embedding(own.clamp(min=0), own_part(self.weight), unlearned)
        return sum_parts(found * (own >= 0).unsqueeze(-1), self.part.group)


class VocabularyHead(DeferringHead):
    """An output embedding with some of the tokens on each rank."""

    part: VocabularyPart

    def forward(self, hidden: Tensor) -> Tensor | DeferredLogits:
        if self.is_deferred:
            return DeferredLogits(hidden, self)
        logits = F.linear(hidden, own_part(self.weight), own_part(self.bias))
        if torch.is_grad_enabled():
            raise NotImplementedError("logits of a divided head have no gradient: call the model with `read`")
        return joined_columns(logits, self.part.group)

    def factors(self, hidden: Tensor, transform: LogitTransform) -> HeadLogits:
        hidden = sum_gradients(hidden, self.part.group)
        return HeadLogits(hidden, own_part(self.weight), own_part(self.bias), transform, self.part)


@functools.cache
def _copied(original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass that runs on this rank's part of what the others have parts of too."""

    def forward(self: nn.Module, hidden: Tensor) -> Tensor:
        return original.forward(_Copies(self), hidden)  # pyright: ignore[reportArgumentType] - reads as a module

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})


class _Copies:
    """A module as its own forward pass sees it, with plain parameters whose gradients are summed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        for name, param in module.named_parameters(recurse=False):
            setattr(self, name, own_copy(param))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
