# SPDX-License-Identifier: Apache-2.0
"""Rules of an engine that samples with quantized weights (`worker.rollout.quantization`)."""

from collections.abc import Iterator

from verl.config.algorithm import AlgorithmConfig
from verl.config.rollout import RolloutConfig
from verl.config.trainer import TrainerConfig

KEY = "`worker.rollout.quantization`"


def quantization_problems(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, trainer: TrainerConfig
) -> Iterator[str]:
    """Yield why the policy that samples may not be quantized."""
    value, correction = rollout.quantization, algorithm.rollout_correction
    if value is None:
        return
    if trainer.diffusion:
        yield f"{KEY} must be null with `trainer.diffusion=true`, got {value!r}: it is for engines of text"
        return
    if trainer.device == "cpu":
        yield cpu_problem(value)
    if correction.rollout_is is None and not correction.bypass_mode:
        yield (
            f"{KEY}={value} samples from another policy than the one that is trained, so"
            " `algorithm.rollout_correction.rollout_is` must be token or sequence, got null; or set"
            " `algorithm.rollout_correction.bypass_mode=true`, whose ratio is trainer to engine"
        )


def cpu_problem(value: str) -> str:
    return (
        f"{KEY} must be null on CPU (`trainer.device`), got {value!r}: its matrix products exist on GPUs"
        " only; set it to null, or `trainer.device` to a kind of GPU"
    )
