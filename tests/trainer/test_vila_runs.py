# SPDX-License-Identifier: Apache-2.0
"""Runs of a model that vLLM does not know: the policy encodes the media of each step's prompts for it."""

import pytest

from tests.helpers.quickstart import make_folder
from tests.helpers.training import quickstart_arguments, train

pytestmark = pytest.mark.heavy

STEPS = ["trainer.max_steps=2", "trainer.val_before_train=false", "trainer.val_freq=-1"]


def run(folder, name, *options):
    return train(folder / name, *quickstart_arguments(folder, folder / "model", *STEPS, *options))


@pytest.mark.slow  # tests/models/families/test_vila.py compares vLLM after such prompts in every suite
def test_the_engine_reads_features_of_the_weights_of_each_step(tmp_path):
    folder = make_folder(tmp_path, "vila")

    metrics = run(folder, "trained", "worker.actor.optim.lr=1e-2")

    assert [metrics[step]["rollout/log_probs_diff_max"] < 1e-4 for step in (1, 2)] == [True, True]


@pytest.mark.slow  # two more runs; tests/trainer/test_frozen_tower_runs.py has another family
def test_a_frozen_tower_encodes_each_image_once_and_never_again_in_later_runs(tmp_path):
    folder = make_folder(tmp_path, "vila")
    kept = [
        "worker.actor.model.freeze_vision_tower=true",
        f"worker.actor.cached_embeds_dir={folder / 'features'}",
    ]

    first, second = (run(folder, name, *kept) for name in ("first", "second"))

    assert first[1]["perf/encoded_media"] > 0
    assert [second[step]["perf/encoded_media"] for step in (1, 2)] == [0, 0]
    assert [each["rollout/log_probs_diff_max"] < 1e-4 for each in (first[1], second[2])] == [True, True]
