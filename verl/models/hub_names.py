# SPDX-License-Identifier: Apache-2.0
"""Conversion of a model's tensors in memory to the names and shapes of checkpoints on the hub.

transformers keeps some models differently in memory: Qwen2.5-VL's language model moved below
`model.language_model`, and the experts of a mixture are one 3-D tensor. `HubNames` converts a stream of
tensors with transformers' own conversion rules, so a new model needs no code here.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from verl.distributed.weights.gathering import ExpertSlice
from verl.models.auto import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
from verl.models.families.registry import family_of, transposed_experts
from verl.models.scalar_head import ScalarModels, is_scalar

# Of models whose config has this part.
OF_ENCODERS = {"vision_config": AutoModelForImageTextToText, "audio_config": AutoModelForMultimodalLM}
PREFIX_CHANGE = "PrefixChange"  # of transformers 5.17 and later
LAYER_OF = re.compile(r"^(.*\.\d+)\.")  # a name up to its last number: the layer
EXPERT = re.compile(r"\.experts\.(\d+)\.")  # on the hub
# What transformers' interface of experts sets for joint weights in the layout of `HubNames.stacks`.
PLAIN_EXPERTS = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_bias": False}


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the auto class of a config's models, a `ScalarModels` if they score."""
    options = config.to_dict()
    auto = next((auto for name, auto in OF_ENCODERS.items() if name in options), AutoModelForCausalLM)
    return ScalarModels(auto) if is_scalar(config) else auto


def meta_model(
    config: PreTrainedConfig, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build a model of this config on the meta device; the config itself is not changed."""
    config = copy.deepcopy(config)
    # The config of a prepared model names an attention that a model cannot be built with.
    config._attn_implementation = "sdpa"
    options = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=trust_remote_code, **options)


class _Group(NamedTuple):
    """Tensors that are converted together."""

    members: tuple[str, ...]
    hub_names: tuple[str, ...]
    is_renamed: bool  # only the name changes


class HubNames:
    """Converts `(name in memory, tensor)` pairs to `(name on the hub, tensor)` pairs.

    Example::

        names = HubNames(model.config)
        engine.load_weights(names.convert(full_named_tensors(model)))
    """

    def __init__(self, config: PreTrainedConfig, trust_remote_code: bool = False) -> None:
        # An empty model, because sharding renames the classes of a real one.
        self._model = meta_model(config, trust_remote_code=trust_remote_code)
        correct_conversions(self._model)
        tensors = dict(self._model.state_dict())
        converted = _to_hub(self._model, tensors)
        self.memory_shapes = {name: tensor.shape for name, tensor in tensors.items()}  # including tied ones
        self.hub_shapes = {name: tensor.shape for name, tensor in converted.items()}  # including tied ones
        # Weights that share another's memory: `lm_head.weight` with tied embeddings.
        every, own = self._model.named_parameters(remove_duplicate=False), self._model.named_parameters()
        self.tied = dict(every).keys() - dict(own).keys()
        self._groups = _find_groups(self._model, tensors, self.hub_shapes)
        # Joint weights that may stay joint: their names in memory and, after the modules there, on the hub.
        # (experts, 2 * intermediate, hidden), gate before up, and (experts, hidden, intermediate).
        self.stacks = dict(self._find_stacks())

    def of(self, name: str) -> tuple[str, ...]:
        """Return the hub names that a tensor is converted to, alone or with the rest of its group."""
        return self._groups[name].hub_names

    def of_module(self, module: str) -> str:
        """Return the hub name of a linear module in memory."""
        return self.of(f"{module}.weight")[0].removesuffix(".weight")

    def convert(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor under its hub name as soon as its group is complete.

        Slices of `stacks` (see `ExpertSlice`) stay joint, in their layout; `separate` converts them.

        Raises:
            ValueError: A name is unknown, or a group is incomplete; tied tensors may be omitted.
        """
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in named_tensors:
            part = ExpertSlice.of(name)
            if part is not None and part.weight in self.stacks:
                yield str(part._replace(weight=self.stacks[part.weight])), tensor
                continue
            if name not in self._groups:
                raise ValueError(
                    f"{type(self._model).__name__} has no tensor {name!r}: is this the right config?"
                )
            group = self._groups[name]
            if group.is_renamed:
                yield group.hub_names[0], tensor
                continue
            collected = waiting.setdefault(group.members[0], {})
            collected[name] = tensor
            if len(collected) == len(group.members):
                yield from _to_hub(self._model, waiting.pop(group.members[0])).items()
        if waiting:
            raise ValueError(
                "tensors are missing that convert together with"
                f" {sorted(name for part in waiting.values() for name in part)}"
            )

    def separate(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert the slices of experts that `convert` left joint to names and shapes on the hub.

        If the hub has them joint as well, a tensor is yielded when its last slice has come.
        """
        in_memory = {joint: name for name, joint in self.stacks.items()}
        waiting: dict[str, list[Tensor]] = {}
        for name, tensor in named_tensors:
            part = ExpertSlice.of(name)
            if part is None:
                yield name, tensor
                continue
            own = in_memory[part.weight]
            if len(self.of(own)) == 1:
                waiting.setdefault(own, []).append(tensor)
                if part.stop == self.memory_shapes[own][0]:
                    yield from _to_hub(self._model, {own: torch.cat(waiting.pop(own))}).items()
                continue
            for hub_name, expert in _to_hub(self._model, {own: tensor}).items():
                yield EXPERT.sub(partial(_moved, part.start), hub_name), expert

    def _find_stacks(self) -> Iterator[tuple[str, str]]:
        for path, module in self._model.named_modules():
            if any(getattr(module, name, None) != value for name, value in PLAIN_EXPERTS.items()):
                continue
            for weight, _ in module.named_parameters(recurse=False):
                group = self._groups[f"{path}.{weight}"]
                if len(group.members) == 1:
                    yield group.members[0], f"{_experts_of(group.hub_names[0])}.{weight}"


def _experts_of(hub_name: str) -> str:
    """Return the module of experts on the hub, of one expert's tensor or of a joint one."""
    single = EXPERT.search(hub_name)
    return hub_name[: single.start(1) - 1] if single else hub_name.rpartition(".")[0]


def _moved(start: int, expert: re.Match[str]) -> str:
    return f".experts.{start + int(expert[1])}."


def correct_conversions(model: PreTrainedModel) -> None:
    """Make transformers write names as checkpoints on the hub and vLLM have them.

    On loading it removes the second part of `vision_tower.vision_model.…`, and puts it back only in models
    that it has loaded. Of Qwen2-Audio both the model and its base have a rule for `language_model.model.…`,
    so that transformers 5.19 would write that part twice.
    """
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    own = [each.source_patterns for each in conversions if each.scope_prefix is None]
    repeated = [each for each in conversions if each.scope_prefix is not None and each.source_patterns in own]
    # A prefix of the whole model is found on loading, not fixed by the architecture.
    kept = [
        each
        for each in conversions
        if each not in repeated and (type(each).__name__ != PREFIX_CHANGE or each.scope_prefix)
    ]
    if repeated or any(type(each).__name__ == PREFIX_CHANGE for each in kept):
        vars(model)["_weight_conversions"] = kept


def _find_groups(
    model: PreTrainedModel, tensors: dict[str, Tensor], hub_shapes: dict[str, torch.Size]
) -> dict[str, _Group]:
    """Find the smallest groups that convert independently: a tensor, or a layer."""
    groups: dict[str, _Group] = {}
    together: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        converted = _convert_alone(model, {name: tensor}, hub_shapes)
        if converted is None:
            layer = LAYER_OF.match(name)
            together.setdefault(layer.group(1) if layer else "", []).append(name)
            continue
        groups[name] = _Group((name,), tuple(converted), all(new is tensor for new in converted.values()))
    for members in together.values():
        converted = _convert_alone(model, {name: tensors[name] for name in members}, hub_shapes)
        if converted is None:
            raise NotImplementedError(
                f"{type(model).__name__}: {members} cannot be converted to hub names layer by layer"
            )
        groups |= dict.fromkeys(members, _Group(tuple(members), tuple(converted), False))
    return groups


def _to_hub(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo transformers' conversion on loading."""
    prefix = "" if is_scalar(model.config) else family_of(model.config).hub_prefix
    converted = revert_weight_conversion(model, dict(tensors))
    converted = {prefix + name: tensor for name, tensor in converted.items()}
    # Square experts are not transposed: transformers detects the layout by the shape.
    suffixes = transposed_experts(model.config)
    for name, tensor in converted.items():
        if suffixes and name.endswith(suffixes) and tensor.shape[-1] != tensor.shape[-2]:
            converted[name] = tensor.transpose(-1, -2).contiguous()
    return converted


def _convert_alone(
    model: PreTrainedModel, tensors: dict[str, Tensor], hub_shapes: dict[str, torch.Size]
) -> dict[str, Tensor] | None:
    """Convert tensors alone; None if the result differs from the whole model's conversion."""
    try:
        converted = _to_hub(model, tensors)
    except (KeyError, ValueError, RuntimeError, IndexError):  # an operation lacked its other inputs
        return None
    is_part = all(hub_shapes.get(name) == tensor.shape for name, tensor in converted.items())
    return converted if is_part else None
