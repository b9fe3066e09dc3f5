# SPDX-License-Identifier: Apache-2.0
"""LoRA weights outside of a model: names, files in peft's format, and folding into the base weights.

Inside a model, peft's layers name the tensors: `X.base_layer.weight` is the weight that the plain model calls
`X.weight`; `X.lora_A.default.weight`, `X.lora_B.default.weight` and, for DoRA,
`X.lora_magnitude_vector.default.weight` adapt it.

Tensors without a linear module, such as the joint weights of experts, are adapted at the module that holds
them, by a layer around it for each: with two, `X.lora_A…` adapts the second one, `X.base_layer.base_layer.b`,
and `X.base_layer.lora_A…` the first one, `X.base_layer.base_layer.a` (`AdaptedParameter`).
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from verl.utils.weight_files import save_weights

BASE = ".base_layer."
ADAPTER = "default"  # peft's name of the only adapter
DOWN, UP, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
PARTS = (DOWN, UP, MAGNITUDE)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
JOINT = 3  # dimensions of a tensor that holds the weights of all experts
PREFIX = "base_model.model."  # of every tensor in peft's files
# Keys of peft that `AdapterConfig` holds, and keys of an adapter's start, training and loading, which do not
# change what a saved adapter computes.
READ_KEYS = (
    "peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "use_dora",
    "base_model_name_or_path", "target_parameters",
)  # fmt: skip
IGNORED_KEYS = (
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout",
    "layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "runtime_config", "qalora_group_size",
)  # fmt: skip
# Any other key must have one of these values, with which peft leaves plain LoRA alone.
OFF: tuple[Any, ...] = (None, False, {}, [], "none")
# Initializations that leave the base weights alone; the others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract
# the initial adapter from them, so that the adapter does not belong to the base model.
KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class AdapterConfig:
    """The supported options of `adapter_config.json`."""

    rank: int
    alpha: float
    target_modules: str  # `all-linear`, names separated by commas, a regular expression of full names, or ""
    exclude_modules: str | None = None  # names or a regular expression
    use_rslora: bool = False  # https://arxiv.org/abs/2312.03732
    use_dora: bool = False  # https://arxiv.org/abs/2402.09353
    base: str | None = None  # folder or hub name of the base model, if known
    target_parameters: tuple[str, ...] = ()  # names, or their endings, of tensors outside of linear modules

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class AdaptedParameter(NamedTuple):
    """A tensor outside of linear modules that an adapter changes, such as the joint weights of experts."""

    name: str  # in the plain model: `…experts.gate_up_proj`
    layer: str  # of peft, around the module: `…experts.base_layer`
    is_transposed: bool  # joint weights are (experts, in, out) instead of (experts, out, in)


def is_adapter(name: str) -> bool:
    return any(f".{part}." in name for part in PARTS)


def adapter_names(module: str) -> list[str]:
    """Return the names of the tensors that may adapt a module."""
    return [f"{module}.{part}.{ADAPTER}.weight" for part in PARTS]


def plain_name(name: str) -> str:
    """Return the plain model's name of a tensor that does not belong to an adapter."""
    return re.sub(r"(\.base_layer)+\.", ".", name)


def memory_name(name: str) -> str:
    """Convert a name in peft's files to one inside a model."""
    name = name.removeprefix(PREFIX)
    return re.sub(r"\.(lora_A|lora_B|lora_magnitude_vector)(\.weight)?$", rf".\1.{ADAPTER}.weight", name)


def peft_name(name: str) -> str:
    """Convert a name inside a model to one in peft's files."""
    name = PREFIX + name.replace(f".{ADAPTER}.", ".")
    return name.removesuffix(".weight") if MAGNITUDE in name else name


def tensors_to_save(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select a checkpoint's tensors: all of them, or for LoRA the adapters and other trained weights."""
    if not any(map(is_adapter, tensors)):
        return dict(tensors)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    return {name: tensor for name, tensor in tensors.items() if name in trained or is_adapter(name)}


def fold_weight(
    weight: Tensor, down: Tensor, up: Tensor, scale: float, magnitude: Tensor | None = None
) -> Tensor:
    """Fold an adapter, A (rank, in) and B (out, rank), into its base weight W (out, in), in float32.

    LoRA:  W + scale B A                                  (https://arxiv.org/abs/2106.09685, section 4.1)
    DoRA:  m (W + scale B A) / ||W + scale B A||, by row  (https://arxiv.org/abs/2402.09353, equation 5)
    """
    adapted = torch.addmm(weight.float(), up.float(), down.float(), alpha=scale)
    if magnitude is None:
        return adapted
    norm = torch.linalg.vector_norm(adapted, dim=1, keepdim=True)
    return adapted * (magnitude.float()[:, None] / norm)


def fold_experts(weight: Tensor, down: Tensor, up: Tensor, scale: float, is_transposed: bool) -> Tensor:
    """Fold an adapter into the joint weights of experts, W_e + scale B_e A_e, in float32.

    Args:
        weight: (experts, out, in), or (experts, in, out) if `is_transposed`.
        down: (experts * rank, in): the rows of each expert follow one another.
        up: (out, rank * experts): a column of each expert for each of the ranks.
        scale: Factor of the product.
        is_transposed: See `weight`.
    """
    experts = len(weight)
    a = down.float().view(experts, -1, down.shape[-1])  # (experts, rank, in)
    b = up.float().view(len(up), -1, experts).permute(2, 0, 1)  # (experts, out, rank)
    factors = (a.mT, b.mT) if is_transposed else (b, a)
    return torch.baddbmm(weight.float(), *factors, alpha=scale)


def fold(
    named_tensors: Iterable[tuple[str, Tensor]],
    adapter: AdapterConfig,
    parameters: Iterable[AdaptedParameter] = (),  # outside of linear modules
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the plain model: adapted weights folded, in float32, and the others unchanged."""
    by_name, by_layer = {each.name: each for each in parameters}, {each.layer: each for each in parameters}
    wanted = {BASE, DOWN, UP} | ({MAGNITUDE} if adapter.use_dora else set())
    waiting: dict[str, dict[str, Tensor]] = {}  # incomplete modules; peft keeps a weight next to its adapter
    for name, tensor in named_tensors:
        if is_adapter(name):
            part = next(part for part in PARTS if f".{part}." in name)
            module = name.split(f".{part}.")[0]
        elif plain_name(name) in by_name:
            module, part = by_name[plain_name(name)].layer, BASE
        elif name.endswith(f"{BASE}weight"):
            module, part = name.removesuffix(f"{BASE}weight"), BASE
        else:
            yield plain_name(name), tensor
            continue
        parts = waiting.setdefault(module, {})
        parts[part] = tensor
        if wanted <= parts.keys():
            del waiting[module]
            adapted = by_layer.get(module)
            name = adapted.name if adapted else f"{module}.weight"
            yield name, _folded(parts, adapter.scale, adapted)
    if waiting:
        raise ValueError(f"adapters are incomplete: {sorted(waiting)[:3]} of {len(waiting)}")


def _folded(parts: Mapping[str, Tensor], scale: float, adapted: AdaptedParameter | None) -> Tensor:
    weight, down, up = parts[BASE], parts[DOWN], parts[UP]
    if adapted is not None and weight.ndim == JOINT:
        return fold_experts(weight, down, up, scale, adapted.is_transposed)
    return fold_weight(weight, down, up, scale, parts.get(MAGNITUDE))


def read_adapter_config(folder: Path, where: str) -> AdapterConfig:
    """Read `adapter_config.json`; `where` names the adapter in errors."""
    try:
        values = json.loads((folder / CONFIG).read_text())
        if values["peft_type"] != "LORA":
            raise ValueError(f"{where} has the type {values['peft_type']}; only LORA is supported")
        _check_is_plain(values, where)
        return AdapterConfig(
            rank=values["r"],
            alpha=values["lora_alpha"],
            target_modules=_joined(values["target_modules"]) or "",
            exclude_modules=_joined(values.get("exclude_modules")),
            use_rslora=values.get("use_rslora", False),
            use_dora=values.get("use_dora", False),
            base=values.get("base_model_name_or_path"),
            target_parameters=tuple(sorted(values.get("target_parameters") or ())),
        )
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{where} is not an adapter in peft's format: {CONFIG} cannot be read:"
            f" {type(error).__name__}: {error}"
        ) from error


def _check_is_plain(values: Mapping[str, Any], where: str) -> None:
    """Raise a ValueError unless peft would load plain LoRA or DoRA for the unchanged base model."""
    start = values.get("init_lora_weights")
    if start not in KEEPS_BASE:
        raise ValueError(
            f"{where}: `init_lora_weights` ({start}) of {CONFIG} changes the base weights, so the adapter"
            " does not fit the base model: convert it with peft's"
            " `save_pretrained(..., path_initial_model_for_weight_conversion=...)`"
        )
    known = {*READ_KEYS, *IGNORED_KEYS, "init_lora_weights"}
    for key, value in values.items():
        if key not in known and value not in OFF:
            raise ValueError(
                f"{where}: `{key}` ({value}) of {CONFIG} is not supported: use an adapter without it, or"
                " merge it into its base with peft's `merge_and_unload` and train the merged model"
            )


def _joined(value: str | list[str] | None) -> str | None:
    return ",".join(sorted(value)) if isinstance(value, list) else value


def read_adapter(folder: Path, where: str) -> dict[str, Tensor]:
    """Read an adapter's tensors, by their names inside a model; `where` names it in errors."""
    file = folder / WEIGHTS
    if not file.is_file():
        raise ValueError(f"{where} has no {WEIGHTS}: save the adapter as safetensors")
    return {memory_name(name): tensor for name, tensor in load_file(file).items()}


class AdapterFiles(NamedTuple):
    """An adapter to be written in peft's format."""

    config: AdapterConfig
    modules: Iterable[str]  # names of the adapted modules, which replace the patterns
    tensors: Mapping[str, Tensor]  # full tensors by their names inside the model
    parameters: Iterable[str] = ()  # names of the adapted tensors outside of linear modules

    def save_pretrained(self, save_directory: str | Path) -> None:
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {peft_name(name): tensor.contiguous() for name, tensor in self.tensors.items()}
        save_weights(tensors, folder / WEIGHTS)
        config = peft_config(self.config, self.modules, self.parameters)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def peft_config(
    config: AdapterConfig, modules: Iterable[str], parameters: Iterable[str] = ()
) -> dict[str, Any]:
    """Build the contents of `adapter_config.json`."""
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": config.base,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
    }
