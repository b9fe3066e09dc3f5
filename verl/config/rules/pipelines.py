# SPDX-License-Identifier: Apache-2.0
"""Pipelines of diffusers that make pictures, and what the files of their parts ask of options."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.files.model_files import PIPELINE, read_json
from verl.config.rollout import RolloutConfig
from verl.config.rules.video_rules import EULER, MODEL, VIDEOS
from verl.config.worker import WorkerConfig


@dataclass(frozen=True)
class Pipeline:
    """A class of pipelines.

    Attributes:
        patch: Latents of a token in height and in width; None: `patch_size` of the transformer's config.
        reads_guidance: The transformer reads the guidance scale if its config says so.
        schedulers: Classes of schedulers whose steps are those of a flow.
    """

    patch: int | None = None
    reads_guidance: bool = False
    schedulers: tuple[str, ...] = (EULER,)


PIPELINES: dict[str, Pipeline] = {
    "StableDiffusion3Pipeline": Pipeline(),
    "FluxPipeline": Pipeline(patch=2, reads_guidance=True),
    "QwenImagePipeline": Pipeline(patch=2),
}


def pipeline_problems(worker: WorkerConfig, folder: Path) -> Iterator[str]:
    """Yield problems of a folder with a `model_index.json`: parts that cannot be trained, or do not fit."""
    name = (read_json(folder / PIPELINE) or {}).get("_class_name")
    if name not in PIPELINES:
        yield f"`{MODEL}` ({folder}) is a {name}, must be one of {sorted([*PIPELINES, *VIDEOS])}"
        return
    pipeline, rollout = PIPELINES[name], worker.rollout
    scheduler = (read_json(folder / "scheduler" / "scheduler_config.json") or {}).get("_class_name")
    if scheduler not in pipeline.schedulers:
        yield (
            f"the scheduler of `{MODEL}` ({folder}) must be one of {pipeline.schedulers}, whose steps are"
            f" those of a flow, got {scheduler}"
        )
    transformer, vae = (read_json(folder / part / "config.json") or {} for part in ("transformer", "vae"))
    yield from _size(rollout, pipeline, transformer, vae)
    if pipeline.reads_guidance and not transformer.get("guidance_embeds") and rollout.guidance_scale > 1:
        yield (
            f"`worker.rollout.guidance_scale` must be at most 1 for `{MODEL}` ({folder}), whose transformer"
            " reads no guidance (`guidance_embeds` is false, as in FLUX.1-schnell), got"
            f" {rollout.guidance_scale}"
        )


def _size(
    rollout: RolloutConfig, pipeline: Pipeline, transformer: Mapping[str, Any], vae: Mapping[str, Any]
) -> Iterator[str]:
    blocks = vae.get("block_out_channels", [1])
    halvings = len(vae.get("temperal_downsample", blocks[1:]))  # the first of VAEs for images and videos
    patch = pipeline.patch or transformer.get("patch_size", 1)
    step, size = 2**halvings * patch, rollout.resolution
    if size % step:
        yield (
            f"`worker.rollout.resolution` ({size}) must be a multiple of {step}, the pixels of a patch of the"
            f" transformer ({patch}) in latents of the VAE"
        )
