# SPDX-License-Identifier: Apache-2.0
"""PRIME's implicit process reward model, on one data-parallel rank: it rewards tokens and learns online.

A step computes the log-probs of the frozen reference once and keeps them in the batch, where process rewards
and the update read them. `worker.prime.update` sets which of the two the trainer calls first.
"""

from typing import Any

from torch import Tensor

from verl.algorithms.estimators.prime import check_accuracies, prime_loss, process_rewards
from verl.config.worker import PrimeConfig
from verl.protocol import DataProto
from verl.workers.packing.forward import FORWARD_KEYS, OBJECT_KEYS, PackedForward
from verl.workers.roles.reward_model import has_same_tokens
from verl.workers.roles.updater import MicroBatch, MiniBatch, Training, Updater, compute_log_probs

UPDATE_KEYS = [*FORWARD_KEYS, "prime_ref_log_probs", "accuracies"]
TEMPERATURE = 1.0  # the model does not sample, so the rollout's temperature does not apply


class DataParallelPrimeModel:
    """Computes process rewards and trains the model behind them."""

    def __init__(
        self,
        config: PrimeConfig,
        forward: PackedForward,  # the model that learns, with the policy's tokens
        reference: PackedForward,  # the model before training or without adapters, in the same dtype
        training: Training,
        accuracy_key: str = "accuracy",  # the reward function's key of `accuracies`, for errors
    ) -> None:
        self.config, self.accuracy_key = config, accuracy_key
        self.forward, self.reference = forward, reference
        self.updater = Updater("prime", config, forward, training)

    def compute_ref_log_probs(self, batch: DataProto) -> Tensor:
        """Log-probs under the reference: (B, R) float32 on CPU; collective."""
        return compute_log_probs(self.config, self.reference, batch, TEMPERATURE)

    def compute_process_rewards(self, batch: DataProto) -> Tensor:
        """Reward of each response token: (B, R) float32 on CPU; collective. Reads `prime_ref_log_probs`."""
        log_probs = compute_log_probs(self.config, self.forward, batch, TEMPERATURE)
        tensors = batch.batch
        return process_rewards(
            log_probs, tensors["prime_ref_log_probs"], tensors["loss_mask"], self.config.beta
        )

    def update(self, batch: DataProto) -> dict[str, float]:
        """Train on the correctness of responses, a step for each mini batch; collective over all ranks.

        Reads `prime_ref_log_probs` (B, R) and `accuracies` (B,). The loss is the mean of `prime_loss` over
        the sequences of a mini batch with a response token.
        """
        check_accuracies(batch.batch["accuracies"], self.accuracy_key)
        return self.updater.run(batch.select(UPDATE_KEYS, OBJECT_KEYS), self._loss)

    def _loss(self, micro_batch: MicroBatch, mini_batch: MiniBatch) -> Tensor:
        tensors, metrics = micro_batch.tensors, mini_batch.metrics
        mask, accuracies = tensors["loss_mask"], tensors["accuracies"]  # (B, R), (B,)
        log_probs = self.forward.log_probs(micro_batch.rows, TEMPERATURE).log_probs  # (B, R)
        rewards = process_rewards(log_probs, tensors["prime_ref_log_probs"], mask, self.config.beta)
        losses, scores = prime_loss(rewards, accuracies, mask)  # (B,), (B,)
        loss = losses.sum() / mini_batch.denominators.num_sequences.clamp(min=1)
        metrics.add_loss("prime/dpo_loss", loss)

        answered, right = mask.any(-1), accuracies > 0.5  # (B,), (B,)
        metrics.add_mean("prime/accuracy", (scores > 0) == right, answered)
        metrics.add_mean("prime/score", scores, answered)
        metrics.add_mean("prime/score_right", scores, answered & right)
        metrics.add_mean("prime/score_wrong", scores, answered & ~right)
        return loss


def check_prime_tokenizer(tokenizer: Any, policy_tokenizer: Any) -> None:
    if not has_same_tokens(tokenizer, policy_tokenizer):
        raise ValueError(
            "`worker.prime.model.model_path` must name a model with the tokens of"
            " `worker.actor.model.model_path`: process rewards belong to single tokens"
        )
