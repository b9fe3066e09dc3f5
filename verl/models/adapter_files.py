# SPDX-License-Identifier: Apache-2.0
"""Adapters on disk as peft and vLLM read them: `adapter_config.json` and `adapter_model.safetensors`."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

from verl.models.lora_weights import ADAPTER

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor in peft's files
NEUTRAL: dict[
    str, Any
] = {  # options of peft that would make it another method, and their value that does not
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
    """How a model is adapted.

    Attributes:
        rank: Inner size of the adapters.
        alpha: Their scale, divided by the rank.
        target_modules: `all-linear`, names with commas, or a regular expression of whole names.
        exclude_modules: Names with commas, or a regular expression; None excludes nothing.
        use_rslora: Divide alpha by the root of the rank (https://arxiv.org/abs/2312.03732).
        use_dora: Learn the size of each row of a weight apart from its direction
            (https://arxiv.org/abs/2402.09353).
        base: Folder or hub name of the model that is adapted, if known.
    """

    rank: int
    alpha: float
    target_modules: str
    exclude_modules: str | None = None
    use_rslora: bool = False
    use_dora: bool = False
    base: str | None = None

    @property
    def scale(self) -> float:
        """What the product of an adapter's two matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def read_adapter_config(folder: Path, where: str) -> AdapterConfig:
    """Read `adapter_config.json`.

    Args:
        folder: Of an adapter in peft's format.
        where: Names it in errors.

    Raises:
        ValueError: There is none, it is no LoRA, or it uses what is not supported.
    """
    try:
        values = json.loads((folder / CONFIG).read_text())
        if values["peft_type"] != "LORA":
            raise ValueError(f"{where} is an adapter of the kind {values['peft_type']}, LORA is supported")
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
            f"{where} is no adapter in peft's format, its {CONFIG} cannot be read:"
            f" {type(error).__name__}: {error}"
        ) from error


def read_adapter(folder: Path, where: str) -> dict[str, Tensor]:
    """Read an adapter's tensors, by their names inside a model.

    Args:
        folder: Of an adapter in peft's format.
        where: Names it in errors.

    Raises:
        ValueError: It holds no safetensors.
    """
    file = folder / WEIGHTS
    if not file.is_file():
        raise ValueError(f"{where} holds no {WEIGHTS}: save the adapter as safetensors")
    return {memory_name(name): tensor for name, tensor in load_file(file).items()}


class AdapterFiles(NamedTuple):
    """An adapter, ready to be written in peft's format.

    Attributes:
        config: How the model is adapted.
        modules: Names of the adapted modules, in place of the patterns that chose them.
        tensors: Whole tensors by their names inside the model.
    """

    config: AdapterConfig
    modules: Iterable[str]
    tensors: Mapping[str, Tensor]

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the two files into a folder, which is made if it is missing."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {peft_name(name): tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(peft_config(self.config, self.modules), indent=2) + "\n")


def peft_config(config: AdapterConfig, modules: Iterable[str]) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
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


def memory_name(name: str) -> str:
    """A name of peft's files as it is inside a model."""
    name = name.removeprefix(PREFIX)
    return re.sub(r"\.(lora_A|lora_B|lora_magnitude_vector)(\.weight)?$", rf".\1.{ADAPTER}.weight", name)


def peft_name(name: str) -> str:
    """A name inside a model as it is in peft's files."""
    name = PREFIX + name.replace(f".{ADAPTER}.", ".")
    return name.removesuffix(".weight") if "lora_magnitude_vector" in name else name


def _joined(value: str | list[str] | None) -> str | None:
    return ",".join(sorted(value)) if isinstance(value, list) else value
