# SPDX-License-Identifier: Apache-2.0
"""Runs with divided layers learn what runs with whole ones learn, and the engine agrees."""

import pytest

from tests.helpers.quickstart import make_folder
from tests.helpers.training import learned, quickstart_arguments, train
from tests.trainer.test_algorithms import REWARD
from verl.models.tiny import save_tiny_model

pytestmark = [pytest.mark.heavy, pytest.mark.nightly("verl/models/divided_layers.py", "verl/workers")]

STEPS = 2
SIZES = [f"worker.{role}.fsdp.tensor_parallel_size=2" for role in ("actor", "ref", "critic")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module")
def model(folder):
    return save_tiny_model(folder / "divided", "qwen3")


def run(folder, model, name, *options):
    common = [
        f"worker.reward.reward_function={REWARD}:compute_score",
        f"worker.critic.model.model_path={model}",
        "worker.critic.global_batch_size=2",
        "worker.critic.fsdp.mp_param_dtype=fp32",
        "worker.critic.optim.lr=1e-3",
        "worker.actor.fsdp.mp_param_dtype=fp32",
        "worker.rollout.dtype=fp32",
        "worker.ref.fsdp.mp_param_dtype=fp32",
        "worker.ref.fsdp.torch_dtype=fp32",
        "algorithm.adv_estimator=gae",
        "algorithm.disable_kl=false",
        "algorithm.use_kl_loss=true",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "trainer.save_freq=1",
        "trainer.save_limit=-1",
        f"trainer.max_steps={STEPS}",
    ]
    return train(folder / name, *quickstart_arguments(folder, model, *common, *options))


@pytest.fixture(scope="module")
def divided(folder, model):
    return run(folder, model, "divided_run", *SIZES)


def assert_equal(metrics, expected, step):
    """To the rounding of float32: the same sequences were sampled, and the same was learned from them."""
    found, wanted = learned(metrics[step]), learned(expected[step])
    own = {key for key in wanted if not key.startswith(("global_seqlen/", "rollout/", "rollout_corr/"))}
    assert {key: found[key] for key in own} == pytest.approx(
        {key: wanted[key] for key in own}, rel=1e-3, abs=1e-5
    )


def test_the_engine_computes_what_divided_layers_compute_before_and_after_updates(divided):
    for step in range(1, STEPS + 1):
        assert divided[step]["rollout/log_probs_diff_max"] < 1e-4
    assert abs(divided[STEPS]["actor/kl_loss"]) > 0.001, "the policy moved away from the reference"


def test_an_engine_gets_the_adapters_of_divided_layers(folder, model):
    options = ["worker.actor.model.lora.rank=4", "worker.actor.optim.lr=1e-2", "algorithm.adv_estimator=grpo"]

    metrics = run(folder, model, "adapters", SIZES[0], *options)

    assert metrics[STEPS]["rollout/log_probs_diff_max"] < 1e-4
    assert abs(metrics[STEPS]["actor/kl_loss"]) > 0.001, "the policy moved away from the reference"


@pytest.mark.slow
def test_a_teacher_of_divided_layers_teaches_the_same(folder, model):
    key = "distillation.teacher_models.big"
    teacher = save_tiny_model(folder / "teacher", "qwen3", num_hidden_layers=3)
    options = [
        "distillation.enabled=true",
        "distillation.distillation_loss.loss_mode=k3",
        f"{key}.model_path={teacher}",
        f"{key}.fsdp.mp_param_dtype=fp32",
        f"{key}.fsdp.torch_dtype=fp32",
        "algorithm.adv_estimator=grpo",
    ]

    whole = run(folder, model, "taught", *options)
    divided = run(folder, model, "taught_divided", *SIZES[:2], f"{key}.fsdp.tensor_parallel_size=2", *options)

    for step in range(1, STEPS + 1):
        assert_equal(divided, whole, step)
    assert abs(whole[STEPS]["distillation/kl"]) > 0.001


@pytest.mark.slow
def test_a_run_with_divided_layers_logs_what_one_with_whole_layers_logs(divided, folder, model):
    whole = run(folder, model, "whole")

    for step in range(1, STEPS + 1):
        assert_equal(divided, whole, step)
    checkpoint = f"trainer.load_checkpoint_path={folder / 'whole' / 'global_step_1'}"
    resumed = run(folder, model, "resumed", *SIZES, checkpoint)
    assert_equal(resumed, whole, STEPS)
