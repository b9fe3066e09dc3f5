# SPDX-License-Identifier: Apache-2.0
"""Load joint weights of experts into vLLM: three calls for the experts of a layer.

vLLM's own loaders make a call for each projection of each expert, 18,432 for Qwen3-30B-A3B. The loader of the
parameter takes a whole stack as well, and shards it over tensor-parallel ranks. Layers whose weights vLLM
changes while it loads them (quantization), or that it loads in its own way, get experts one by one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from verl.distributed.weights.gathering import ExpertSlice
from verl.models.families.registry import family_of
from verl.models.hub_names import HubNames

EXPERTS = ".routed_experts"  # module of vLLM in a layer's experts; 0.26 and 0.32 have the same
UNQUANTIZED = "UnquantizedFusedMoEMethod"


class Joint(NamedTuple):
    """A parameter of vLLM, and what its loader calls the equal parts of the trainer's stack."""

    parameter: str
    shards: tuple[str, ...]


PARAMETERS = {"gate_up_proj": Joint("w13_weight", ("w1", "w3")), "down_proj": Joint("w2_weight", ("w2",))}


class JointExperts:
    """Loads slices of joint experts, in the layout of `HubNames.stacks`, into the layers of an engine."""

    def __init__(self, model: Any, hf_config: Any, trust_remote_code: bool = False) -> None:
        self.hf_config, self.trust_remote_code = hf_config, trust_remote_code
        self.family, self.mapper = family_of(hf_config), getattr(model, "hf_to_vllm_mapper", None)
        self.layers: dict[str, Any] = {
            name.removesuffix(EXPERTS): module
            for name, module in model.named_modules()
            if name.endswith(EXPERTS) and takes_stacks(module)
        }
        self._counts: Counter[str] = Counter()  # experts that were loaded into each parameter

    def load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Load slices on the way; yield everything else under its hub name, experts separately."""
        self._counts.clear()
        others = self._others(named_tensors)
        for name, tensor in others:
            if ExpertSlice.of(name) is None:
                yield name, tensor
            else:
                yield from self._hub_names.separate(chain([(name, tensor)], others))

    def complete(self) -> set[str]:
        """Return the parameters that `load` loaded every expert of."""
        parameters = (
            (f"{path}{EXPERTS}.{joint.parameter}", layer.global_num_experts)
            for path, layer in self.layers.items()
            for joint in PARAMETERS.values()
        )
        return {name for name, count in parameters if self._counts[name] == count}

    @cached_property
    def _hub_names(self) -> HubNames:
        return HubNames(self.hf_config, self.trust_remote_code)

    def _others(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_tensors:
            part = ExpertSlice.of(name)
            path, _, weight = self._engine_name(part.weight).rpartition(".") if part else ("", "", "")
            if part is None or path not in self.layers or weight not in PARAMETERS:
                yield name, tensor
                continue
            load_stack(self.layers[path], PARAMETERS[weight], tensor, part.start)
            self._counts[f"{path}{EXPERTS}.{PARAMETERS[weight].parameter}"] += len(tensor)

    def _engine_name(self, name: str) -> str:
        path, _, weight = (self.family.engine_name(name) or "").rpartition(".")
        return f"{path if self.mapper is None else self.mapper._map_name(path)}.{weight}"


def takes_stacks(layer: Any) -> bool:
    """Return whether the loader of a layer of experts can be given stacks in the trainer's layout."""
    moe = layer.moe_config
    is_plain = type(layer.quant_method).__name__ == UNQUANTIZED and type(layer).__name__ == "RoutedExperts"
    # otherwise some experts are on several ranks, or shared ones are among them
    is_single = layer.global_num_experts == moe.num_logical_experts
    return is_plain and is_single and moe.is_act_and_mul and not moe.has_bias


def load_stack(layer: Any, joint: Joint, stack: Tensor, start: int) -> None:
    """Load consecutive experts, from `start`, of a joint weight (experts, out, in) into a layer.

    With expert parallelism a layer has some of the experts, which may not be consecutive.
    """
    param, places = getattr(layer, joint.parameter), _places(layer)[start : start + len(stack)]
    rows = [row for row, place in enumerate(places) if place >= 0]
    if not rows:
        return
    own = [places[row] for row in rows]
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    if [*range(own[0], own[-1] + 1)] != own or [*range(rows[0], rows[-1] + 1, step)] != rows:
        raise NotImplementedError(f"{layer.layer_name} has its experts at irregular places: {places}")
    target, given = param.data[own[0] : own[-1] + 1], stack[rows[0] : rows[-1] + 1 : step]
    for shard, part in zip(joint.shards, given.chunk(len(joint.shards), dim=1), strict=True):
        loaded = param.weight_loader(
            param=target,
            loaded_weight=part,
            weight_name=f"{layer.layer_name}.{joint.parameter}",
            shard_id=shard,
            expert_id=start + rows[0],
            return_success=True,
        )
        assert loaded, f"{layer.layer_name} has expert {start + rows[0]}"


def _places(layer: Any) -> list[int]:
    """Return the place of each of the model's experts in a layer's parameters; -1 if another rank has it."""
    placed = layer.expert_map_manager.expert_map
    return list(range(layer.global_num_experts)) if placed is None else placed.tolist()
