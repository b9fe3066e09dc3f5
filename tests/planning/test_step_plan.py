# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from verl.config.ppo import DataConfig, PPOConfig, TrainerConfig
from verl.config.rollout import RolloutConfig
from verl.config.worker import ActorConfig, WorkerConfig
from verl.planning.step_plan import count_training_steps, make_plan, plan_text


def make_config(**trainer):
    return PPOConfig(
        data=DataConfig(rollout_batch_size=32, max_prompt_length=10, max_response_length=6),
        worker=WorkerConfig(
            actor=ActorConfig(
                global_batch_size=8,
                micro_batch_size_per_device_for_update=2,
                micro_batch_size_per_device_for_experience=5,
                ppo_epochs=3,
            ),
            rollout=RolloutConfig(n=4, tensor_parallel_size=2),
        ),
        trainer=TrainerConfig(n_gpus_per_node=4, **trainer),
    )


def test_the_numbers_of_a_step_follow_from_the_sizes():
    plan = make_plan(make_config(max_steps=7))

    assert (plan.world_size, plan.num_engines, plan.dp_size) == (4, 2, 4)
    assert (plan.prompts, plan.sequences) == (32, 128)  # 32 prompts x 4 responses
    assert (plan.mini_batches, plan.mini_batch_sequences) == (4, 32)  # 32 / 8 mini batches of 8 x 4
    assert plan.update_micro_batches == 4  # 32 sequences / 4 ranks / 2 at once
    assert plan.experience_micro_batches == 7  # 128 / 4 = 32 on a rank, 5 at once
    assert plan.optimizer_steps == 12  # 4 mini batches x 3 epochs
    assert plan.token_budget == 32  # 2 x (10 + 6)
    assert (plan.training_steps, plan.total_optimizer_steps) == (7, 84)


def test_an_epoch_is_made_of_whole_steps_of_whole_loader_batches():
    config = make_config(total_epochs=2)
    small = replace(config, data=replace(config.data, mini_rollout_batch_size=16))

    assert count_training_steps(config, None) is None
    assert count_training_steps(config, 100) == 6  # 3 batches of 32, twice
    assert count_training_steps(small, 100) == 6  # 6 batches of 16 make 3 steps


def test_too_few_rows_for_a_step_are_an_error():
    config, small = make_config(), make_config(max_steps=3)
    small = replace(small, data=replace(small.data, mini_rollout_batch_size=16))

    with pytest.raises(
        ValueError, match=r"must have at least `data.rollout_batch_size` \(32\) usable rows, has 31"
    ):
        count_training_steps(config, 31)
    with pytest.raises(
        ValueError, match=r"at least `data.mini_rollout_batch_size` \(16\) usable rows, has 15"
    ):
        count_training_steps(small, 15)
    assert count_training_steps(small, 16) == 3  # steps may reach over the end of an epoch
    assert count_training_steps(make_config(val_only=True), 0) == 0


def test_the_printed_plan_has_a_line_for_each_stage():
    config = make_config()

    text = plan_text(config, make_plan(config))

    for name in (
        "rollout engines",
        "prompts",
        "sequences",
        "mini batches",
        "micro batches",
        "optimizer steps",
    ):
        assert name in text
    assert "known once the rows are read" in text
