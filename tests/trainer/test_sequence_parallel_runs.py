# SPDX-License-Identifier: Apache-2.0
"""Runs whose ranks share sequences log the same metrics as runs whose ranks have different ones."""

import pytest

from tests.helpers.quickstart import make_folder
from tests.helpers.training import learned, quickstart_arguments, train
from tests.trainer.test_algorithms import REWARD

pytestmark = [pytest.mark.heavy, pytest.mark.slow]  # tests/equivalence divides rows in every suite

STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("shared"), "qwen2_5_vl")


def run(folder, name, *options):
    common = [
        f"worker.reward.reward_function={REWARD}:compute_score",
        f"worker.critic.model.model_path={folder / 'model'}",
        "worker.critic.global_batch_size=2",
        "worker.critic.fsdp.mp_param_dtype=fp32",
        "worker.critic.optim.lr=1e-3",
        "worker.ref.fsdp.mp_param_dtype=fp32",
        "worker.ref.fsdp.torch_dtype=fp32",
        "algorithm.adv_estimator=gae",
        "algorithm.disable_kl=false",
        "algorithm.use_kl_loss=true",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        f"trainer.max_steps={STEPS}",
    ]
    return train(folder / name, *quickstart_arguments(folder, folder / "model", *common, *options))


@pytest.fixture(scope="module")
def apart(folder):
    """Two ranks with different sequences, each prompt run with each of its responses."""
    return run(
        folder, "apart", "worker.actor.share_prompt=false", "trainer.save_freq=1", "trainer.save_limit=-1"
    )


def assert_equal(metrics, expected, first_step=1):
    """To the rounding of float32: the same sequences were sampled, and the same was learned from them."""
    for step in range(first_step, STEPS + 1):
        found, wanted = learned(metrics[step]), learned(expected[step])
        own = {key for key in wanted if not key.startswith(("global_seqlen/", "rollout/", "rollout_corr/"))}
        assert {key: found[key] for key in own} == pytest.approx(
            {key: wanted[key] for key in own}, rel=1e-3, abs=1e-5
        )


DIVIDED = "worker.actor.divide_short_sequences=true"


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        (["worker.actor.share_prompt=true"], None),
        (["worker.actor.ulysses_size=2", DIVIDED], 0.0),
        (["worker.actor.ring_size=2", DIVIDED], 0.0),
        (["worker.actor.ring_size=2"], 1.0),
    ],
    ids=["shared prompts", "ulysses", "ring", "whole sequences"],
)
def test_the_layout_of_sequences_changes_nothing(folder, apart, options, whole):
    metrics = run(folder, "".join(option.split(".")[-1] for option in options), *options)

    assert_equal(metrics, apart)
    assert metrics[1].get("perf/sp_whole_rows_actor") == whole


def test_a_run_continues_with_another_layout_as_if_it_had_not_changed(folder, apart):
    checkpoint = f"trainer.load_checkpoint_path={folder / 'apart' / 'global_step_1'}"

    metrics = run(folder, "resumed", checkpoint, "worker.actor.ulysses_size=2", DIVIDED)

    assert sorted(metrics) == [STEPS]
    assert_equal(metrics, apart, first_step=STEPS)
