# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (peft) inside a model: where they go, what they start from, the model without them.

peft puts its layers into the model in place, so the model stays what transformers made it: its class, its
config, its blocks. Only linear layers are adapted; the head, whose weight is read in chunks, never is.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.models.adapter_files import AdapterConfig
from verl.models.hub_names import HubNames
from verl.models.lora_weights import ADAPTER, is_adapter
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)

ALL_LINEAR = "all-linear"
NAMES = re.compile(r"[\w.]+(,[\w.]+)*")  # names and commas; whatever else is a regular expression
MOST_NAMED = 6  # modules that an error lists


def attach_adapters(
    model: PreTrainedModel, adapter: AdapterConfig, option: str, frozen: Iterable[str] = ()
) -> list[str]:
    """Put an adapter into every module that is wanted; peft freezes everything else.

    Args:
        model: With memory or on the meta device; changed in place. With its adapters it computes what it did
            without them.
        adapter: Which modules, and how.
        option: Where that stands in the config, for errors.
        frozen: Modules in which nothing is adapted, such as a frozen vision tower.

    Returns:
        The names of the adapted modules.

    Raises:
        ValueError: A pattern is no regular expression, or no linear module is left to adapt.
    """
    names = _adapted_modules(model, adapter, option, tuple(frozen))
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType] - peft divides it, whatever it is
        target_modules=names,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
    )
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    return names


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Layers of peft by the names of the modules that they adapt; empty for a model without adapters."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def joint_experts(model: nn.Module) -> list[str]:
    """Names of weights (experts, out, in) that all experts of a layer share; no adapter fits them."""
    return [name for name, param in model.named_parameters() if ".experts." in name and param.ndim == 3]


@contextlib.contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Inside the block the model computes what its base does, exactly.

    peft's own switch also changes which parameters are trained, which FSDP must not see; this sets what its
    layers look at.
    """
    layers = adapted_layers(model).values()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@torch.no_grad()
def set_adapter(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], hub_module: Callable[[str], str], where: str
) -> None:
    """Start a model's adapters from saved ones.

    Args:
        model: With adapters, in memory.
        tensors: Of the saved adapters, by their names inside a model.
        hub_module: The name on the hub of a module in memory, which older adapters go by.
        where: Names the adapter in errors.

    Raises:
        ValueError: The adapter is for other modules or other sizes than the model's.
    """
    own = {name: param for name, param in model.named_parameters() if is_adapter(name)}
    given = dict(tensors)
    if not own.keys() & given.keys():
        memory = {hub_module(name): name for name in adapted_layers(model)}
        given = {_with_module(name, memory): tensor for name, tensor in given.items()}
    wrong = [name for name in own.keys() | given.keys() if _shape(own, name) != _shape(given, name)]
    if wrong:
        first = min(wrong)
        raise ValueError(
            f"{where} is an adapter for another model: {len(wrong)} tensors differ, for example {first}:"
            f" {_shape(given, first)} in the adapter, {_shape(own, first)} wanted by the model:"
            " use the adapter's own base model"
        )
    for name, param in own.items():
        param.copy_(given[name])


def _adapted_modules(
    model: PreTrainedModel, adapter: AdapterConfig, option: str, frozen: tuple[str, ...]
) -> list[str]:
    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and name != "score"
        and not name.startswith(tuple(f"{module}." for module in frozen))
    ]
    target = _matcher(adapter.target_modules, f"{option}.target_modules")
    names = [name for name in linear if target(name)]
    if not names:
        raise ValueError(
            f"`{option}.target_modules` ({adapter.target_modules}) {_why_nothing(model, target)};"
            f" it has {_kinds(linear)}"
        )
    _tell_unmatched(model, adapter.target_modules, linear, option)
    if adapter.exclude_modules is None:
        return names
    excluded = _matcher(adapter.exclude_modules, f"{option}.exclude_modules")
    kept = [name for name in names if not excluded(name)]
    if not kept:
        raise ValueError(
            f"`{option}.exclude_modules` ({adapter.exclude_modules}) leaves no module of"
            f" `{option}.target_modules` ({adapter.target_modules}): name fewer"
        )
    return kept


def _tell_unmatched(model: PreTrainedModel, pattern: str, linear: list[str], option: str) -> None:
    """Warn of names that no linear module has among others that some have; peft passes over them too."""
    names = pattern.split(",") if NAMES.fullmatch(pattern) and pattern != ALL_LINEAR else []
    for name in names:
        if not any(f".{module}".endswith(f".{name}") for module in linear):
            logger.warning(
                "`%s.target_modules` (%s): %s is no linear module of %s that can be adapted, the others are",
                option, pattern, name, type(model).__name__,
            )  # fmt: skip


def _why_nothing(model: PreTrainedModel, target: Callable[[str], bool]) -> str:
    """What is wrong with a pattern that no linear module matches."""
    expert, name = _named_expert(model, target), type(model).__name__
    if expert is None:
        return f"matches no linear module of {name}"
    return (
        f"names only experts, which {name} holds as joint tensors ({expert}), and adapters fit linear modules"
        " only: name others, or train experts as a whole by `train_modules`"
    )


def _named_expert(model: PreTrainedModel, target: Callable[[str], bool]) -> str | None:
    """The first joint weight of experts that a pattern means, by its name in memory or those on the hub."""
    joint = joint_experts(model)
    if not joint:
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
        endings = tuple(f".{name}" for name in pattern.split(","))
        return lambda name: f".{name}".endswith(endings)
    regex = compiled(pattern, option)
    return lambda name: regex.fullmatch(name) is not None


def compiled(pattern: str, option: str) -> re.Pattern[str]:
    """A regular expression of an option.

    Raises:
        ValueError: It is none.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"`{option}` ({pattern}) is no regular expression: {error}") from error


def _kinds(names: Iterable[str]) -> str:
    """The last parts of module names, each once."""
    kinds = sorted({name.rpartition(".")[2] for name in names})
    return ", ".join(kinds[:MOST_NAMED]) + (" ..." if len(kinds) > MOST_NAMED else "")


def _with_module(name: str, memory: Mapping[str, str]) -> str:
    module, dot, rest = name.partition(".lora_")
    return f"{memory.get(module, module)}{dot}{rest}"


def _shape(tensors: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None
