# SPDX-License-Identifier: Apache-2.0
"""Numbers of a training step of reinforcement learning."""

from dataclasses import replace

import pytest

from verl.config.ppo import DataConfig, PPOConfig, TrainerConfig
from verl.config.rollout import RolloutConfig
from verl.config.trainer import AsyncConfig
from verl.config.worker import ActorConfig, WorkerConfig
from verl.planning.step_plan import make_plan


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
    text = make_plan(make_config(max_steps=7)).text

    # 32 prompts x 4 responses on 4 ranks of 2 engines, 5 of 32 sequences at once for log-probs; mini batches
    # of 8 prompts x 4 responses, 2 of 8 sequences at once, 2 x (10 + 6) tokens; 4 mini batches x 3 epochs.
    assert text.splitlines() == [
        "                                 step  per rank",
        "  processes                         4         1  1 nodes, auto",
        "  models                            2            actor, ref",
        "  rollout engines                   2            vllm, tensor parallel 2",
        "  prompts                          32        16  per engine",
        "  rollout calls                     1",
        "  sequences                       128        32  4 responses to a prompt, 16 tokens at most",
        "  log-prob micro batches                   <= 7  actor and reference",
        "  mini batches                      4            8 prompts each",
        "  sequences in a mini batch        32         8",
        "  micro batches in a mini batch            <= 4  2 sequences each, at most 32 tokens",
        "  optimizer steps                  12            3 PPO epochs",
        "  training steps                    7            84 optimizer steps",
    ]


def test_the_plan_names_the_passes_before_the_update_that_a_step_has():
    config = make_config(max_steps=7)
    actor = replace(
        config.worker.actor, global_batch_size=32, ppo_epochs=1
    )  # one update, which needs no pass
    algorithm = replace(config.algorithm, use_kl_loss=True)
    config = replace(config, worker=replace(config.worker, actor=actor), algorithm=algorithm)
    alone = replace(config, algorithm=replace(config.algorithm, disable_kl=True))

    [line] = [line for line in make_plan(config).text.splitlines() if "log-prob" in line]

    assert line.endswith("reference") and "actor" not in line
    assert "log-prob" not in make_plan(alone).text


def test_the_plan_says_how_many_processes_sample_and_how_many_may_join():
    config = make_config(
        n_gpus_for_rollout=4, async_training=AsyncConfig(mode="stream", max_gpus_for_rollout=8)
    )
    config = replace(config, worker=replace(config.worker, hybrid_engine=False))

    line = make_plan(config).text.splitlines()[2]

    assert line.split()[:3] == ["sampling", "processes", "4"]
    assert line.endswith("; up to 8 as devices become free")


def test_an_epoch_has_whole_steps_of_whole_loader_batches():
    config = make_config(total_epochs=2)
    small = replace(config, data=replace(config.data, mini_rollout_batch_size=16))

    assert make_plan(config, None).training_steps is None
    assert make_plan(config, 100).training_steps == 6  # 3 batches of 32, twice
    assert make_plan(small, 100).training_steps == 6  # 6 batches of 16 make 3 steps


def test_a_resumed_run_has_the_steps_that_its_epochs_have_left_whatever_its_batches_were():
    config = make_config(total_epochs=2)  # 32 rows a step: 192 of 2 x 100 rows

    assert make_plan(config, 100, (4, 4 * 32)).training_steps == 6  # as without a stop
    assert make_plan(config, 100, (8, 8 * 16)).training_steps == 10  # two steps of 32 are left
    assert make_plan(config, 100, (1, 64)).training_steps == 5
    assert make_plan(config, 100, (7, 7 * 64)).training_steps == 7  # of three epochs: nothing is left
    assert make_plan(make_config(max_steps=3), 100, (2, 64)).training_steps == 3


def test_too_few_rows_for_a_step_are_an_error():
    config, small = make_config(), make_config(max_steps=3)
    small = replace(small, data=replace(small.data, mini_rollout_batch_size=16))

    with pytest.raises(
        ValueError, match=r"must have at least `data.rollout_batch_size` \(32\) usable rows, has 31"
    ):
        make_plan(config, 31)
    with pytest.raises(
        ValueError, match=r"at least `data.mini_rollout_batch_size` \(16\) usable rows, has 15"
    ):
        make_plan(small, 15)
    assert make_plan(small, 16).training_steps == 3  # steps may reach over the end of an epoch
    assert make_plan(make_config(val_only=True), 0).training_steps == 0


def test_the_number_of_steps_is_unknown_until_the_rows_are_read():
    assert "known once the rows are read" in make_plan(make_config()).text
