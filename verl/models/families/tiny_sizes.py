# SPDX-License-Identifier: Apache-2.0
"""Recipes of tiny models: 0.8 M parameters, which vLLM's CPU kernels take (heads of at least 32)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TEXT = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=4096, initializer_range=0.08,
)  # fmt: skip
VISION = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)  # of images
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)

# A layer of linear attention and one of full attention, half of whose channels rotate.
HYBRID = dict(
    linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
HYBRID_MOE = MOE | dict(shared_expert_intermediate_size=64)
HALF_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}


def mrope(section: list[int], **extra: Any) -> dict[str, Any]:
    """Return options of M-RoPE whose sections add up to half of the head's dimension."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, **extra}}


def square(edge: int) -> dict[str, int]:
    return {"height": edge, "width": edge}


def tiny_processor(name: str, tokenizer: Any, **options: Any) -> Any:
    """Build a processor of transformers; parts among its options are pairs of a class and options."""
    import transformers  # noqa: PLC0415 - imports torchvision, which text models do without

    for option, value in options.items():
        if isinstance(value, tuple):
            options[option] = getattr(transformers, value[0])(**value[1])
    return getattr(transformers, name)(tokenizer=tokenizer, **options)


@dataclass(frozen=True)
class TinyModel:
    """The recipe of a tiny random model; see `verl.models.tiny`."""

    model_type: str
    text: Mapping[str, Any]  # options of the language model's config
    vision: Mapping[str, Any] | None = None  # options of the config of the encoder of images
    options: Mapping[str, Any] = field(default_factory=dict)  # of the whole model's config
    special_tokens: Sequence[str] = ()  # in addition to those of the Qwen models
    named_tokens: Mapping[str, str] = field(default_factory=dict)  # of the tokenizer: `image_token`
    token_ids: Mapping[str, str] = field(default_factory=dict)  # options of the config: `image_token_id`
    image: str = "<|vision_start|><|image_pad|><|vision_end|>"  # in a rendered prompt
    video: str = "<|vision_start|><|video_pad|><|vision_end|>"
    processor: Callable[[Any], Any] | None = None  # makes the processor for a tokenizer
    keeps_words: bool = True  # False: transformers loads the model's own splitting of text instead
    added_tokens: Sequence[str] = ()  # tokens of text in addition to the trained ones
    filled: Mapping[str, float] = field(default_factory=dict)  # weights and buffers by ends of their names
    sound: str = ""  # audio in a rendered prompt
    audio: Mapping[str, Any] | None = None  # options of the config of the encoder of audio
    whole: Mapping[str, Any] = field(default_factory=dict)  # options of the config of which this is a part

    @property
    def encoders(self) -> dict[str, Mapping[str, Any]]:
        """Options of the encoders' configs, by their names in the config of the model."""
        given = {"vision_config": self.vision, "audio_config": self.audio}
        return {name: options for name, options in given.items() if options is not None}
