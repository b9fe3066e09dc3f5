# SPDX-License-Identifier: Apache-2.0
"""Wrong options of distillation are named before anything is loaded."""

import pytest

from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, load_config

ONE = ("distillation.enabled=true", "distillation.teacher_models.large.model_path=owner/large")
TWO = (*ONE, "distillation.teacher_models.other.model_path=owner/other")
LOSS, LARGE = "distillation.distillation_loss", "distillation.teacher_models.large"
ALONE = (*ONE, f"{LOSS}.use_task_rewards=false")
FRAMES = (*ONE, f"{LARGE}.num_video_frames=64", f"{LARGE}.max_prompt_length=4096")


@pytest.fixture
def load(tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(reward_input):\n    return {'overall': 0.0}\n")

    def loaded(*options):
        return load_config(
            PPOConfig,
            [
                "config=examples/config.yaml", "worker.actor.model.model_path=owner/small",
                "data.train_files=owner/rows", "data.val_files=",
                f"worker.reward.reward_function={tmp_path / 'reward.py'}:compute_score",
                "trainer.val_freq=-1", "trainer.val_before_train=false", "data.format_prompt=null",
                "algorithm.disable_kl=true", *options,
            ],
        )  # fmt: skip

    return loaded


def test_teachers_have_the_rows_that_name_them_or_their_key(load):
    config = load(*TWO, "distillation.teacher_models.other.key=math")

    assert config.distillation.keys == {"large": "large", "math": "other"}
    assert config.distillation.compares_in_update and not config.distillation.is_alone


def test_a_divergence_has_verls_name_and_ours(load):
    named = [
        load(*ONE, f"{LOSS}.loss_mode={mode}").distillation.distillation_loss for mode in ("k3", "low_var_kl")
    ]

    assert named[0] == named[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ONE[:1], "`distillation.teacher_models` must have a teacher"),
        (ONE[1:], "`distillation.enabled` must be true with teachers"),
        ((*TWO, f"{LARGE}.key=other"), "each teacher must have a `key` of its own, got .'other', 'other'."),
        ((*ONE, f"{LOSS}.loss_mode=k1"), "must not be 'kl' .k1. as a loss, whose expected gradient is zero"),
        (
            (*ONE, f"{LOSS}.use_policy_gradient=true"),
            "`distillation.distillation_loss.loss_mode` must be an estimator on sampled tokens",
        ),
        ((*ONE, f"{LARGE}.num_video_frames=64"), "must be set together: prompts with more frames"),
        ((*ONE, f"{LARGE}.tokens_per_frame=64"), "has no effect without"),
        (
            (*FRAMES, "data.streaming=true"),
            "`distillation.teacher_models.large.num_video_frames` must be null with `data.streaming`",
        ),
        (
            (*FRAMES, "worker.rollout.multi_turn.enable=true"),
            "large.num_video_frames` must be null with `worker.rollout.multi_turn`",
        ),
        (
            (*ALONE, "algorithm.disable_kl=false", "algorithm.use_kl_loss=false"),
            "`algorithm.disable_kl` must be true with .*use_task_rewards=false",
        ),
        (
            (*ALONE, "algorithm.use_pf_ppo=true"),
            "`algorithm.use_pf_ppo` must be false with",
        ),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named_with_its_rule(load, options, message):
    with pytest.raises(ConfigError, match=message):
        load(*options)
