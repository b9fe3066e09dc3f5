# SPDX-License-Identifier: Apache-2.0
"""Runs with divided experts learn what runs with whole ones learn, and the engine agrees."""

import pytest

from tests.helpers.quickstart import make_folder
from tests.helpers.training import learned, quickstart_arguments, train
from verl.models.tiny import save_tiny_model

pytestmark = [pytest.mark.heavy, pytest.mark.nightly("verl/models/mixture", "verl/workers")]

STEPS = 2
SIZES = ("worker.actor.fsdp.expert_parallel_size=2", "worker.ref.fsdp.expert_parallel_size=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def model(folder):
    return save_tiny_model(folder / "mixture", "qwen3_moe")


def run(folder, model, name, *options):
    common = [
        "worker.actor.fsdp.mp_param_dtype=fp32",
        "worker.rollout.dtype=fp32",
        "worker.ref.fsdp.mp_param_dtype=fp32",
        "worker.ref.fsdp.torch_dtype=fp32",
        "worker.actor.model.router_aux_loss_coef=0.01",
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
    return run(folder, model, "divided", *SIZES)


def assert_equal(metrics, expected, step):
    """To the rounding of float32: the same sequences were sampled, and the same was learned from them."""
    found, wanted = learned(metrics[step]), learned(expected[step])
    own = {key for key in wanted if not key.startswith("rollout")}
    assert {key: found[key] for key in own} == pytest.approx(
        {key: wanted[key] for key in own}, rel=1e-3, abs=1e-5
    )


def test_the_engine_computes_what_divided_experts_compute_before_and_after_updates(divided):
    for step in range(1, STEPS + 1):
        assert divided[step]["rollout/log_probs_diff_max"] < 1e-4
        assert 1.0 <= divided[step]["moe/ep_load_max"] <= divided[step]["moe/load_max"]
    assert abs(divided[STEPS]["actor/kl_loss"]) > 0.01, "the policy moved away from the reference"


@pytest.mark.slow
def test_a_run_with_divided_experts_logs_what_one_with_whole_experts_logs(divided, folder, model):
    whole = run(folder, model, "whole")

    for step in range(1, STEPS + 1):
        assert_equal(divided, whole, step)
    resumed = run(
        folder, model, "resumed", *SIZES, f"trainer.load_checkpoint_path={folder / 'whole' / 'global_step_1'}"
    )
    assert_equal(resumed, whole, STEPS)
