# SPDX-License-Identifier: Apache-2.0
"""Tiny diffusion models with random weights and all of their parts, for tests and demos."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from verl.utils.weight_files import share_weights

COLORS = ("red", "green", "blue", "yellow", "black", "white")
OTHERS = "a all and color dark in is it light of paint picture the wall"
WORDS = (*COLORS, *OTHERS.split())
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789,.'"
WIDTH = 32  # of text states
LONGEST = 16  # tokens that CLIP reads
END_OF_WORD = "</w>"
LATENTS = 4  # channels of a latent


def save_tiny_sd3(folder: Path, *, seed: int = 0, layers: int = 2, size: int = 16) -> Path:
    """Save a Stable Diffusion 3 whose images have `size` x `size` pixels at least; returns the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(
                sample_size=size // 2, patch_size=2, in_channels=LATENTS, num_layers=layers,
                attention_head_dim=16, num_attention_heads=4, joint_attention_dim=2 * WIDTH,
                caption_projection_dim=64, pooled_projection_dim=2 * WIDTH, out_channels=LATENTS,
                pos_embed_max_size=32, qk_norm="rms_norm",
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=kl_vae(),
            text_encoder=CLIPTextModelWithProjection(clip_config()), tokenizer=clip_tokenizer(),
            text_encoder_2=CLIPTextModelWithProjection(clip_config()), tokenizer_2=clip_tokenizer(),
            text_encoder_3=t5(), tokenizer_3=t5_tokenizer(),
        )  # fmt: skip
    pipeline.save_pretrained(folder)
    share_weights(folder, "model_index.json")
    return folder


def kl_vae(shift_factor: float = 0.0, scaling_factor: float = 1.0) -> AutoencoderKL:
    """Build a VAE whose decoder reaches every color, which random ones do not."""
    channels = 16
    blocks: dict[str, Any] = dict(  # annotated in diffusers as tuples of one element
        block_out_channels=(channels, channels), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    vae = AutoencoderKL(
        **blocks, in_channels=3, out_channels=3, latent_channels=LATENTS,
        layers_per_block=1, norm_num_groups=1, shift_factor=shift_factor, scaling_factor=scaling_factor,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    paint_latents(vae.decoder, channels)
    return vae


def paint_latents(decoder: Any, channels: int) -> None:
    """Set a decoder to paint three of its latent channels, divided by the root mean square of all.

    Its blocks pass on what they read, and the last SiLU reads each channel and its negative,
    `silu(z) - silu(-z) = z`.

    Args:
        channels: What the last norm reads, a multiple of twice the latent channels.
    """
    for name, module in decoder.named_modules():
        if name.endswith(("conv2", "to_out.0", "attentions.0.proj")):
            set_layer(module, 0.0)  # of a residual branch
        elif name.endswith(("upsamplers.0.conv", "upsamplers.0.resample.1")):
            set_layer(module, center(torch.eye(*module.weight.shape[:2]), module))
    signed = torch.cat([torch.eye(LATENTS), -torch.eye(LATENTS)])  # (8, 4)
    read = torch.cat([torch.eye(3, LATENTS), -torch.eye(3, LATENTS)], 1)  # (3, 8)
    first, last = decoder.conv_in, decoder.conv_out
    set_layer(first, center(signed.repeat(first.out_channels // len(signed), 1), first))
    set_layer(last, center(read.repeat(1, channels // read.shape[1]) * read.shape[1] / channels, last))


def set_layer(module: Any, weight: Tensor | float) -> None:
    """Set the weights of a layer, and its bias to zero."""
    module.weight.data.copy_(torch.as_tensor(weight))
    module.bias.data.zero_()


def center(matrix: Tensor, convolution: Any) -> Tensor:
    """Return the weight of a convolution that applies a matrix (out, in) to each pixel.

    A causal one reads earlier frames too; the last of its frames is the current one.
    """
    weight = torch.zeros_like(convolution.weight.data)  # (out, in, 3, 3), or (out, in, 3, 3, 3) of frames
    current = weight if weight.ndim == 4 else weight[:, :, -1]
    current[..., 1, 1] = matrix
    return weight


def clip_tokenizer() -> CLIPTokenizer:
    """Build a tokenizer with a token for each word; other words are letters."""
    words = Tokenizer(BPE(end_of_word_suffix=END_OF_WORD))
    words.pre_tokenizer = WhitespaceSplit()
    alphabet = [*CHARACTERS, *(f"{one}{END_OF_WORD}" for one in CHARACTERS)]
    words.train_from_iterator(
        WORDS, BpeTrainer(end_of_word_suffix=END_OF_WORD, special_tokens=alphabet, show_progress=False)
    )
    learned = json.loads(words.to_str())["model"]
    vocabulary = dict(learned["vocab"])
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[special] = len(vocabulary)
    merges: Any = [tuple(merge) for merge in learned["merges"]]
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=LONGEST)


def clip_config() -> CLIPTextConfig:
    size = len(clip_tokenizer())
    return CLIPTextConfig(
        vocab_size=size, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=WIDTH, max_position_embeddings=LONGEST, bos_token_id=size - 2, eos_token_id=size - 1,
        pad_token_id=size - 1,
    )  # fmt: skip


def t5_tokenizer() -> Any:
    """Build a tokenizer with a piece for each word; other words are letters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", -3.0) for word in WORDS] + [(one, -6.0) for one in CHARACTERS]
    return T5Tokenizer(vocab=pieces, extra_ids=0)


def t5() -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(t5_tokenizer()), d_model=2 * WIDTH, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return T5EncoderModel(config)
