# SPDX-License-Identifier: Apache-2.0
"""Rules of runs that make pictures (`trainer.diffusion`): features of text runs that they lack."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl.config.algorithm import EXACT_KL, AlgorithmConfig
from verl.config.data import DataConfig
from verl.config.files.model_files import PIPELINE, pipeline_folder, read_json
from verl.config.model import ModelConfig
from verl.config.rollout import RolloutConfig
from verl.config.rules.video_rules import (
    EULER,
    MODEL,
    VIDEOS,
    makes_videos,
    may_divide_tokens,
    video_problems,
)
from verl.config.trainer import TrainerConfig
from verl.config.worker import WorkerConfig

KEY = "trainer.diffusion=true"
LONGEST_PROMPTS = {
    "StableDiffusion3Pipeline": 256,
    "FluxPipeline": 512,
    "QwenImagePipeline": 1019,
    "WanPipeline": 512,
}
# Options of the model that select parts of transformers models, or change these.
TEXT_ONLY = (
    "override_config", "compile_blocks", "freeze_vision_tower", "freeze_audio_tower", "family",
    "router_aux_loss_coef", "freeze_router",
)  # fmt: skip


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


def diffusion_problems(
    data: DataConfig, worker: WorkerConfig, algorithm: AlgorithmConfig, trainer: TrainerConfig
) -> Iterator[str]:
    """Yield what is wrong with a run that makes pictures, or with a text run of a model that makes them."""
    model = worker.actor.model.model_path
    folder = pipeline_folder(model)
    if not trainer.diffusion:
        if folder is not None:
            yield f"`worker.actor.model.model_path` ({model}) is a diffusion model: set `{KEY}` to train it"
        if algorithm.kl_penalty == "flow_grpo":
            yield f"`algorithm.kl_penalty` must not be flow_grpo without `{KEY}`: text has `full`"
        return
    if find_spec("diffusers") is None:
        yield f"`{KEY}` needs diffusers: pip install 'easy-verl[diffusion]'"
    if folder is None and Path(model or "").is_dir():
        yield (
            f"`worker.actor.model.model_path` ({model}) must be a folder of diffusers, with a {PIPELINE},"
            f" if `{KEY}`"
        )
    yield from _absent(worker, algorithm, trainer)
    yield from _steps(worker.rollout)
    if not algorithm.disable_kl:
        yield from _reference(algorithm, has_adapters=worker.actor.model.lora.is_used)
    if folder is not None:
        longest = LONGEST_PROMPTS.get((read_json(folder / PIPELINE) or {}).get("_class_name", ""), math.inf)
        if data.max_prompt_length > longest:
            yield (
                f"`data.max_prompt_length` ({data.max_prompt_length}) must be at most {longest}, the tokens"
                f" that the text encoders of `worker.actor.model.model_path` ({model}) read"
            )
        problems = video_problems if makes_videos(folder) else pipeline_problems
        yield from problems(worker, folder)


def _absent(worker: WorkerConfig, algorithm: AlgorithmConfig, trainer: TrainerConfig) -> Iterator[str]:
    mode = trainer.async_training.mode
    wrong: dict[str, tuple[bool, Any, Any]] = {
        "worker.hybrid_engine": (worker.hybrid_engine, True, worker.hybrid_engine),
        "trainer.async_training.mode": (mode == "off", "off", mode),
        "worker.rollout.multi_turn.enable": (not worker.rollout.multi_turn.enable, False, True),
        "worker.reward_model.model.model_path": (not worker.reward_model.is_used, None, "a model"),
        "algorithm.adv_estimator": (
            not (algorithm.use_critic or algorithm.use_prime), "one without a model of its own, such as grpo",
            algorithm.adv_estimator,
        ),
        "worker.actor.ulysses_size": (
            worker.actor.ulysses_size == 1 or may_divide_tokens(Path(worker.actor.model.model_path or "")),
            "1 for pictures", worker.actor.ulysses_size,
        ),
        "worker.actor.observers": (not worker.actor.observers, [], worker.actor.observers),
        "worker.actor.ring_size": (worker.actor.ring_size == 1, 1, worker.actor.ring_size),
        "worker.actor.fsdp.expert_parallel_size": (
            worker.actor.fsdp.expert_parallel_size == 1, 1, worker.actor.fsdp.expert_parallel_size,
        ),
        "worker.rollout.tensor_parallel_size": (
            worker.rollout.tensor_parallel_size == 1, 1, worker.rollout.tensor_parallel_size,
        ),
        "worker.actor.router_replay": (
            worker.actor.router_replay == "off", "off", worker.actor.router_replay,
        ),
        "worker.actor.entropy_coef": (worker.actor.entropy_coef == 0, 0, worker.actor.entropy_coef),
    }  # fmt: skip
    model, plain = worker.actor.model, ModelConfig()
    for name in TEXT_ONLY:
        value, default = getattr(model, name), getattr(plain, name)
        wrong[f"worker.actor.model.{name}"] = (value == default, default, value)
    for option, (is_right, rule, value) in wrong.items():
        if not is_right:
            yield f"`{option}` must be {rule} with `{KEY}`, got {value}"


def _steps(rollout: RolloutConfig) -> Iterator[str]:
    if rollout.num_steps < 2:
        yield f"`worker.rollout.num_steps` must be at least 2 with `{KEY}`, got {rollout.num_steps}"
    window = rollout.sde_window
    if window is not None and not (len(window) == 2 and 0 <= window[0] < window[1] <= rollout.num_steps - 1):
        yield (
            f"`worker.rollout.sde_window` must be [FIRST, STOP] with 0 <= FIRST < STOP <= `num_steps` - 1"
            f" ({rollout.num_steps - 1}), got {window}: the last step has no noise"
        )
    if rollout.noise_level == 0:
        yield "`worker.rollout.noise_level` must be above 0: without noise nothing is sampled to learn from"
    if rollout.sde_type == "cps" and rollout.noise_level > 1:
        yield f"`worker.rollout.noise_level` must be at most 1 with `sde_type=cps`, got {rollout.noise_level}"


def _reference(algorithm: AlgorithmConfig, *, has_adapters: bool) -> Iterator[str]:
    if not has_adapters:
        yield (
            f"`algorithm.disable_kl` must be true without adapters with `{KEY}`: the reference is the model"
            " without them; or set `worker.actor.model.lora.rank`"
        )
    if algorithm.kl_penalty not in EXACT_KL:
        yield f"`algorithm.kl_penalty` must be flow_grpo with `{KEY}`, got {algorithm.kl_penalty}"
