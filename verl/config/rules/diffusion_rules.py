# SPDX-License-Identifier: Apache-2.0
"""Rules of runs that make pictures or videos (`trainer.diffusion`), also those of the model's folder."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl.config.algorithm import EXACT_KL, AlgorithmConfig
from verl.config.data import DataConfig
from verl.config.files.model_files import PIPELINE, pipeline_folder, read_json
from verl.config.model import ModelConfig
from verl.config.rollout import RolloutConfig
from verl.config.schema import value_at
from verl.config.trainer import TrainerConfig
from verl.config.worker import WorkerConfig

KEY = "trainer.diffusion=true"
MODEL = "worker.actor.model.model_path"
EULER, UNIPC = "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"
# Options of schedulers that replace the sigmas of a flow, or need a length.
OTHER_SIGMAS = (
    "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_dynamic_shifting", "invert_sigmas",
)  # fmt: skip
# Options of the model that select parts of transformers models, or change these.
TEXT_ONLY = (
    "override_config", "freeze_vision_tower", "freeze_audio_tower", "family", "router_aux_loss_coef",
    "freeze_router",
)  # fmt: skip
REQUIRED: dict[str, Any] = {  # of the section `worker`: features of text runs are off
    "hybrid_engine": True,
    "rollout.multi_turn.enable": False,
    "rollout.tensor_parallel_size": 1,
    "reward_model.model.model_path": None,
    "actor.ring_size": 1,
    "actor.fsdp.expert_parallel_size": 1,
    "actor.fsdp.tensor_parallel_size": 1,
    "actor.router_replay": "off",
    "actor.entropy_coef": 0,
}


@dataclass(frozen=True)
class Pipeline:
    """A class of pipelines."""

    longest_prompt: int  # tokens that its text encoders read
    patch: int | None = None  # latents of a token in height and in width; None: `patch_size` of the model
    reads_guidance: bool = False  # the transformer does, if its config says so
    makes_videos: bool = False


PIPELINES = {
    "StableDiffusion3Pipeline": Pipeline(256),
    "FluxPipeline": Pipeline(512, patch=2, reads_guidance=True),
    "QwenImagePipeline": Pipeline(1019, patch=2),
    "WanPipeline": Pipeline(512, makes_videos=True),
}


def diffusion_problems(
    data: DataConfig, worker: WorkerConfig, algorithm: AlgorithmConfig, trainer: TrainerConfig
) -> Iterator[str]:
    """Yield what is wrong with a run that makes pictures, or with a text run of a model that makes them."""
    model = worker.actor.model.model_path
    folder = pipeline_folder(model)
    if not trainer.diffusion:
        if folder is not None:
            yield f"`{MODEL}` ({model}) is a diffusion model: set `{KEY}` to train it"
        if algorithm.kl_penalty == "flow_grpo":
            yield f"`algorithm.kl_penalty` must not be flow_grpo without `{KEY}`: text has `full`"
        return
    if find_spec("diffusers") is None:
        yield f"`{KEY}` needs diffusers: pip install 'easy-verl[diffusion]'"
    if folder is None and Path(model or "").is_dir():
        yield f"`{MODEL}` ({model}) must be a folder of diffusers, with a {PIPELINE}, if `{KEY}`"
    yield from _absent(worker, algorithm, trainer)
    yield from _steps(worker.rollout)
    if not algorithm.disable_kl:
        yield from _reference(algorithm, has_adapters=worker.actor.model.lora.is_used)
    if folder is not None:
        yield from pipeline_problems(data, worker, folder)


def pipeline_problems(data: DataConfig, worker: WorkerConfig, folder: Path) -> Iterator[str]:
    """Yield problems of a folder with a `model_index.json`: parts that cannot be trained, or do not fit."""
    name = _class_in(folder / PIPELINE)
    if name not in PIPELINES:
        yield f"`{MODEL}` ({folder}) is a {name}, must be one of {sorted(PIPELINES)}"
        return
    pipeline = PIPELINES[name]
    if data.max_prompt_length > pipeline.longest_prompt:
        yield (
            f"`data.max_prompt_length` ({data.max_prompt_length}) must be at most {pipeline.longest_prompt},"
            f" the tokens that the text encoders of `{MODEL}` ({worker.actor.model.model_path}) read"
        )
    if pipeline.makes_videos:
        yield from _videos(worker, folder)
    else:
        yield from _pictures(worker, folder, pipeline)


def _absent(worker: WorkerConfig, algorithm: AlgorithmConfig, trainer: TrainerConfig) -> Iterator[str]:
    actor, plain = worker.actor, ModelConfig()
    required = REQUIRED | {f"actor.model.{name}": getattr(plain, name) for name in TEXT_ONLY}
    found = [(f"worker.{key}", rule, value_at(worker, key)) for key, rule in required.items()]
    found.append(("trainer.async_training.mode", "off", trainer.async_training.mode))
    found.append(("worker.actor.model.compile_blocks", False, actor.model.compile_blocks is True))
    wrong = [(key, str(rule), value) for key, rule, value in found if value != rule]
    if actor.observers:
        wrong.append(("worker.actor.observers", "[]", actor.observers))
    if algorithm.use_critic or algorithm.use_prime:
        wrong.append(("algorithm.adv_estimator", "one without a model, like grpo", algorithm.adv_estimator))
    if actor.ulysses_size != 1 and not _may_divide_tokens(Path(actor.model.model_path or "")):
        wrong.append(("worker.actor.ulysses_size", "1 for pictures", actor.ulysses_size))
    for key, rule, value in wrong:
        yield f"`{key}` must be {rule} with `{KEY}`, got {value}"


def _may_divide_tokens(folder: Path) -> bool:
    """Return whether the tokens of a model can be divided over ranks: of videos, or not known yet."""
    pipeline = PIPELINES.get(_class_in(folder / PIPELINE) or "")
    return not (folder / PIPELINE).is_file() or (pipeline is not None and pipeline.makes_videos)


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


def _pictures(worker: WorkerConfig, folder: Path, pipeline: Pipeline) -> Iterator[str]:
    rollout, scheduler = worker.rollout, _class_in(folder / "scheduler" / "scheduler_config.json")
    if scheduler != EULER:
        yield (
            f"the scheduler of `{MODEL}` ({folder}) must be {EULER}, whose steps are those of a flow, got"
            f" {scheduler}"
        )
    transformer, vae = _config(folder, "transformer"), _config(folder, "vae")
    blocks = vae.get("block_out_channels", [1])
    halvings = len(vae.get("temperal_downsample", blocks[1:]))  # the first of VAEs for images and videos
    patch = pipeline.patch or transformer.get("patch_size", 1)
    step, size = 2**halvings * patch, rollout.resolution
    if size % step:
        yield (
            f"`worker.rollout.resolution` ({size}) must be a multiple of {step}, the pixels of a patch of the"
            f" transformer ({patch}) in latents of the VAE"
        )
    if pipeline.reads_guidance and not transformer.get("guidance_embeds") and rollout.guidance_scale > 1:
        yield (
            f"`worker.rollout.guidance_scale` must be at most 1 for `{MODEL}` ({folder}), whose transformer"
            " reads no guidance (`guidance_embeds` is false, as in FLUX.1-schnell), got"
            f" {rollout.guidance_scale}"
        )


def _videos(worker: WorkerConfig, folder: Path) -> Iterator[str]:
    index = read_json(folder / PIPELINE) or {}
    if any(index.get("transformer_2") or ()) or index.get("boundary_ratio") is not None:
        yield (
            f"`{MODEL}` ({folder}) must have one transformer, got a second one in `transformer_2`, as in Wan"
            " 2.2 A14B: use Wan 2.1 or Wan 2.2 TI2V-5B"
        )
    yield from _video_scheduler(folder)
    yield from _video_size(worker.rollout, folder)
    heads, ranks = _config(folder, "transformer").get("num_attention_heads", 1), worker.actor.ulysses_size
    if heads % ranks:
        yield (
            f"`worker.actor.ulysses_size` ({ranks}) must divide the {heads} attention heads of the"
            " transformer"
        )


def _video_scheduler(folder: Path) -> Iterator[str]:
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


def _video_size(rollout: RolloutConfig, folder: Path) -> Iterator[str]:
    vae = _config(folder, "vae")
    time, space = vae.get("scale_factor_temporal", 4), vae.get("scale_factor_spatial", 8)
    frames, patch = rollout.num_frames, _config(folder, "transformer").get("patch_size", [1, 2, 2])
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


def _config(folder: Path, part: str) -> dict[str, Any]:
    return read_json(folder / part / "config.json") or {}


def _class_in(file: Path) -> str | None:
    return (read_json(file) or {}).get("_class_name")
