# SPDX-License-Identifier: Apache-2.0
"""The families of diffusion models, the folder of a model, and the family of a folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl.config.files.model_files import PIPELINE
from verl.config.model import ModelConfig
from verl.diffusion.families.interface import (
    GUIDANCE,
    JOINT_ATTENTION,
    PATCH,
    TIMES,
    Conditions,
    DiffusionFamily,
    PackedFamily,
    Size,
    decode_videos,
    pack,
    unpack,
)
from verl.diffusion.video_ulysses import TokenLayers

OPTION = "`worker.actor.model.model_path`"
TEMPLATE_END = 5  # tokens of Qwen-Image's chat template after the prompt, which the transformer reads too
STATES, MASK = "encoder_hidden_states", "encoder_hidden_states_mask"
NEARLY_ONE = 1 - 1e-5  # UniPC starts at 1 - 1e-6, because it takes the logarithm of 1 - sigma


class SD3(DiffusionFamily):
    """Stable Diffusion 3 and 3.5: images of one latent of 16 channels, an eighth of their size.

    CLIP twice, T5, and a joint transformer (https://arxiv.org/abs/2403.03206).
    """

    pipelines = ("StableDiffusion3Pipeline",)
    longest_prompt = 256
    adapted = JOINT_ATTENTION  # as in Flow-GRPO

    def encode(self, pipeline: Any, texts: Sequence[str], max_length: int) -> Conditions:
        states, _, pooled, _ = pipeline.encode_prompt(
            prompt=list(texts), prompt_2=None, prompt_3=None, do_classifier_free_guidance=False,
            device=pipeline.text_encoder.device, max_sequence_length=max_length,
        )  # fmt: skip
        return {"encoder_hidden_states": states, "pooled_projections": pooled}

    def latent_shape(self, pipeline: Any, size: Size) -> tuple[int, ...]:
        factor = pipeline.vae_scale_factor
        return pipeline.transformer.config.in_channels, size.height // factor, size.width // factor

    def size_step(self, pipeline: Any) -> int:
        return pipeline.vae_scale_factor * pipeline.transformer.config.patch_size


class Flux(PackedFamily):
    """FLUX.1: images of one latent of 16 channels, an eighth of their size.

    CLIP, T5, and a transformer (https://github.com/black-forest-labs/flux). FLUX.1-dev was distilled from
    guided predictions and reads their scale; FLUX.1-schnell reads none.
    """

    pipelines = ("FluxPipeline",)
    longest_prompt = 512
    reads_guidance = True
    # as in Flow-GRPO: also the feed-forward layers where image and text are apart
    adapted = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")

    def encode(self, pipeline: Any, texts: Sequence[str], max_length: int) -> Conditions:
        states, pooled, _ = pipeline.encode_prompt(
            prompt=list(texts), device=pipeline.text_encoder.device, max_sequence_length=max_length
        )
        return {"encoder_hidden_states": states, "pooled_projections": pooled}

    def predict(self, transformer: Any, latents: Tensor, times: Tensor, conditions: Conditions) -> Tensor:
        given = dict(conditions)
        if not transformer.config.guidance_embeds:
            given.pop(GUIDANCE, None)
        length = given["encoder_hidden_states"].shape[1]
        of_text = torch.zeros(length, 3, dtype=torch.long, device=latents.device)
        (found,) = transformer(
            hidden_states=pack(latents), timestep=times / TIMES, img_ids=_positions(latents), txt_ids=of_text,
            **given, return_dict=False,
        )  # fmt: skip
        return unpack(found, latents)


def _positions(latents: Tensor) -> Tensor:
    """Return the position of each token, (h w / 4, 3): 0, row, column."""
    rows, columns = (torch.arange(side // PATCH, device=latents.device) for side in latents.shape[-2:])
    return torch.cartesian_prod(rows.new_zeros(1), rows, columns)


class QwenImage(PackedFamily):
    """Qwen-Image: images of one latent of 16 channels, an eighth of their size; prompts keep their length.

    Qwen2.5-VL, and a transformer that reads its states (https://arxiv.org/abs/2508.02324).
    """

    pipelines = ("QwenImagePipeline",)
    longest_prompt = 1024 - TEMPLATE_END
    unguided = " "  # as its authors recommend
    # as in Flow-GRPO: also the feed-forward layers of image and text
    adapted = (*JOINT_ATTENTION, "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")

    def encode(self, pipeline: Any, texts: Sequence[str], max_length: int) -> Conditions:
        """Encode prompts, padded to the longest of them."""
        states, mask = pipeline.encode_prompt(
            prompt=list(texts), device=pipeline.text_encoder.device,
            max_sequence_length=max_length + TEMPLATE_END,
        )  # fmt: skip
        mask = torch.ones_like(states[..., 0]) if mask is None else mask
        return {STATES: states, MASK: mask.bool()}

    def join(self, parts: Sequence[Conditions]) -> Conditions:
        rows = {name: [row for part in parts for row in part[name]] for name in parts[0]}
        return {name: pad_sequence(values, batch_first=True) for name, values in rows.items()}

    def predict(self, transformer: Any, latents: Tensor, times: Tensor, conditions: Conditions) -> Tensor:
        shape = (1, latents.shape[-2] // PATCH, latents.shape[-1] // PATCH)
        (found,) = transformer(
            hidden_states=pack(latents), timestep=times / TIMES, img_shapes=[[shape]] * len(latents),
            **conditions, return_dict=False,
        )  # fmt: skip
        return unpack(found, latents)

    def guide(self, without: Tensor, with_prompt: Tensor, scale: float) -> Tensor:
        """Give the combination of `DiffusionFamily.guide` the length that tokens with the prompt have."""
        guided, wanted = pack(super().guide(without, with_prompt, scale)), pack(with_prompt)
        lengths = wanted.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return unpack(guided * lengths, without)

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """Return images of latents, which the VAE decodes as videos of one frame."""
        return decode_videos(vae, latents[:, :, None])[:, 0]


class Wan(DiffusionFamily):
    """Wan 2.1, and 2.2 with one transformer (https://arxiv.org/abs/2503.20314): videos of a prompt.

    `num_frames` is 4 k + 1: the first frame has its own latent, and so have every four after it.
    """

    pipelines = ("WanPipeline",)
    makes = "videos"
    longest_prompt = 512
    # of Flow-GRPO: self-attention and attention to the prompt
    adapted = tuple(f"attn{number}.to_{part}" for number in (1, 2) for part in ("k", "out.0", "q", "v"))
    layers = TokenLayers(
        first="blocks.0", last="proj_out", attention="attn1", projected=("norm_q", "norm_k", "to_v"),
        out="to_out.0",
    )  # fmt: skip

    def encode(self, pipeline: Any, texts: Sequence[str], max_length: int) -> Conditions:
        states, _ = pipeline.encode_prompt(
            prompt=list(texts), do_classifier_free_guidance=False, max_sequence_length=max_length,
            device=pipeline.text_encoder.device,
        )  # fmt: skip
        return {"encoder_hidden_states": states}

    def latent_shape(self, pipeline: Any, size: Size) -> tuple[int, ...]:
        time, space = pipeline.vae_scale_factor_temporal, pipeline.vae_scale_factor_spatial
        frames = (size.frames - 1) // time + 1
        return pipeline.transformer.config.in_channels, frames, size.height // space, size.width // space

    def size_step(self, pipeline: Any) -> int:
        return pipeline.vae_scale_factor_spatial * pipeline.transformer.config.patch_size[-1]

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        return decode_videos(vae, latents)

    def times(self, pipeline: Any, steps: int, size: Size) -> tuple[Tensor, Tensor]:
        sigmas, times = super().times(pipeline, steps, size)
        return torch.where(sigmas > NEARLY_ONE, torch.ones_like(sigmas), sigmas), times


FAMILIES: tuple[DiffusionFamily, ...] = (SD3(), Flux(), QwenImage(), Wan())


def family_of(folder: Path) -> DiffusionFamily:
    """Return the family of a diffusers folder.

    Raises:
        ValueError: It is not such a folder, or its pipeline has no family.
    """
    index = folder / PIPELINE
    if not index.is_file():
        raise ValueError(
            f"{OPTION} ({folder}) must be a folder of diffusers with a {PIPELINE}, which it lacks"
        )
    name = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
    known = {pipeline: family for family in FAMILIES for pipeline in family.pipelines}
    if name not in known:
        raise ValueError(f"{OPTION} ({folder}) is a {name}, must be one of {sorted(known)}")
    return known[name]


def downloaded(model: ModelConfig) -> Path:
    """Return the folder of a model; of one of the hub, whatever of it a pipeline needs is downloaded.

    Raises:
        ValueError: It is neither a folder nor a pipeline of the hub that can be reached.
    """
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline  # noqa: PLC0415 - local folders do without

    name = str(model.model_path)
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(DiffusionPipeline.download(name))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{OPTION} ({name}) is neither a folder nor a pipeline of the hub that can be reached: {error}"
        ) from error
