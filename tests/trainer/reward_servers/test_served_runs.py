# SPDX-License-Identifier: Apache-2.0
"""Runs whose rewards come from a model that they serve."""

import os
import sys

import pytest

from tests.helpers.training import QUICKSTART, quickstart_arguments, train
from tests.helpers.vllm_server import vllm_server
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))
from shapes import write_questions

pytestmark = [pytest.mark.heavy, pytest.mark.slow]  # test_model.py and test_phases.py are in every suite

JUDGE = "reward_servers.judge"
SERVED = ["dtype=fp32", "max_model_len=256", "sampling={max_tokens: 6}"]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_tiny_model(folder / "model", "qwen2")
    save_tiny_model(folder / "judge", "qwen3", seed=1)
    write_questions(folder, "train", 8, seed=1, with_images=False)
    write_questions(folder, "val", 2, seed=2, with_images=False)
    reward = os.path.join(os.path.dirname(__file__), "judged_by_model.py")
    common = quickstart_arguments(
        folder,
        folder / "model",
        f"worker.reward.reward_function={reward}:compute_score",
        "worker.rollout.name=hf",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=true",
        "trainer.val_freq=-1",
        "trainer.save_freq=-1",
        "trainer.max_steps=1",
    )
    return common, folder / "judge"


def served(model, *options):
    return [f"{JUDGE}.{option}" for option in (f"model_path={model}", *SERVED, *options)]


@pytest.fixture(scope="module")
def with_own_devices(tmp_path_factory, arguments):
    common, model = arguments
    folder = tmp_path_factory.mktemp("own")
    return train(folder, *common, *served(model, "colocate=false")), folder


def test_a_model_with_devices_of_its_own_scores_training_and_validation(with_own_devices):
    metrics, folder = with_own_devices

    assert 0 < metrics[1]["reward/overall"] < 1
    assert metrics[1]["reward/length"] > 0
    assert 0 < metrics[0]["val/overall_reward"] < 1
    assert metrics[1]["reward/failures"] == metrics[1][f"{JUDGE.replace('.', '/')}/restarts"] == 0
    assert "Application startup complete" in (folder / "reward_servers" / "judge-0.log").read_text()


def scores_of(metrics):
    """The metrics that depend on the judge alone: log-probs depend on the number of threads, too."""
    prefixes = ("reward/", "val/", "critic/score")
    return {
        step: {name: value for name, value in values.items() if name.startswith(prefixes)}
        for step, values in metrics.items()
    }


def test_a_model_that_sleeps_while_others_work_gives_the_same_scores(with_own_devices, arguments, tmp_path):
    common, model = arguments

    metrics = train(tmp_path, *common, *served(model))

    assert scores_of(metrics) == scores_of(with_own_devices[0])


def test_the_same_model_by_url_gives_the_same_scores(with_own_devices, arguments, tmp_path):
    common, model = arguments
    options = ["--served-model-name", "judge", "--dtype", "float32"]

    with vllm_server(model, tmp_path / "log.txt", *options) as url:
        metrics = train(
            tmp_path / "run", *common, f"{JUDGE}.url={url}", f"{JUDGE}.sampling={{max_tokens: 6}}"
        )

    assert scores_of(metrics) == scores_of(with_own_devices[0])
