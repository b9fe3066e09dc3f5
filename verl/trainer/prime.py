# SPDX-License-Identifier: Apache-2.0
"""PRIME: a process reward model that rewards every token and learns from the outcomes of each step.

Source: Process Reinforcement through Implicit Rewards, section 3 (https://arxiv.org/abs/2502.01456).
"""

from verl.protocol import DataProto
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.metrics import Metrics, StageTimer
from verl.trainer.rollouts.balancing import Balancer


class PrimeRewards:
    """Adds `process_rewards` to a scored batch and updates the model that computes them."""

    def __init__(self, workers: RayWorkerGroup, balancer: Balancer, update: str) -> None:
        self.workers = workers
        self.balancer = balancer
        self.updates_first = update == "before"  # learn from a step before or after rewarding its tokens

    def __call__(self, batch: DataProto, timer: StageTimer) -> tuple[DataProto, Metrics]:
        with timer("prime"):
            batch = batch.merge({"accuracies": batch.batch["reward_components"][:, 0]})
            batch = batch.merge(self.workers.compute_prime_ref_log_probs(batch))  # prime_ref_log_probs
            metrics = self._update(batch) if self.updates_first else {}
            batch = batch.merge(self.workers.compute_process_rewards(batch))  # process_rewards
            return batch, metrics if self.updates_first else self._update(batch)

    def _update(self, batch: DataProto) -> Metrics:
        return self.workers.update_prime(self.balancer.for_update(batch, "prime"))[0]  # equal on all ranks
