# SPDX-License-Identifier: Apache-2.0
"""LoRA weights outside of a model: names, files in peft's format, and folding into the base weights.

Inside a model, peft's layers name the tensors: `X.base_layer.weight` is the weight that the plain model calls
`X.weight`; `X.lora_A.default.weight`, `X.lora_B.default.weight` and, for DoRA,
`X.lora_magnitude_vector.default.weight` adapt it.
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
PREFIX = "base_model.model."  # of every tensor in peft's files
# Options of peft that would select another method, and the values with which they do not.
NEUTRAL: dict[str, Any] = {
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layers_to_transform": None,
    "layer_replication": None,
    "target_parameters": None,
    "bias": "none",
    "lora_bias": False,
    "fan_in_fan_out": False,
}


@dataclass(frozen=True)
class AdapterConfig:
    """The supported options of `adapter_config.json`."""

    rank: int
    alpha: float
    target_modules: str  # `all-linear`, names separated by commas, or a regular expression of full names
    exclude_modules: str | None = None  # names or a regular expression
    use_rslora: bool = False  # https://arxiv.org/abs/2312.03732
    use_dora: bool = False  # https://arxiv.org/abs/2402.09353
    base: str | None = None  # folder or hub name of the base model, if known

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def is_adapter(name: str) -> bool:
    return any(f".{part}." in name for part in PARTS)


def adapter_names(module: str) -> list[str]:
    """Return the names of the tensors that may adapt a module."""
    return [f"{module}.{part}.{ADAPTER}.weight" for part in PARTS]


def plain_name(name: str) -> str:
    """Return the plain model's name of a tensor that does not belong to an adapter."""
    return name.replace(BASE, ".")


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


def fold(
    named_tensors: Iterable[tuple[str, Tensor]], scale: float, *, has_magnitude: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the plain model: adapted weights folded, in float32, and the others unchanged."""
    wanted = {BASE, DOWN, UP} | ({MAGNITUDE} if has_magnitude else set())
    waiting: dict[str, dict[str, Tensor]] = {}  # incomplete modules; peft keeps a weight next to its adapter
    for name, tensor in named_tensors:
        if is_adapter(name):
            part = next(part for part in PARTS if f".{part}." in name)
            module = name.split(f".{part}.")[0]
        elif name.endswith(f"{BASE}weight"):
            module, part = name.removesuffix(f"{BASE}weight"), BASE
        else:
            yield plain_name(name), tensor
            continue
        parts = waiting.setdefault(module, {})
        parts[part] = tensor
        if wanted <= parts.keys():
            del waiting[module]
            folded = fold_weight(parts[BASE], parts[DOWN], parts[UP], scale, parts.get(MAGNITUDE))
            yield f"{module}.weight", folded
    if waiting:
        raise ValueError(f"adapters are incomplete: {sorted(waiting)[:3]} of {len(waiting)}")


def read_adapter_config(folder: Path, where: str) -> AdapterConfig:
    """Read `adapter_config.json`; `where` names the adapter in errors."""
    try:
        values = json.loads((folder / CONFIG).read_text())
        if values["peft_type"] != "LORA":
            raise ValueError(f"{where} has the type {values['peft_type']}; only LORA is supported")
        for key, neutral in NEUTRAL.items():
            if values.get(key, neutral) not in (neutral, None, {}, []):
                raise ValueError(f"{where}: `{key}` ({values[key]}) of {CONFIG} is not supported")
        return AdapterConfig(
            rank=values["r"],
            alpha=values["lora_alpha"],
            target_modules=_joined(values["target_modules"]) or "",
            exclude_modules=_joined(values.get("exclude_modules")),
            use_rslora=values.get("use_rslora", False),
            use_dora=values.get("use_dora", False),
            base=values.get("base_model_name_or_path"),
        )
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{where} is not an adapter in peft's format: {CONFIG} cannot be read:"
            f" {type(error).__name__}: {error}"
        ) from error


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

    def save_pretrained(self, save_directory: str | Path) -> None:
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {peft_name(name): tensor.contiguous() for name, tensor in self.tensors.items()}
        save_weights(tensors, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(peft_config(self.config, self.modules), indent=2) + "\n")


def peft_config(config: AdapterConfig, modules: Iterable[str]) -> dict[str, Any]:
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
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
    }
