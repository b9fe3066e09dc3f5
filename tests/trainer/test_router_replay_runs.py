# SPDX-License-Identifier: Apache-2.0
"""Whole runs of a mixture of experts in bf16, which replay the routes of the engine or of the trainer."""

import pytest

from tests.helpers.quickstart import make_folder
from tests.helpers.training import learned, quickstart_arguments, start_training, train
from verl.models.tiny import save_tiny_model

pytestmark = pytest.mark.heavy

MIXTURE = [
    "data.max_response_length=24",
    "data.rollout_batch_size=8",
    "worker.actor.fsdp.mp_param_dtype=bf16",
    "worker.rollout.dtype=bf16",
    "worker.rollout.ignore_eos=true",
    "trainer.val_freq=-1",
    "trainer.save_freq=1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("text"))
    save_tiny_model(folder / "mixture", "qwen3_moe", num_experts=8)
    return folder


def run(folder, mode, steps, *overrides, name=None):
    arguments = quickstart_arguments(folder, folder / "mixture", *MIXTURE, *overrides)
    replay = f"worker.actor.router_replay={mode}"
    return train(folder / (name or mode), *arguments, replay, f"trainer.max_steps={steps}")


@pytest.mark.slow  # tests/equivalence and test_engine_routes.py keep its promise in every suite
def test_the_engines_routes_bring_its_log_probs_and_the_trainers_together(folder):
    plain = run(folder, "off", 1)[1]
    replayed = run(folder, "r3", 2)

    assert 0.9 < plain["moe/route_agreement"] < 1
    assert "moe/replay_agreement" not in plain
    assert replayed[1]["rollout/log_probs_diff_max"] < plain["rollout/log_probs_diff_max"] / 3
    assert replayed[1]["rollout/log_probs_diff_mean"] < plain["rollout/log_probs_diff_mean"]
    for step in (1, 2):
        assert replayed[step]["rollout/log_probs_diff_max"] < 0.06
        assert 0.9 < replayed[step]["moe/route_agreement"] < 1
        assert 0.5 < replayed[step]["moe/replay_agreement"] < 1  # the first mini batch has moved the router


@pytest.mark.slow  # three more runs each; tests/equivalence compares passes in every suite
@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_a_resumed_run_repeats_an_unbroken_one(folder, mode):
    unbroken = run(folder, mode, 2, name=f"{mode}_unbroken")
    run(folder, mode, 1, name=f"{mode}_resumed")
    resumed = run(folder, mode, 2, name=f"{mode}_resumed")

    assert learned(resumed[2]) == learned(unbroken[2])
    assert 0.5 < unbroken[1]["moe/replay_agreement"] < 1


@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_a_dry_run_says_that_a_dense_model_has_no_experts_to_replay(folder, mode):
    arguments = quickstart_arguments(folder, folder / "model", f"worker.actor.router_replay={mode}")

    planned = start_training(*arguments, "--dry-run")

    assert planned.returncode == 2
    assert f"`worker.actor.router_replay` must be 'off', got '{mode}'" in planned.stderr
