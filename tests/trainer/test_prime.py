# SPDX-License-Identifier: Apache-2.0
"""The process reward model rewards a step's tokens and learns from it, before or after."""

import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.metrics import StageTimer
from verl.trainer.prime import PrimeRewards
from verl.trainer.rollouts.balancing import Balancer


class ProcessRewardModel:
    """A stand-in for the worker group: its rewards are its number of updates."""

    def __init__(self):
        self.updates = []

    def compute_prime_ref_log_probs(self, batch):
        return DataProto.from_dict({"prime_ref_log_probs": torch.zeros(len(batch), 2)})

    def compute_process_rewards(self, batch):
        return DataProto.from_dict({"process_rewards": torch.full((len(batch), 2), float(len(self.updates)))})

    def update_prime(self, batch):
        assert "prime_ref_log_probs" in batch.batch
        self.updates.append((batch.batch["row_ids"].tolist(), batch.batch["accuracies"].tolist()))
        return [{"prime/loss": 0.5}]


def make_batch():
    """Two prompts with two responses each, as balancing left them."""
    return DataProto.from_dict({
        "row_ids": torch.tensor([2, 3, 0, 1]),
        "attention_mask": torch.ones(4, 3, dtype=torch.int64),
        "reward_components": torch.tensor([[1.0], [0.0], [0.0], [1.0]]),
    })  # fmt: skip


@pytest.mark.parametrize(("update", "expected"), [("before", 1.0), ("after", 0.0)])
def test_tokens_are_rewarded_after_or_before_the_update(update, expected):
    workers, timer = ProcessRewardModel(), StageTimer()
    stage = PrimeRewards(workers, Balancer(1, 2, {"actor": 2, "prime": 2}), update)

    batch, metrics = stage(make_batch(), timer)

    assert batch.batch["process_rewards"].tolist() == [[expected, expected]] * 4
    assert metrics == {"prime/loss": 0.5} and list(timer.seconds) == ["prime"]
    assert workers.updates == [([2, 3, 0, 1], [1.0, 0.0, 0.0, 1.0])]


def test_mini_batches_of_another_size_are_cut_from_the_order_of_collection():
    workers = ProcessRewardModel()

    PrimeRewards(workers, Balancer(1, 2, {"actor": 2, "prime": 1}), "after")(make_batch(), StageTimer())

    assert workers.updates == [([0, 1, 2, 3], [0.0, 1.0, 1.0, 0.0])]
