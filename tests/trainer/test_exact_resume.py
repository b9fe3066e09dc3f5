# SPDX-License-Identifier: Apache-2.0
"""A run whose controller is killed resumes and ends bit for bit as an uninterrupted run."""

import sys
from pathlib import Path

import pytest

from tests.faults.runs import Run, assert_same, killed_and_resumed, saved_tensors
from tests.helpers.training import QUICKSTART, SAMPLERS, mixed, quickstart_arguments, read_metrics
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))
from shapes import write_questions

pytestmark = pytest.mark.slow  # three runs each; tests/trainer/test_training.py resumes a shorter one
HALF = 3  # steps
REWARD = Path(__file__).with_name("scored_by_letters.py")
FILTER = [
    "algorithm.online_filtering=true",
    "algorithm.filter_key=accuracy",
    "algorithm.filter_low=0.3",
    "algorithm.filter_high=0.9",
]
STOCHASTIC = ["worker.actor.fsdp.torch_dtype=bf16", "worker.actor.optim.strategy=adamw_bf16_sr"]
MUON = [
    "worker.actor.optim.strategy=muon",
    r"worker.actor.optim.lr_factors={'visual\.merger': 10.0, 'visual': 0.1}",
    "worker.actor.optim.lr_scheduler_type=wsd",
    "worker.actor.optim.lr_decay_ratio=0.9",
]
SAMPLED = [
    f"data.sampler={SAMPLERS}/by_pass_rate.py:ByPassRate",
    "data.sampler_kwargs={score: accuracy, rest: 1}",
]
REPLAYED = ["algorithm.replay_max_age=2", "algorithm.rollout_correction.rollout_is=token"]
KINDS = {
    "text, mixed": ("qwen2", []),
    "text, mixed, sampled": ("qwen2", SAMPLED),
    "text, filtered, sampled": ("qwen2", [*FILTER, *SAMPLED]),
    "text, filtered": ("qwen2", FILTER),
    "text, filtered, replayed": ("qwen2", [*FILTER, *REPLAYED]),
    "images": ("qwen2_5_vl", []),
    "images, filtered": ("qwen2_5_vl", FILTER),
    "text, stochastic": ("qwen2", STOCHASTIC),
    "images, muon": ("qwen2_5_vl", MUON),
}


def arguments_for(folder, kind):
    family, options = KINDS[kind]
    has_images = family != "qwen2"
    save_tiny_model(folder / "model", family)
    write_questions(folder, "train", 24, seed=1, with_images=has_images)
    write_questions(folder, "val", 4, seed=2, with_images=has_images)
    common = [
        f"worker.reward.reward_function={REWARD}:compute_score",
        "data.num_workers=1",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "trainer.save_limit=-1",
        f"trainer.save_freq={HALF}",
        f"trainer.max_steps={2 * HALF}",
        *(mixed(folder) if "mixed" in kind else ()),
    ]
    return quickstart_arguments(folder, folder / "model", *common, *options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_and_resumed_ends_bit_for_bit_as_an_unbroken_one(kind, tmp_path):
    arguments = arguments_for(tmp_path, kind)
    unbroken = Run(tmp_path / "unbroken", arguments)
    assert unbroken.end() == 0, unbroken.stderr

    killed, resumed = killed_and_resumed(tmp_path / "killed", arguments, HALF)

    assert [logged.step for logged in resumed.steps] == list(range(HALF + 1, 2 * HALF + 1))
    expected = read_metrics(tmp_path / "unbroken")
    assert_same([*killed.steps, *resumed.steps], expected)
    assert all(expected[step]["actor/grad_norm"] > 0 for step in range(1, 2 * HALF + 1))
    if "filtered" in kind:
        arrived = "filter/replayed" if "replayed" in kind else "filter/carried_in"
        assert expected[HALF + 1][arrived] > 0  # groups went through the checkpoint
    one, other = (
        saved_tensors(tmp_path / name / f"global_step_{2 * HALF}") for name in ("unbroken", "killed")
    )
    assert one.keys() == other.keys() and len(one) > 20
    assert all(one[key].equal(other[key]) for key in one)
