# SPDX-License-Identifier: Apache-2.0
"""Tiny random models with tokenizer and processor, for tests, demos and benchmarks.

`save_tiny_model` writes a folder that transformers and vLLM load like a hub checkpoint, in a fraction of a
second and without a network. To add a family, add an entry to `FAMILIES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast

from verl.models.hub_names import auto_class
from verl.models.tiny_words import word_tokenizer
from verl.utils.quiet import no_weight_bars

SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip

CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

ROLES = ("system", "user", "assistant")  # in the chat template

CORPUS = [
    "system user assistant You are a helpful assistant. What colour is the shape in the image? How many?",
    "red green blue yellow black white circle square triangle The answer is one two three four five six",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 + - * / = ( ) { }",
    "\\boxed <think> </think> <answer> </answer>",
    "Let me think step by step. First, we add the numbers; then we subtract. Therefore the result is",
    *("red", "green", "blue", "yellow", "one", "two", "three", "four"),  # answers of one token
]

TEXT = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=4096, initializer_range=0.08,
)  # fmt: skip
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)


@dataclass(frozen=True)
class Family:
    """The tiny version of an architecture."""

    model_type: str
    text: dict[str, Any]
    vision: dict[str, Any] | None = None
    patch_size: int = 14
    video_processor: str = "Qwen2VLVideoProcessor"
    processor: str | None = None


def _mrope(section: list[int], **extra: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, **extra}}


_VISION = dict(depth=2, num_heads=4, hidden_size=64, intermediate_size=128, out_hidden_size=128)
_VISION_2_5 = _VISION | dict(window_size=56, fullatt_block_indexes=[1], patch_size=14)
_VISION_3 = _VISION | dict(patch_size=16, deepstack_visual_indexes=[0], num_position_embeddings=64)
_QWEN3_VL: dict[str, Any] = dict(
    patch_size=16, video_processor="Qwen3VLVideoProcessor", processor="Qwen3VLProcessor"
)

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", TEXT),
    "mistral": Family("mistral", TEXT | {"sliding_window": 16}),
    "gemma2": Family("gemma2", TEXT | {"sliding_window": 16, "query_pre_attn_scalar": 32}),
    "gemma3": Family("gemma3_text", TEXT | {"sliding_window": 16, "query_pre_attn_scalar": 32}),
    "qwen2": Family("qwen2", TEXT),
    "deepseek": Family("qwen2", TEXT | {"tie_word_embeddings": False}),
    "qwen3": Family("qwen3", TEXT),
    "qwen3_moe": Family("qwen3_moe", TEXT | MOE),
    "qwen2_vl": Family(
        "qwen2_vl",
        TEXT | _mrope([4, 6, 6]),
        dict(depth=2, num_heads=4, embed_dim=64, hidden_size=128, mlp_ratio=2, patch_size=14),
        processor="Qwen2VLProcessor",
    ),
    "qwen2_5_vl": Family(
        "qwen2_5_vl", TEXT | _mrope([4, 6, 6]), _VISION_2_5, processor="Qwen2_5_VLProcessor"
    ),
    "qwen3_vl": Family("qwen3_vl", TEXT | _mrope([6, 5, 5], mrope_interleaved=True), _VISION_3, **_QWEN3_VL),
    "qwen3_vl_moe": Family(
        "qwen3_vl_moe", TEXT | MOE | _mrope([6, 5, 5], mrope_interleaved=True), _VISION_3, **_QWEN3_VL
    ),
}


def train_tokenizer(vocab_size: int = 512, *, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with Qwen's special tokens on a few sentences; deterministic.

    With `words` these are its tokens, in addition to the special ones and single bytes; nothing is trained.
    """
    if words:
        return _with_template(word_tokenizer([*words, *ROLES], SPECIAL_TOKENS))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_template(tokenizer)


def _with_template(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


def build_processor(family: Family, tokenizer: PreTrainedTokenizerFast) -> Any:
    import transformers  # noqa: PLC0415 - these import torchvision, which text models do without

    assert family.processor is not None, "only families that read media have a processor"
    factor = 2 * family.patch_size
    options: dict[str, Any] = dict(
        patch_size=family.patch_size,
        size=dict(shortest_edge=4 * factor * factor, longest_edge=64 * factor * factor),
    )
    return getattr(transformers, family.processor)(
        image_processor=transformers.Qwen2VLImageProcessor(**options),
        tokenizer=tokenizer,
        video_processor=getattr(transformers, family.video_processor)(**options),
        chat_template=CHAT_TEMPLATE,
    )


def build_config(family: Family, tokenizer: PreTrainedTokenizerFast, **overrides: Any) -> Any:
    """Build the family's transformers config; `overrides` change options of the language model."""
    special = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    tied = overrides.pop("tie_word_embeddings", family.text.get("tie_word_embeddings", True))
    text = family.text | special | overrides | {"tie_word_embeddings": tied}
    if family.vision is None:
        return AutoConfig.for_model(family.model_type, **text)
    ids = {f"{name}_token_id": tokenizer.vocab[f"<|{name}_pad|>"] for name in ("image", "video")}
    ids |= {f"{name}_token_id": tokenizer.vocab[f"<|{name}|>"] for name in ("vision_start", "vision_end")}
    return AutoConfig.for_model(
        family.model_type, text_config=text, vision_config=family.vision, tie_word_embeddings=tied, **ids
    )


def save_tiny_model(
    directory: Path | str,
    family: str = "qwen2",
    *,
    seed: int = 0,
    words: Sequence[str] = (),
    **overrides: Any,
) -> Path:
    """Write a tiny random model of a family in `FAMILIES`, with tokenizer and processor.

    `words` become single tokens; without any, the tokenizer has a few that tests and demos use.
    `overrides` are options of the language model's config, for example `num_hidden_layers=4`.
    """
    chosen = FAMILIES[family]
    if words and chosen.model_type == "qwen2":  # transformers loads Qwen2's own splitting of text instead
        raise ValueError(f"a tiny {family} model cannot have words of its own; qwen3 can")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(words=words)
    if words:  # each token is a text: none of the padding that 64-wide vocabularies have is sampled
        overrides = {"vocab_size": len(tokenizer)} | overrides
    config = build_config(chosen, tokenizer, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config, dtype=torch.float32)
    media = [tokenizer.vocab[token] for token in SPECIAL_TOKENS[SPECIAL_TOKENS.index("<|vision_start|>") :]]
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
        # As rollouts do. Random weights may prefer media placeholder tokens.
        suppress_tokens=None if chosen.vision is None else media,
    )
    with no_weight_bars():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if chosen.processor:
        build_processor(chosen, tokenizer).save_pretrained(directory)
    return directory
