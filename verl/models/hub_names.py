# SPDX-License-Identifier: Apache-2.0
"""From a model's tensors in memory to the names and shapes that checkpoints on the hub use.

transformers keeps some models otherwise in memory than on disk: Qwen2.5-VL's language model moved below
`model.language_model`, and the experts of a mixture are one 3-D tensor. Engines and other programs read the
names on disk. `HubNames` converts a stream of tensors, one at a time, with transformers' own conversion
rules, so a new model needs nothing here.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from verl.models.scalar_head import ScalarModels, is_scalar

# Joint experts are (experts, in, out) on the hub, as vLLM reads them; transformers holds and writes
# (experts, out, in).
TRANSPOSED_EXPERTS = {"qwen3_vl_moe": ("experts.gate_up_proj", "experts.down_proj")}
LAYER_OF = re.compile(r"^(.*\.\d+)\.")  # everything up to the last number in a name: the layer it belongs to


def auto_class(config: PreTrainedConfig) -> Any:
    """What makes a config's models: image-text-to-text if it has a vision tower, with a score if it asks."""
    has_vision = "vision_config" in config.to_dict()
    auto = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    return ScalarModels(auto) if is_scalar(config) else auto


def meta_model(
    config: PreTrainedConfig, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A model of this config without memory behind its tensors; the config itself stays as it is."""
    config = copy.deepcopy(config)
    # A config of a model prepared for packing names an attention that no model can start with.
    config._attn_implementation = "sdpa"
    options = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=trust_remote_code, **options)


class _Group(NamedTuple):
    """Tensors that are converted together, what they become, and whether only the name changes."""

    members: tuple[str, ...]
    hub_names: tuple[str, ...]
    is_renamed: bool


class HubNames:
    """Converts `(name in memory, tensor)` pairs to `(name on the hub, tensor)` pairs.

    Most tensors keep their data and only change name; a fused expert tensor becomes one tensor for each
    expert.

    Example::

        names = HubNames(model.config)
        engine.load_weights(names.convert(full_named_tensors(model)))

    Args:
        config: The model's transformers config. The rules are read from an empty model built from it, because
            sharding gives a model's classes other names.
        trust_remote_code: Whether the config's own modelling code may run.

    Attributes:
        memory_shapes: Size of every tensor by its name in memory, tied ones included.
        hub_shapes: Size of every tensor by its hub name, tied ones included.
        tied: Names in memory of tensors that are another one's memory: `lm_head.weight` with tied embeddings.
    """

    def __init__(self, config: PreTrainedConfig, trust_remote_code: bool = False) -> None:
        self._model = meta_model(config, trust_remote_code=trust_remote_code)
        tensors = dict(self._model.state_dict())
        converted = _to_hub(self._model, tensors)
        self.memory_shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.hub_shapes = {name: tensor.shape for name, tensor in converted.items()}
        self.tied = tied_names(self._model)
        self._groups = _find_groups(self._model, tensors, self.hub_shapes)

    def of(self, name: str) -> tuple[str, ...]:
        """The hub names that a tensor in memory becomes, alone or with the others of its group."""
        return self._groups[name].hub_names

    def of_module(self, module: str) -> str:
        """The name on the hub of a linear module in memory."""
        return self.of(f"{module}.weight")[0].removesuffix(".weight")

    def convert(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor under its hub name as soon as what it is made of has arrived.

        Args:
            named_tensors: Names as in the model's `state_dict()`; tied tensors may be left out.

        Yields:
            Name on the hub, tensor.

        Raises:
            ValueError: The model has no tensor of that name, or a tensor that must be joined with others came
            alone.
        """
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in named_tensors:
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
                f"tensors are missing beside {sorted(name for part in waiting.values() for name in part)}"
            )


def tied_names(model: PreTrainedModel) -> set[str]:
    """Weights that are another weight's memory and are not written: `lm_head.weight` with tied embeddings."""
    first = {
        id(tensor): name for name, tensor in reversed(list(model.named_parameters(remove_duplicate=False)))
    }
    return {
        name for name, tensor in model.named_parameters(remove_duplicate=False) if first[id(tensor)] != name
    }


def _find_groups(
    model: PreTrainedModel, tensors: dict[str, Tensor], hub_shapes: dict[str, torch.Size]
) -> dict[str, _Group]:
    """The smallest groups that convert alone as they do within the whole model: a tensor, or a layer."""
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
                f"{type(model).__name__}: {members} cannot be given their hub names layer by layer"
            )
        groups |= dict.fromkeys(members, _Group(tuple(members), tuple(converted), False))
    return groups


def _to_hub(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo what transformers does on loading.

    Square experts stay as transformers holds them: it tells the two layouts apart by their shapes.
    """
    converted = revert_weight_conversion(model, dict(tensors))
    suffixes = TRANSPOSED_EXPERTS.get(model.config.model_type, ())
    for name, tensor in converted.items():
        if suffixes and name.endswith(suffixes) and tensor.shape[-1] != tensor.shape[-2]:
            converted[name] = tensor.transpose(-1, -2).contiguous()
    return converted


def _convert_alone(
    model: PreTrainedModel, tensors: dict[str, Tensor], hub_shapes: dict[str, torch.Size]
) -> dict[str, Tensor] | None:
    """The converted tensors if they are what the whole model's conversion gives, else None."""
    try:
        converted = _to_hub(model, tensors)
    except (KeyError, ValueError, RuntimeError, IndexError):  # an operation missed its other inputs
        return None
    is_part = all(hub_shapes.get(name) == tensor.shape for name, tensor in converted.items())
    return converted if is_part else None
