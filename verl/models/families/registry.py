# SPDX-License-Identifier: Apache-2.0
"""The families of models by the `model_type` of their config; to add one, write its file and list it here.

A family's file is imported when the first model of it is met; `tests/models/families/test_registry.py` holds
the table against what the files declare.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from verl.models.auto import AutoConfig
from verl.models.families.generic import GenericFamily
from verl.models.families.interface import Family, MediaFamily
from verl.utils.registry import Registry


@dataclass(frozen=True)
class Listed:
    """A family that is not imported yet."""

    path: str  # module:CLASS in this folder
    model_types: tuple[str, ...]  # of the models' configs
    processors: tuple[str, ...] = ()  # names of classes
    wholes: Mapping[str, str] = field(default_factory=dict)  # that of the class


LISTED = (
    Listed("qwen_vl:QwenVL", ("qwen2_vl",), ("Qwen2VLProcessor",)),
    Listed("qwen_vl:Qwen25VL", ("qwen2_5_vl",), ("Qwen2_5_VLProcessor",)),
    Listed("qwen_vl:Qwen3VL", ("qwen3_vl", "qwen3_vl_moe"), ("Qwen3VLProcessor",)),
    Listed(
        "audio.qwen2_5_omni:Qwen25Omni", ("qwen2_5_omni_thinker",), ("Qwen2_5OmniProcessor",),
        wholes={"qwen2_5_omni": "thinker_config"},
    ),
    Listed(
        "audio.qwen3_omni:Qwen3Omni", ("qwen3_omni_moe_thinker",), ("Qwen3OmniMoeProcessor",),
        wholes={"qwen3_omni_moe": "thinker_config"},
    ),
    Listed("audio.qwen2_audio:Qwen2Audio", ("qwen2_audio",), ("Qwen2AudioProcessor",)),
    Listed("qwen3_5:HybridText", ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")),
    Listed("qwen3_5:Qwen35", ("qwen3_5", "qwen3_5_moe")),  # with the processor of Qwen3-VL
    Listed("mistral3:Ministral3", ("ministral3",)),
    Listed("mistral3:Mistral3", ("mistral3",), ("PixtralProcessor",)),
    Listed("minicpm_v:MiniCPMV46", ("minicpmv4_6",), ("MiniCPMV4_6Processor",)),
    Listed("minicpm_v:MiniCPMV47", ("minicpmv4_7",), ("MiniCPMV4_7Processor",)),
    Listed("internvl:InternVL", ("internvl",), ("InternVLProcessor",)),
    Listed("llava_onevision:LlavaOnevision", ("llava_onevision",), ("LlavaOnevisionProcessor",)),
    Listed("vila:Vila", ("vila",), ("VilaProcessor",)),
    Listed("glm_v:GlmV", ("glm4v", "glm4v_moe", "glm46v"), ("Glm4vProcessor", "Glm46VProcessor")),
    Listed("gemma:Gemma3", ("gemma3",), ("Gemma3Processor",)),
    Listed("gemma:Gemma4", ("gemma4",), ("Gemma4Processor",)),
    Listed("nearly_generic:CohereVision", ("aya_vision", "cohere2_vision")),
    Listed("nearly_generic:DeepseekVL", ("deepseek_vl",)),
)  # fmt: skip
TEXT, GENERIC = Family(), GenericFamily()

OWN_FAMILIES: Registry[Any] = Registry("worker.actor.model.family")  # of users' files
TYPES: dict[str, Listed | Family] = {name: listed for listed in LISTED for name in listed.model_types}
_by_processor = {name: listed for listed in LISTED for name in listed.processors}


def load_config(path: str | Path, **options: Any) -> PreTrainedConfig:
    """Load the transformers config of a model's files, or of the part of it that is trained."""
    return trained_part(AutoConfig.from_pretrained(path, **options))


def trained_part(config: Any) -> Any:
    """Return the config of the part that is trained: the thinker of an omni model, others as they are."""
    name = wholes().get(config.model_type)
    if name is None:
        return config
    part = getattr(config, name)
    part.name_or_path = config.name_or_path  # checkpoints name the model that training started from
    return part


def wholes() -> dict[str, str]:
    """Return the types of models of which a part is trained, with the names of its config in theirs."""
    return {whole: part for entry in TYPES.values() for whole, part in entry.wholes.items()}


def whole_config(config: Any, path: str | Path, **options: Any) -> Any:
    """Return the config of the model that a trained part belongs to, as the files of `path` have the rest."""
    wholes = family_of(config).wholes
    if not wholes:
        return config
    whole = AutoConfig.from_pretrained(path, **options)
    vars(whole).pop("quantization_config", None)  # what is trained is not quantized
    if whole.model_type not in wholes:  # files of the part alone
        return config
    setattr(whole, wholes[whole.model_type], config)
    return whole


def family_of(config: Any) -> Family:
    """Return the family of a transformers config; a model that no file names is a text or a generic one."""
    entry = TYPES.get(str(config.model_type), GENERIC if hasattr(config, "vision_config") else TEXT)
    family = _imported(entry)
    return family.of(config) if isinstance(family, GenericFamily) else family


def all_families() -> list[Family]:
    """Import and return every family of this folder, in the order of the table."""
    return [_import_family(listed.path) for listed in LISTED]


def media_family_of(config: Any) -> MediaFamily:
    family = family_of(config)
    assert isinstance(family, MediaFamily), f"{config.model_type} reads no media"
    return family


def family_of_processor(processor: Any) -> MediaFamily:
    """Return the family that a processor's class belongs to; several types of models may share one."""
    family = _imported(_by_processor.get(type(processor).__name__, GENERIC))
    assert isinstance(family, MediaFamily)
    return family


def transposed_experts(config: Any) -> tuple[str, ...]:
    """Return the ends of the names of joint experts that the hub holds as (experts, in, out)."""
    return family_of(config).transposed_experts.get(config.model_type, ())


def engine_encoder_of(config: Any) -> tuple[str, ...]:
    """Return vLLM's names of the modules that turn media into features."""
    family = family_of(config)
    # vLLM has tower and projector at the top, transformers below the model, where vLLM runs that as well
    names = [name for part in family.encoder for name in (part, part.rpartition(".")[2])]
    return (*names, *family.engine_modules)


def is_named(config: Any) -> bool:
    """Return whether a file describes the whole model, or it reads text only."""
    return not isinstance(family_of(config), GenericFamily)


def register_family(spec: str | None) -> Family | None:
    """Make the family `file.py:NAME` known to this process, and return it; None without one."""
    if spec is None:
        return None
    family = OWN_FAMILIES[spec]
    if not isinstance(family, Family):
        raise ValueError(f"`{OWN_FAMILIES.option}` ({spec}) must be a Family, got {type(family).__name__}")
    if not family.model_types:
        raise ValueError(f"`{OWN_FAMILIES.option}` ({spec}) must name its `model_types`")
    for name in family.model_types:
        if type(_imported(TYPES.get(name, family))).__qualname__ != type(family).__qualname__:
            raise ValueError(
                f"`{OWN_FAMILIES.option}` ({spec}) must describe new types of models, {name} is known already"
            )
        TYPES[name] = family
    return family


def _imported(entry: Listed | Family) -> Family:
    return entry if isinstance(entry, Family) else _import_family(entry.path)


@cache
def _import_family(path: str) -> Family:
    module, _, name = path.partition(":")
    return getattr(import_module(f"{__name__.rpartition('.')[0]}.{module}"), name)()
