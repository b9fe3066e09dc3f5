# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines of image models that only tests use."""

from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from examples.quickstart.tiny_pipelines import (
    CHANNELS,
    LATENTS,
    WIDTH,
    WORDS,
    center,
    clip_config,
    clip_tokenizer,
    kl_vae,
    paint_latents,
    parts,
    saved,
    set_layer,
    t5,
    t5_tokenizer,
    texts,
    vocabulary_of,
)

# words of the pipeline's chat template: its 34 tokens before the prompt are cut off by their number
QWEN_TEMPLATE = (
    "system", "Describe", " the", " image", " by", " detailing", " color", " shape", " size", " texture",
    " quantity", " text", " spatial", " relationships", " of", " objects", " and", " background", "user",
    "assistant",
)  # fmt: skip
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@saved
def save_tiny_flux(layers: int = 1, schnell: bool = False) -> Any:
    """Save a FLUX.1-dev, or a FLUX.1-schnell, which reads no guidance."""
    return parts.FluxPipeline(
        transformer=parts.FluxTransformer2DModel(
            in_channels=4 * LATENTS, num_layers=layers, num_single_layers=layers, attention_head_dim=16,
            num_attention_heads=4, joint_attention_dim=2 * WIDTH, pooled_projection_dim=WIDTH,
            guidance_embeds=not schnell, axes_dims_rope=(4, 6, 6),
        ),
        scheduler=parts.FlowMatchEulerDiscreteScheduler(
            shift=1.0 if schnell else 3.0, use_dynamic_shifting=not schnell
        ),
        vae=kl_vae(shift_factor=0.1, scaling_factor=0.4),
        text_encoder=texts.CLIPTextModel(clip_config()), tokenizer=clip_tokenizer(),
        text_encoder_2=t5(), tokenizer_2=t5_tokenizer(),
    )  # fmt: skip


@saved
def save_tiny_qwen_image(layers: int = 2) -> Any:
    """Save a Qwen-Image."""
    return parts.QwenImagePipeline(
        transformer=parts.QwenImageTransformer2DModel(
            in_channels=4 * LATENTS, out_channels=LATENTS, num_layers=layers, attention_head_dim=16,
            num_attention_heads=4, joint_attention_dim=2 * WIDTH, axes_dims_rope=(4, 6, 6),
        ),
        scheduler=parts.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=_qwen_vae(), text_encoder=_qwen_text_encoder(), tokenizer=_qwen_tokenizer(),
    )  # fmt: skip


def _qwen_vae() -> Any:
    vae = parts.AutoencoderKLQwenImage(
        base_dim=CHANNELS, z_dim=LATENTS, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
        latents_mean=[0.1, -0.2, 0.0, 0.3], latents_std=[2.0, 1.5, 0.8, 1.2],
    )  # fmt: skip
    set_layer(vae.post_quant_conv, center(torch.eye(LATENTS), vae.post_quant_conv))
    paint_latents(vae.decoder)
    return vae


def _qwen_tokenizer() -> Any:
    """Build a tokenizer with a token for each word, with and without a space before it."""
    untrained = texts.Qwen2Tokenizer().backend_tokenizer
    untrained.train_from_iterator(
        [*QWEN_TEMPLATE, *WORDS, *(f" {word}" for word in WORDS)],
        BpeTrainer(initial_alphabet=ByteLevel.alphabet(), show_progress=False),
    )
    return texts.Qwen2Tokenizer(
        **vocabulary_of(untrained, QWEN_SPECIAL), extra_special_tokens=list(QWEN_SPECIAL)
    )


def _qwen_text_encoder() -> Any:
    """Build the language model that reads prompts, with a vision tower, which nothing here uses."""
    end = len(_qwen_tokenizer()) - 1
    text = {
        "vocab_size": end + 1, "hidden_size": 2 * WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": end - 2, "eos_token_id": end,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": WIDTH, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": 2 * WIDTH, "fullatt_block_indexes": [0],
    }  # fmt: skip
    config = texts.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return texts.Qwen2_5_VLForConditionalGeneration(config)
