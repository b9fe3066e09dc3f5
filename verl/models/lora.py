# SPDX-License-Identifier: Apache-2.0
"""LoRA inside a model: attaching, disabling and initializing peft's adapters.

peft replaces layers in place, so the model keeps its class, its config and its blocks. Linear layers are
adapted, and tensors outside of them that are named, such as the joint weights of experts; the head never is,
since its weight is read in chunks.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import transformers_weight_conversion as conversion
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.models.hub_names import HubNames
from verl.models.lora_weights import ADAPTER, JOINT, AdaptedParameter, AdapterConfig, is_adapter, plain_name
from verl.models.scalar_head import SCORE
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)

ALL_LINEAR = "all-linear"
NAMES = re.compile(r"[\w.]+(,[\w.]+)*")  # names and commas; everything else is a regular expression
MOST_NAMED = 6


def attach_adapters(
    model: nn.Module,
    adapter: AdapterConfig,
    option: str,  # config section, for errors
    frozen: Iterable[str] = (),  # modules without adapters, such as a frozen vision tower
) -> list[str]:
    """Attach an adapter to every module and tensor that the config selects, and return their names.

    The model is changed in place, in memory or on the meta device; its output does not change. peft freezes
    all other parameters.
    """
    parts = tuple(f"{module}." for module in frozen)
    tensors = _selected_parameters(model, adapter, option, parts)
    names = _adapted_modules(model, adapter, option, parts) if adapter.target_modules or not tensors else []
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType] - peft divides it, whatever it is
        target_modules=names,
        target_parameters=tensors or None,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
    )
    with _targets_as_named():
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    return names + tensors


@contextlib.contextmanager
def _targets_as_named() -> Iterator[None]:
    """Keep peft from changing the targets inside the block."""
    # For mixtures peft takes each `gate_proj`, in dense layers and shared experts too, for the experts of
    # files from transformers 4, and would adapt the joint experts instead of the modules named.
    original = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = original


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return peft's layers by the names of the linear modules that they adapt."""
    return {name: layer for name, layer in _layers(model).items() if not isinstance(layer, ParamWrapper)}


def adapted_parameters(model: nn.Module) -> list[AdaptedParameter]:
    """Return the tensors outside of linear modules that have adapters."""
    wrappers = {name: layer for name, layer in _layers(model).items() if isinstance(layer, ParamWrapper)}
    return [
        AdaptedParameter(
            plain_name(f"{name}.{layer.parameter_name}"),
            name,
            getattr(layer.get_base_layer(), "is_transposed", False),
        )
        for name, layer in wrappers.items()
    ]


def _layers(model: nn.Module) -> dict[str, LoraLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def joint_experts(model: nn.Module) -> list[str]:
    """Return names of 3-D expert weights, which only `target_parameters` adapts."""
    return [name for name, param in model.named_parameters() if ".experts." in name and param.ndim == JOINT]


def experts_without_adapter(model: nn.Module) -> list[str]:
    """Return names of joint expert weights that are neither adapted nor trained."""
    adapted = {each.name for each in adapted_parameters(model)}
    frozen = [name for name in joint_experts(model) if not model.get_parameter(name).requires_grad]
    return [name for name in frozen if plain_name(name) not in adapted]


def adapted_expert_weights(module: nn.Module) -> int:
    """Count the weights in a module that adapters are added to before each forward pass."""
    layers = _layers(module).values()
    return sum(layer.get_param().numel() for layer in layers if isinstance(layer, ParamWrapper))


@contextlib.contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Compute exactly what the base model does inside the block."""
    # peft's own switch also changes which parameters are trained, which FSDP must not see.
    layers = _layers(model).values()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@torch.no_grad()
def set_adapter(
    model: nn.Module,
    tensors: Mapping[str, Tensor],  # by names inside a model
    hub_module: Callable[[str], str],  # hub name of a module in memory; older adapters use hub names
    where: str,
) -> None:
    """Copy saved adapters into a model with the same modules; `where` names them in errors."""
    own = {name: param for name, param in model.named_parameters() if is_adapter(name)}
    given = dict(tensors)
    if not own.keys() & given.keys():
        memory = {hub_module(name): name for name in adapted_layers(model)}
        given = {_with_module(name, memory): tensor for name, tensor in given.items()}
    wrong = [name for name in own.keys() | given.keys() if _shape(own, name) != _shape(given, name)]
    if wrong:
        first = min(wrong)
        raise ValueError(
            f"{where} is an adapter for a different model: {len(wrong)} tensors differ, for example {first}:"
            f" {_shape(given, first)} in the adapter, {_shape(own, first)} in the model:"
            " use the adapter's own base model"
        )
    for name, param in own.items():
        param.copy_(given[name])


def _adapted_modules(
    model: nn.Module, adapter: AdapterConfig, option: str, parts: tuple[str, ...]
) -> list[str]:
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    modules = {name: module for name, module in modules.items() if module is not head and name != SCORE}
    linear = [
        name for name, module in modules.items() if not name.startswith(parts) and _returns_features(module)
    ]
    target = _matcher(adapter.target_modules, f"{option}.target_modules")
    names = [name for name in linear if target(name)]
    if not names:
        raise ValueError(
            f"`{option}.target_modules` ({adapter.target_modules}) {_why_nothing(model, target)};"
            f" it has {_kinds(linear)}"
        )
    named = adapter.target_modules.split(",") if NAMES.fullmatch(adapter.target_modules) else []
    where = f"`{option}.target_modules` ({adapter.target_modules})"
    _warn_of_unmatched(where, named, linear, f"linear module of {type(model).__name__} that can be adapted")
    if adapter.exclude_modules is None:
        return names
    excluded = _matcher(adapter.exclude_modules, f"{option}.exclude_modules")
    kept = [name for name in names if not excluded(name)]
    if not kept:
        raise ValueError(
            f"`{option}.exclude_modules` ({adapter.exclude_modules}) leaves no module of"
            f" `{option}.target_modules` ({adapter.target_modules}): exclude fewer"
        )
    return kept


@torch.no_grad()
def _returns_features(module: nn.Linear) -> bool:
    """Return False for a router that is a linear module and returns scores too, to which peft cannot add."""
    if type(module).forward is nn.Linear.forward:
        return True
    weight = module.weight
    return torch.is_tensor(module(torch.zeros(1, weight.shape[-1], dtype=weight.dtype, device=weight.device)))


def _selected_parameters(
    model: nn.Module, adapter: AdapterConfig, option: str, parts: tuple[str, ...]
) -> list[str]:
    if not adapter.target_parameters:
        return []
    option = f"{option}.target_parameters"
    if adapter.use_dora:
        raise ValueError(f"`{option}` is not possible with DoRA, which peft has for linear modules only")
    known = [name for name in _free_parameters(model) if not name.startswith(parts)]
    found = [name for name in known if f".{name}".endswith(_endings(adapter.target_parameters))]
    if not found:
        raise ValueError(
            f"`{option}` ({', '.join(adapter.target_parameters)}) matches no tensor of"
            f" {type(model).__name__} outside of its linear modules; it has {_kinds(known, 2) or 'none'}"
        )
    _warn_of_unmatched(f"`{option}`", adapter.target_parameters, found, f"tensor of {type(model).__name__}")
    return found


def _free_parameters(model: nn.Module) -> list[str]:
    """Return names of matrices that belong to neither linear modules nor embeddings."""
    return [
        f"{owner}.{name}"
        for owner, module in model.named_modules()
        if owner and not isinstance(module, nn.Linear | nn.Embedding)
        for name, param in module.named_parameters(recurse=False)
        if param.ndim in (2, JOINT)
    ]


def _endings(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f".{name}" for name in names)


def _warn_of_unmatched(where: str, wanted: Iterable[str], found: list[str], kind: str) -> None:
    # peft ignores names without a match if others match.
    for name in wanted:
        if not any(f".{each}".endswith(f".{name}") for each in found):
            logger.warning("%s: %s matches no %s", where, name, kind)


def _why_nothing(model: nn.Module, target: Callable[[str], bool]) -> str:
    expert, name = _named_expert(model, target), type(model).__name__
    if expert is None:
        return f"matches no linear module of {name}"
    return (
        f"names only experts, which {name} holds as joint tensors ({expert}): name the tensors in"
        " `target_parameters`, other modules here, or train whole experts with `train_modules`"
    )


def _named_expert(model: nn.Module, target: Callable[[str], bool]) -> str | None:
    """Return the first joint expert weight that a pattern matches by its name in memory or on the hub."""
    joint = joint_experts(model)
    if not joint or not isinstance(model, PreTrainedModel):
        return None
    hub = HubNames(model.config)
    for name in joint:
        on_hub = [one.removesuffix(".weight") for one in hub.of(name)]
        if any(map(target, [name, name.rpartition(".")[0], *on_hub])):
            return name
    return None


def _matcher(pattern: str, option: str) -> Callable[[str], bool]:
    if pattern == ALL_LINEAR:
        return lambda _: True
    if NAMES.fullmatch(pattern):
        endings = _endings(pattern.split(","))
        return lambda name: f".{name}".endswith(endings)
    regex = compile_pattern(pattern, option)
    return lambda name: regex.fullmatch(name) is not None


def compile_pattern(pattern: str, option: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"`{option}` ({pattern}) is not a regular expression: {error}") from error


def _kinds(names: Iterable[str], parts: int = 1) -> str:
    kinds = sorted({".".join(name.split(".")[-parts:]) for name in names})
    return ", ".join(kinds[:MOST_NAMED]) + (" ..." if len(kinds) > MOST_NAMED else "")


def _with_module(name: str, memory: Mapping[str, str]) -> str:
    module, dot, rest = name.partition(".lora_")
    return f"{memory.get(module, module)}{dot}{rest}"


def _shape(tensors: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None
