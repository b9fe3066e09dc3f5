# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen-Image, like those of `tiny`."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from verl.diffusion.tiny import LATENTS, WIDTH, WORDS, paint_latents, set_layer
from verl.utils.weight_files import share_weights

# words of the pipeline's chat template: its 34 tokens before the prompt are cut off by their number
TEMPLATE = (
    "system", "Describe", " the", " image", " by", " detailing", " color", " shape", " size", " texture",
    " quantity", " text", " spatial", " relationships", " of", " objects", " and", " background", "user",
    "assistant",
)  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def save_tiny_qwen_image(folder: Path, *, seed: int = 0, layers: int = 2) -> Path:
    """Save a Qwen-Image; returns the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = QwenImagePipeline(
            transformer=QwenImageTransformer2DModel(
                in_channels=4 * LATENTS, out_channels=LATENTS, num_layers=layers, attention_head_dim=16,
                num_attention_heads=4, joint_attention_dim=2 * WIDTH, axes_dims_rope=(4, 6, 6),
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192,
                shift_terminal=0.02,
            ),
            vae=_vae(), text_encoder=_text_encoder(), tokenizer=_tokenizer(),
        )  # fmt: skip
    pipeline.save_pretrained(folder)
    share_weights(folder, "model_index.json")
    return folder


def _vae() -> AutoencoderKLQwenImage:
    """Build a VAE whose decoder reaches every color."""
    channels = 16
    vae = AutoencoderKLQwenImage(
        base_dim=channels, z_dim=LATENTS, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
        latents_mean=[0.1, -0.2, 0.0, 0.3], latents_std=[2.0, 1.5, 0.8, 1.2],
    )  # fmt: skip
    set_layer(vae.post_quant_conv, torch.eye(LATENTS)[..., None, None, None])
    paint_latents(vae.decoder, channels)
    return vae


def _tokenizer() -> Qwen2Tokenizer:
    """Build a tokenizer with a token for each word, with and without a space before it."""
    untrained = Qwen2Tokenizer().backend_tokenizer
    untrained.train_from_iterator(
        [*TEMPLATE, *WORDS, *(f" {word}" for word in WORDS)],
        BpeTrainer(initial_alphabet=ByteLevel.alphabet(), show_progress=False),
    )
    learned = json.loads(untrained.to_str())["model"]
    vocabulary = dict(learned["vocab"])
    for special in SPECIAL:
        vocabulary[special] = len(vocabulary)
    merges: Any = [tuple(merge) for merge in learned["merges"]]
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, extra_special_tokens=list(SPECIAL))


def _text_encoder() -> Qwen2_5_VLForConditionalGeneration:
    """Build the language model that reads prompts, with a vision tower, which nothing here uses."""
    end = len(_tokenizer()) - 1
    text = {
        "vocab_size": end + 1, "hidden_size": 2 * WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": end - 2, "eos_token_id": end,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": WIDTH, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": 2 * WIDTH, "fullatt_block_indexes": [0],
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
