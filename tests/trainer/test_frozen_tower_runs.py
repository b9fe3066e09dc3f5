# SPDX-License-Identifier: Apache-2.0
"""Whole runs with a frozen vision tower: every image is encoded once, by the first process that needs it."""

import pytest

from tests.helpers.quickstart import make_folder
from tests.helpers.training import learned, quickstart_arguments, train
from tests.trainer.test_algorithms import REWARD

PROMPTS, STEPS = 4, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("frozen"), "qwen2_5_vl", train=2 * PROMPTS)


@pytest.fixture(scope="module")
def runs(folder):
    """A run that fills the folder of features, and one that finds it filled; both with a reference."""
    options = [
        f"worker.reward.reward_function={REWARD}:compute_score",
        "worker.actor.model.freeze_vision_tower=true",
        f"worker.actor.cached_embeds_dir={folder / 'features'}",
        "worker.ref.fsdp.mp_param_dtype=fp32",
        "worker.ref.fsdp.torch_dtype=fp32",
        "algorithm.disable_kl=false",
        "algorithm.use_kl_loss=true",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        f"trainer.max_steps={STEPS}",
    ]
    arguments = quickstart_arguments(folder, folder / "model", *options)
    return [train(folder / name, *arguments) for name in ("first", "second")]


@pytest.mark.slow
def test_images_encoded_in_a_step_are_those_of_new_prompts(runs):
    # Two steps are an epoch; the rollout engine, the policy, the reference and both updates read the rest.
    first, second = ([run[step]["perf/encoded_media"] for step in range(1, STEPS + 1)] for run in runs)

    assert first == [PROMPTS, PROMPTS, 0]
    assert second == [0, 0, 0]


@pytest.mark.slow
def test_the_engine_samples_from_what_the_trainer_computes(runs):
    for run in runs:
        assert all(run[step]["rollout/log_probs_diff_max"] < 1e-4 for step in range(1, STEPS + 1))


@pytest.mark.slow
def test_where_features_come_from_changes_nothing(runs):
    first, second = runs

    for step in range(1, STEPS + 1):
        assert learned(second[step]) == pytest.approx(learned(first[step]), rel=1e-4, abs=1e-6)
