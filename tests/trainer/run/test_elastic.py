# SPDX-License-Identifier: Apache-2.0
"""With fewer devices a run takes as many as there are and as its batch sizes allow."""

from dataclasses import replace

import pytest

from tests.trainer.rollouts.sampling import make_config
from verl.config.ppo import PPOConfig
from verl.config.reward_servers import RewardServerConfig
from verl.config.schema import load_config
from verl.config.sft import SFTConfig
from verl.single_controller.ray.resource_pool import ClusterError
from verl.trainer.prepare import check_all_fit, largest_run

# 8 prompts x 2 responses, mini batches of 4 prompts: 8 sequences over the ranks, in micro batches of 2.
MICRO = {"micro_batch_size_per_device_for_update": 2, "micro_batch_size_per_device_for_experience": 2}


@pytest.fixture
def config(tmp_path):
    config = make_config(prompts=8, n=2, mini_batch=4, trainer={"nnodes": 2, "n_gpus_per_node": 2})
    actor = replace(config.worker.actor, **MICRO)
    (tmp_path / "config.json").write_text("{}")
    actor = replace(actor, model=replace(actor.model, model_path=str(tmp_path)))
    reward = tmp_path / "reward.py"
    reward.write_text("def main(rows): return []")
    rollout = replace(config.worker.rollout, tensor_parallel_size=1)
    worker = replace(config.worker, actor=actor, rollout=rollout)
    worker = replace(worker, reward=replace(worker.reward, reward_function=str(reward)))
    (tmp_path / "rows.jsonl").write_text("{}")
    rows = str(tmp_path / "rows.jsonl")
    data = replace(config.data, train_files=rows, val_files=rows)
    trainer = replace(config.trainer, elastic=True, save_checkpoint_path=str(tmp_path / "saved"))
    return replace(config, data=data, worker=worker, trainer=trainer)


@pytest.mark.parametrize(
    ("capacities", "expected"),
    [
        ([2, 2], (2, 2)),
        ([8, 8, 8], (2, 2)),  # never more than asked for
        ([8, 1], (1, 2)),  # one node with two before two nodes with one each
        ([1, 1, 1], (2, 1)),
        ([0, 1], (1, 1)),
    ],
)
def test_the_most_devices_that_the_nodes_can_hold_are_taken(config, capacities, expected):
    trainer = largest_run(config, capacities).trainer

    assert (trainer.nnodes, trainer.n_gpus_per_node) == expected


def test_a_size_that_the_batches_do_not_divide_by_is_passed_over(config):
    config = replace(config, trainer=replace(config.trainer, nnodes=1, n_gpus_per_node=4))

    smaller = largest_run(config, [3])  # 8 sequences over 3 ranks: no; over 2: 4 each

    assert smaller.trainer.n_gpus_per_node == 2
    assert smaller == replace(config, trainer=smaller.trainer)


def test_without_any_device_or_any_size_that_fits_there_is_no_run(config):
    assert largest_run(config, []) is None
    assert largest_run(config, [0]) is None
    sharing = replace(config.worker.actor, ulysses_size=4)
    assert largest_run(replace(config, worker=replace(config.worker, actor=sharing)), [2]) is None


def test_a_fine_tuning_run_takes_as_many_devices_as_its_batch_divides_by(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    arguments = [
        f"data.train_files={rows}", f"worker.actor.model.model_path={tmp_path}",
        f"trainer.save_checkpoint_path={tmp_path}", "trainer.val_before_train=false",
        "worker.actor.global_batch_size=8", "trainer.n_gpus_per_node=4",
    ]  # fmt: skip
    config = load_config(SFTConfig, arguments)

    smaller = largest_run(config, [3])  # 8 rows over 3 ranks: no; over 2: 4 each

    assert smaller.trainer.n_gpus_per_node == 2
    assert smaller == replace(config, trainer=smaller.trainer)


def test_models_of_the_reward_on_devices_of_their_own_are_named_where_devices_are_missing():
    server = RewardServerConfig(model_path="judge", colocate=False, n_gpus=2)
    config = replace(PPOConfig(), reward_servers={"judge": server})
    config = replace(config, trainer=replace(config.trainer, n_gpus_per_node=2))

    check_all_fit(config, [4])
    with pytest.raises(ClusterError, match=r"needs 4 devices, 2 to train and 2 to serve .*the cluster has 3"):
        check_all_fit(config, [3])
