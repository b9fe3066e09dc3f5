# SPDX-License-Identifier: Apache-2.0
"""Configs of runs whose functions are in files."""

from pathlib import Path


def minimal_arguments(folder: Path) -> list[str]:
    """Arguments of a run that a config accepts; its model and rows are on no disk."""
    reward = folder / "reward.py"
    reward.write_text("def main(rewards):\n    return [{'overall': 0.0} for _ in rewards]\n")
    return [
        "data.train_files=owner/rows",
        "data.val_files=owner/rows@test",
        "data.rollout_batch_size=8",
        "worker.actor.model.model_path=owner/model",
        "worker.actor.global_batch_size=4",
        "worker.actor.micro_batch_size_per_device_for_update=2",
        "worker.actor.micro_batch_size_per_device_for_experience=2",
        "worker.critic.global_batch_size=4",
        "worker.critic.micro_batch_size_per_device_for_update=2",
        "worker.prime.global_batch_size=4",
        "worker.prime.micro_batch_size_per_device_for_update=2",
        f"worker.reward.reward_function={reward}",
        "worker.rollout.n=4",
        "worker.rollout.tensor_parallel_size=1",
        "trainer.n_gpus_per_node=2",
    ]
