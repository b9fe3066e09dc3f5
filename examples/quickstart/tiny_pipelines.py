# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines of diffusion models with random weights and all of their parts, for tests and demos."""

import json
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from verl.utils.weight_files import share_weights

# Their classes take more than their annotations say.
parts: Any = diffusers
texts: Any = transformers

COLORS = ("red", "green", "blue", "yellow", "black", "white")
OTHERS = "a all and color dark in is it light of paint picture the wall"
WORDS = (*COLORS, *OTHERS.split())
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789,.'"
WIDTH = 32  # of text states
LONGEST = 16  # tokens that CLIP reads
END_OF_WORD = "</w>"
LATENTS = 4  # channels of a latent

CHANNELS = 16  # of the VAE, a multiple of twice the latent channels
MEAN, STD = [0.1, -0.2, 0.3, 0.0], [1.5, 0.8, 1.2, 1.0]  # of latents


def saved(build: Callable[..., Any]) -> Callable[..., Path]:
    """Return a function that builds a pipeline with seeded weights, saves it and returns the folder."""

    @wraps(build)
    def save(folder: Path, *, seed: int = 0, **options: Any) -> Path:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            pipeline = build(**options)
        pipeline.save_pretrained(folder)
        share_weights(folder, "model_index.json")
        return folder

    return save


@saved
def save_tiny_sd3(layers: int = 2, size: int = 16) -> Any:
    """Save a Stable Diffusion 3 whose images have `size` x `size` pixels at least."""
    return parts.StableDiffusion3Pipeline(
        transformer=parts.SD3Transformer2DModel(
            sample_size=size // 2, patch_size=2, in_channels=LATENTS, num_layers=layers,
            attention_head_dim=16, num_attention_heads=4, joint_attention_dim=2 * WIDTH,
            caption_projection_dim=64, pooled_projection_dim=2 * WIDTH, out_channels=LATENTS,
            pos_embed_max_size=32, qk_norm="rms_norm",
        ),
        scheduler=parts.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=kl_vae(),
        text_encoder=texts.CLIPTextModelWithProjection(clip_config()), tokenizer=clip_tokenizer(),
        text_encoder_2=texts.CLIPTextModelWithProjection(clip_config()), tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5(), tokenizer_3=t5_tokenizer(),
    )  # fmt: skip


@saved
def save_tiny_wan(layers: int = 2) -> Any:
    """Save a Wan whose VAE has a latent for 4 x 4 pixels of four frames.

    Its scheduler is that of Wan 2.1, UniPC with the sigmas of a flow.
    """
    return parts.WanPipeline(
        transformer=parts.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=16, in_channels=LATENTS,
            out_channels=LATENTS, text_dim=2 * WIDTH, freq_dim=64, ffn_dim=128, num_layers=layers,
            rope_max_seq_len=32,
        ),
        scheduler=parts.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        vae=_wan_vae(), text_encoder=texts.UMT5EncoderModel(texts.UMT5Config(**t5_options())),
        tokenizer=t5_tokenizer(),
    )  # fmt: skip


def kl_vae(shift_factor: float = 0.0, scaling_factor: float = 1.0) -> Any:
    vae = parts.AutoencoderKL(
        block_out_channels=(CHANNELS, CHANNELS), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, in_channels=3, out_channels=3, latent_channels=LATENTS,
        layers_per_block=1, norm_num_groups=1, shift_factor=shift_factor, scaling_factor=scaling_factor,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    paint_latents(vae.decoder)
    return vae


def _wan_vae() -> Any:
    vae = parts.AutoencoderKLWan(
        base_dim=CHANNELS, z_dim=LATENTS, dim_mult=[1, 1, 1], num_res_blocks=1,
        temperal_downsample=[True, True], latents_mean=MEAN, latents_std=STD,
        scale_factor_temporal=4, scale_factor_spatial=4,
    )  # fmt: skip
    set_layer(vae.post_quant_conv, center(torch.eye(LATENTS), vae.post_quant_conv))
    paint_latents(vae.decoder)
    for name, module in vae.decoder.named_modules():
        if name.endswith("conv_shortcut") and hasattr(module, "weight"):
            # An upsampler halves the channels, and the next block has all again.
            set_layer(module, center(torch.eye(CHANNELS // 2).repeat(2, 1), module))
        elif name.endswith("time_conv"):  # a latent gives four equal frames
            set_layer(module, center(torch.eye(CHANNELS).repeat(2, 1), module))
    return vae


def paint_latents(decoder: Any) -> None:
    """Set a decoder to paint three of its latent channels, divided by the root mean square of all.

    So it reaches every color, which random ones do not. Its blocks pass on what they read, and the last SiLU
    reads each channel and its negative, `silu(z) - silu(-z) = z`.
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
    copies = CHANNELS // len(signed)  # in what the last norm reads
    set_layer(last, center(read.repeat(1, copies) / copies, last))


def set_layer(module: Any, weight: Tensor | float) -> None:
    """Set the weights of a layer, and its bias to zero."""
    module.weight.data.copy_(torch.as_tensor(weight))
    module.bias.data.zero_()


def center(matrix: Tensor, convolution: Any) -> Tensor:
    """Return the weight of a convolution that applies a matrix (out, in) to each pixel.

    A causal one reads earlier frames too; the last of its frames is the current one.
    """
    weight = torch.zeros_like(convolution.weight.data)  # (out, in, size, size), or with frames before
    current = weight if weight.ndim == 4 else weight[:, :, -1]
    current[..., current.shape[-2] // 2, current.shape[-1] // 2] = matrix
    return weight


def clip_tokenizer() -> Any:
    """Build a tokenizer with a token for each word; other words are letters."""
    words = Tokenizer(BPE(end_of_word_suffix=END_OF_WORD))
    words.pre_tokenizer = WhitespaceSplit()
    alphabet = [*CHARACTERS, *(f"{one}{END_OF_WORD}" for one in CHARACTERS)]
    words.train_from_iterator(
        WORDS, BpeTrainer(end_of_word_suffix=END_OF_WORD, special_tokens=alphabet, show_progress=False)
    )
    learned = vocabulary_of(words, ("<|startoftext|>", "<|endoftext|>"))
    return texts.CLIPTokenizer(**learned, model_max_length=LONGEST)


def vocabulary_of(trained: Tokenizer, special_tokens: Sequence[str]) -> dict[str, Any]:
    """Return the vocabulary of a trained tokenizer, with special tokens at its end, and the merges."""
    learned = json.loads(trained.to_str())["model"]
    vocabulary = dict(learned["vocab"])
    for special in special_tokens:
        vocabulary[special] = len(vocabulary)
    return {"vocab": vocabulary, "merges": [tuple(merge) for merge in learned["merges"]]}


def clip_config() -> Any:
    size = len(clip_tokenizer())
    return texts.CLIPTextConfig(
        vocab_size=size, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=WIDTH, max_position_embeddings=LONGEST, bos_token_id=size - 2, eos_token_id=size - 1,
        pad_token_id=size - 1,
    )  # fmt: skip


def t5_tokenizer() -> Any:
    """Build a tokenizer with a piece for each word; other words are letters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", -3.0) for word in WORDS] + [(one, -6.0) for one in CHARACTERS]
    return texts.T5Tokenizer(vocab=pieces, extra_ids=0)


def t5_options() -> dict[str, Any]:
    return dict(
        vocab_size=len(t5_tokenizer()), d_model=2 * WIDTH, d_kv=16, d_ff=64, num_layers=2, num_heads=2
    )


def t5() -> Any:
    return texts.T5EncoderModel(texts.T5Config(**t5_options(), feed_forward_proj="gated-gelu"))
