# SPDX-License-Identifier: Apache-2.0
"""Rules between distillation and the other sections."""

from collections.abc import Iterator

from verl.config.algorithm import ESTIMATOR_NEEDS, AlgorithmConfig
from verl.config.data import RowsConfig
from verl.config.distillation import TEACHERS, DistillationConfig
from verl.config.trainer import TrainerConfig
from verl.config.worker import WorkerConfig

ALONE = "`distillation.distillation_loss.use_task_rewards=false`"


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
