# SPDX-License-Identifier: Apache-2.0
"""Rules between distillation and the other sections."""

from collections.abc import Iterator, Mapping

from verl.config.algorithm import ESTIMATOR_NEEDS, AlgorithmConfig
from verl.config.data import RowsConfig
from verl.config.distillation import FORWARD_TOP, TEACHERS, DistillationConfig, DistillationLossConfig
from verl.config.reward_servers import TEACHER, RewardServerConfig
from verl.config.rollout import RolloutConfig
from verl.config.trainer import TrainerConfig
from verl.config.worker import WorkerConfig

ALONE = "`distillation.distillation_loss.use_task_rewards=false`"
LOADED = f"load the teacher instead, `{TEACHERS}.NAME.model_path`"


def distillation_problems(
    distillation: DistillationConfig,
    worker: WorkerConfig,
    algorithm: AlgorithmConfig,
    trainer: TrainerConfig,
    data: RowsConfig,
) -> Iterator[str]:
    if not distillation.enabled:
        return
    if trainer.diffusion:
        yield "`distillation.enabled` must be false with `trainer.diffusion=true`: teachers write text"
    for name, teacher in distillation.teachers.items():
        if teacher.num_video_frames is not None and worker.rollout.multi_turn.enable:
            yield (
                f"`{TEACHERS}.{name}.num_video_frames` must be null with `worker.rollout.multi_turn`, whose"
                " conversations may show media that only the policy has seen"
            )
        if teacher.num_video_frames is not None and data.streaming:
            yield (
                f"`{TEACHERS}.{name}.num_video_frames` must be null with `data.streaming`: the prompts of all"
                " rows are measured for the teacher before the run; set data.streaming=false"
            )
    if not distillation.is_alone:
        return
    if algorithm.use_reference and not algorithm.use_kl_loss:
        yield (
            f"`algorithm.disable_kl` must be true with {ALONE}, which has no rewards to charge the KL to:"
            " set it, or `algorithm.use_kl_loss=true`"
        )
    if algorithm.use_pf_ppo:
        yield f"`algorithm.use_pf_ppo` must be false with {ALONE}: it resamples by rewards"
    needed = sorted(algorithm.needs & ESTIMATOR_NEEDS.keys() - {"group", "reward_components"})
    if needed:
        yield (
            f"`algorithm.adv_estimator` ({algorithm.adv_estimator}) needs {needed[0]}, which nothing reads"
            f" with {ALONE}: leave it at grpo"
        )


def served_teacher_problems(
    distillation: DistillationConfig,
    servers: Mapping[str, RewardServerConfig],
    rollout: RolloutConfig,
    max_sequence_length: int,
) -> Iterator[str]:
    served = distillation.served
    named = {str(teacher.server): f"{TEACHERS}.{name}.server" for name, teacher in served.items()}
    if served:
        path = next(iter(named.values()))
        yield from _loss_problems(distillation.distillation_loss, path)
        if rollout.temperature != 1:
            yield (
                f"`worker.rollout.temperature` must be 1 with `{path}`, got {rollout.temperature}: servers"
                f" give log-probs at temperature 1, and others cannot be computed from them; set it, or"
                f" {LOADED}"
            )
    for name, path in named.items():
        if name not in servers or not servers[name].teaches:
            found = f"`reward_servers.{name}` of another kind" if name in servers else repr(name)
            yield (
                f"`{path}` must name a model of `reward_servers` with `kind={TEACHER}`, got {found}: set"
                f" `reward_servers.{name}.kind={TEACHER}` and its `model_path` or `url`"
            )
        elif (limit := servers[name].max_model_len) is not None and limit <= max_sequence_length:
            yield (
                f"`reward_servers.{name}.max_model_len` ({limit}) must be at least {max_sequence_length + 1}:"
                " prompt, response, and a token that the server adds"
            )
    for name, server in servers.items():
        if server.teaches and name not in named:
            yield (
                f"`reward_servers.{name}` has `kind={TEACHER}`, and nothing asks it: set"
                f" `{TEACHERS}.NAME.server={name}` and `distillation.enabled=true`"
            )


def _loss_problems(loss: DistillationLossConfig, path: str) -> Iterator[str]:
    mode = f"`distillation.distillation_loss.loss_mode` ({loss.loss_mode})"
    if loss.is_exact:
        yield (
            f"{mode} needs the teacher's whole distribution, and with `{path}` a server gives its most likely"
            f" tokens: set it to {FORWARD_TOP} or an estimator such as k3, or {LOADED}"
        )
    elif loss.is_top and not loss.is_forward:
        yield (
            f"{mode} needs the logarithm of the probability of all other tokens, which with `{path}` is what"
            f" rounding leaves of 1 minus a server's numbers: set it to {FORWARD_TOP}, or {LOADED}"
        )
