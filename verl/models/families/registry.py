# SPDX-License-Identifier: Apache-2.0
"""The families of models by the `model_type` of their config; to add one, write its file and list it here."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from verl.models.auto import AutoConfig
from verl.models.families.audio.qwen2_5_omni import Qwen25Omni
from verl.models.families.audio.qwen2_audio import Qwen2Audio
from verl.models.families.audio.qwen3_omni import Qwen3Omni
from verl.models.families.cohere import CohereVision
from verl.models.families.deepseek_vl import DeepseekVL
from verl.models.families.gemma import Gemma3, Gemma4
from verl.models.families.generic import GenericFamily
from verl.models.families.glm_v import GlmV
from verl.models.families.interface import Family, Kind, MediaFamily
from verl.models.families.internvl import InternVL
from verl.models.families.llava_onevision import LlavaOnevision
from verl.models.families.minicpm_v import MiniCPMV46, MiniCPMV47
from verl.models.families.mistral3 import Ministral3, Mistral3
from verl.models.families.qwen3_5 import HybridText, Qwen35
from verl.models.families.qwen_vl import Qwen3VL, Qwen25VL, QwenVL
from verl.models.families.vila import Vila
from verl.utils.registry import Registry

FAMILIES: tuple[Family, ...] = (
    QwenVL(),
    Qwen25VL(),
    Qwen3VL(),
    Qwen25Omni(),
    Qwen3Omni(),
    Qwen2Audio(),
    HybridText(),
    Qwen35(),
    Ministral3(),
    Mistral3(),
    MiniCPMV46(),
    MiniCPMV47(),
    InternVL(),
    LlavaOnevision(),
    Vila(),
    GlmV(),
    Gemma3(),
    Gemma4(),
    CohereVision(),
    DeepseekVL(),
)
TEXT, GENERIC = Family(), GenericFamily()

OWN_FAMILIES: Registry[Any] = Registry("worker.actor.model.family")  # of users' files
_by_processor = {
    name: family for family in FAMILIES if isinstance(family, MediaFamily) for name in family.processors
}
TYPES: dict[str, Family] = {  # those of users' files are added
    name: family for family in FAMILIES for name in family.model_types
}


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
    return {whole: part for family in TYPES.values() for whole, part in family.wholes.items()}


def whole_config(config: Any, path: str | Path, **options: Any) -> Any:
    """Return the config of the model that a trained part belongs to, as the files of `path` have the rest."""
    wholes = family_of(config).wholes
    if not wholes:
        return config
    whole = AutoConfig.from_pretrained(path, **options)
    if whole.model_type not in wholes:  # files of the part alone
        return config
    setattr(whole, wholes[whole.model_type], config)
    return whole


def family_of(config: Any) -> Family:
    """Return the family of a transformers config; a model that no file names is a text or a generic one."""
    family = TYPES.get(config.model_type, GENERIC if hasattr(config, "vision_config") else TEXT)
    return family.of(config) if isinstance(family, GenericFamily) else family


def media_family_of(config: Any) -> MediaFamily:
    """Return the family of a model that reads media."""
    family = family_of(config)
    assert isinstance(family, MediaFamily), f"{config.model_type} reads no media"
    return family


def family_of_processor(processor: Any) -> MediaFamily:
    """Return the family that a processor's class belongs to; several types of models may share one."""
    return _by_processor.get(type(processor).__name__, GENERIC)


def transposed_experts(config: Any) -> tuple[str, ...]:
    """Return the ends of the names of joint experts that the hub holds as (experts, in, out)."""
    return family_of(config).transposed_experts.get(config.model_type, ())


def encoder_of(config: Any) -> tuple[str, ...]:
    """Return the modules that turn media into features; a text model has none."""
    family = family_of(config)
    return family.encoder if isinstance(family, MediaFamily) else ()


def engine_encoder_of(config: Any) -> tuple[str, ...]:
    """Return vLLM's names of the modules that turn media into features."""
    family = family_of(config)
    if not isinstance(family, MediaFamily):
        return ()
    # vLLM has tower and projector at the top, transformers below the model, where vLLM runs that as well
    names = [name for part in family.encoder for name in (part, part.rpartition(".")[2])]
    return (*names, *family.engine_modules)


def kinds_of(config: Any) -> tuple[Kind, ...]:
    """Return the kinds of media that a model reads; none for a text model."""
    family = family_of(config)
    return family.kinds if isinstance(family, MediaFamily) else ()


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
        if type(TYPES.get(name, family)).__qualname__ != type(family).__qualname__:
            raise ValueError(
                f"`{OWN_FAMILIES.option}` ({spec}) must describe new types of models, {name} is known already"
            )
        TYPES[name] = family
    return family
