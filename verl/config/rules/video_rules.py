# SPDX-License-Identifier: Apache-2.0
"""Rules of models that make videos, read from the configs of their folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.config.files.model_files import PIPELINE, read_json
from verl.config.rollout import RolloutConfig
from verl.config.worker import WorkerConfig

VIDEOS = ("WanPipeline",)  # pipelines that make videos
MODEL = "worker.actor.model.model_path"
EULER, UNIPC = "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"
# Options of schedulers that replace the sigmas of a flow, or need a length.
OTHER_SIGMAS = (
    "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_dynamic_shifting", "invert_sigmas",
)  # fmt: skip


def makes_videos(folder: Path) -> bool:
    """Return whether a folder is a diffusers pipeline that makes videos."""
    return (read_json(folder / PIPELINE) or {}).get("_class_name") in VIDEOS


def may_divide_tokens(folder: Path) -> bool:
    """Return whether the tokens of a model can be divided over ranks: of videos, or not known yet."""
    return makes_videos(folder) or not (folder / PIPELINE).is_file()


def video_problems(worker: WorkerConfig, folder: Path) -> Iterator[str]:
    """Yield what is wrong with the folder of a model that makes videos, their size or their division."""
    if _has_second_transformer(folder):
        yield (
            f"`{MODEL}` ({folder}) must have one transformer, got a second one in `transformer_2`, as in Wan"
            " 2.2 A14B: use Wan 2.1 or Wan 2.2 TI2V-5B"
        )
    yield from _scheduler(folder)
    yield from _size(worker.rollout, folder)
    heads, ranks = _transformer(folder).get("num_attention_heads", 1), worker.actor.ulysses_size
    if heads % ranks:
        yield (
            f"`worker.actor.ulysses_size` ({ranks}) must divide the {heads} attention heads of the"
            " transformer"
        )


def _has_second_transformer(folder: Path) -> bool:
    index = read_json(folder / PIPELINE) or {}
    return any(index.get("transformer_2") or ()) or index.get("boundary_ratio") is not None


def _scheduler(folder: Path) -> Iterator[str]:
    path = folder / "scheduler" / "scheduler_config.json"
    config = read_json(path) or {}
    name = config.get("_class_name")
    if name not in (EULER, UNIPC):
        yield f"the scheduler of `{MODEL}` ({folder}) must be {EULER} or {UNIPC}, got {name}"
        return
    required: dict[str, Any] = dict.fromkeys(OTHER_SIGMAS, False)
    if name == UNIPC:
        required |= {
            "use_flow_sigmas": True, "prediction_type": "flow_prediction", "final_sigmas_type": "zero"
        }  # fmt: skip
    defaults = {"final_sigmas_type": "zero", "prediction_type": "epsilon"}
    for key, value in required.items():
        found = config.get(key, defaults.get(key, False))
        if found != value:
            yield (
                f"the scheduler of `{MODEL}` ({folder}) must have the sigmas of a flow that ends at 0: set"
                f" `{key}` to {json.dumps(value)} in {path}, got {json.dumps(found)}"
            )


def _size(rollout: RolloutConfig, folder: Path) -> Iterator[str]:
    vae = read_json(folder / "vae" / "config.json") or {}
    time, space = vae.get("scale_factor_temporal", 4), vae.get("scale_factor_spatial", 8)
    frames, patch = rollout.num_frames, _transformer(folder).get("patch_size", [1, 2, 2])
    if (frames - 1) % time:
        lower = frames - (frames - 1) % time
        yield (
            f"`worker.rollout.num_frames` ({frames}) must be a multiple of {time} plus 1, since the VAE has a"
            f" latent for the first frame and one for each {time} after it: set {lower} or {lower + time}"
        )
    for option, pixels, side in (("height", rollout.height, patch[1]), ("width", rollout.width, patch[2])):
        step = space * side
        if pixels % step:
            lower = pixels - pixels % step
            nearest = f"{lower} or {lower + step}" if lower else f"{step}"
            yield (
                f"`worker.rollout.{option}` ({pixels}) must be a multiple of {step}, the pixels of a patch of"
                f" the transformer ({side}) in latents of the VAE ({space}): set {nearest}"
            )


def _transformer(folder: Path) -> dict[str, Any]:
    return read_json(folder / "transformer" / "config.json") or {}
