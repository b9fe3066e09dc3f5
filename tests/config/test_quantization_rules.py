# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from verl.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from verl.config.rollout import RolloutConfig
from verl.config.rules.engine_rules import quantization_problems
from verl.config.trainer import TrainerConfig

ENGINE = RolloutConfig(quantization="fp8")
CORRECTED = AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(rollout_is="token"))
GPU = TrainerConfig(device="cuda")


def test_an_engine_with_quantized_weights_needs_a_loss_that_is_corrected():
    [problem] = quantization_problems(ENGINE, AlgorithmConfig(), GPU)

    for part in (
        "`worker.rollout.quantization`=fp8", "`algorithm.rollout_correction.rollout_is` must be", "null",
        "bypass_mode=true",
    ):  # fmt: skip
        assert part in problem


@pytest.mark.parametrize(
    "correction",
    [
        RolloutCorrectionConfig(rollout_is="token"),
        RolloutCorrectionConfig(rollout_is="sequence"),
        RolloutCorrectionConfig(bypass_mode=True),
    ],
)
def test_weights_of_either_level_and_the_ratio_of_bypassing_correct_it(correction):
    assert not list(quantization_problems(ENGINE, AlgorithmConfig(rollout_correction=correction), GPU))
    assert not list(ENGINE.problems("worker.rollout"))


def test_an_engine_without_it_needs_no_correction():
    assert not list(quantization_problems(RolloutConfig(), AlgorithmConfig(), TrainerConfig(device="cpu")))


@pytest.mark.parametrize(
    ("trainer", "part"),
    [
        (TrainerConfig(device="cpu"), "on CPU (`trainer.device`), got 'fp8'"),
        (TrainerConfig(device="cuda", diffusion=True), "`trainer.diffusion=true`, got 'fp8'"),
    ],
)
def test_it_is_refused_where_nothing_would_quantize(trainer, part):
    [problem] = quantization_problems(ENGINE, CORRECTED, trainer)

    assert "`worker.rollout.quantization` must be null " in problem and part in problem


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (dict(name="hf", tensor_parallel_size=1), "`worker.rollout.quantization` must be null"),
        (dict(dtype="fp32"), "`worker.rollout.dtype` must be bf16 or fp16"),
        (dict(lora_sync="adapter"), "`worker.rollout.lora_sync` must be auto or merged"),
    ],
)
def test_options_of_the_engine_that_exclude_it_are_named(changes, part):
    [problem] = replace(ENGINE, **changes).problems("worker.rollout")

    assert part in problem and "fp8" in problem


@pytest.mark.parametrize("name", ["sglang", "hf"])
def test_adapters_go_without_their_base_to_vllm_only(name):
    config = RolloutConfig(name=name, tensor_parallel_size=1, lora_sync="adapter")
    [problem] = config.problems("worker.rollout")

    assert problem == (
        f"`worker.rollout.lora_sync` must be auto or merged with `worker.rollout.name={name}`, got 'adapter':"
        " whole weights are synced"
    )
    assert not list(RolloutConfig(lora_sync="adapter").problems("worker.rollout"))
