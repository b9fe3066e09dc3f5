# SPDX-License-Identifier: Apache-2.0
"""PRIME's implicit process reward model, on one data-parallel rank: it rewards tokens and learns online.

A step computes the log-probs of the frozen reference once and keeps them in the batch, where process rewards
and the update read them. `worker.prime.update` sets which of the two the trainer calls first.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from verl.algorithms.prime import check_accuracies, prime_loss, process_rewards
from verl.config.update_options import as_number
from verl.config.worker import PrimeConfig
from verl.protocol import DataProto
from verl.workers.packing.forward import FORWARD_KEYS, OBJECT_KEYS, PackedForward
from verl.workers.packing.schedule import forward_in_micro_batches
from verl.workers.roles.reward_model import has_same_tokens
from verl.workers.roles.updater import MiniBatch, Updater

UPDATE_KEYS = [*FORWARD_KEYS, "prime_ref_log_probs", "accuracies"]
TEMPERATURE = 1.0  # the model does not sample, so the rollout's temperature does not apply


class DataParallelPrimeModel:
    """Computes process rewards and trains the model behind them.

    Example::

        prime = DataParallelPrimeModel(config.prime, forward, reference, group, rollout_n=4, ...)
        batch = batch.merge(DataProto.from_dict({"prime_ref_log_probs": prime.compute_ref_log_probs(batch)}))
        metrics = prime.update(batch)  # reads `accuracies` (B,)
        rewards = prime.compute_process_rewards(batch)  # (B, R)
    """

    def __init__(
        self,
        config: PrimeConfig,
        forward: PackedForward,
        reference: PackedForward,
        group: dist.ProcessGroup | None,
        *,
        rollout_n: int,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        max_response_length: int,
        accuracy_key: str = "accuracy",
    ) -> None:
        """Build the model; see `Updater` for the other arguments.

        Args:
            config: `worker.prime`.
            forward: The model that learns, a causal or vision-language model with the policy's tokens.
            reference: The model before training, or without its adapters; frozen, in the same dtype.
            group: The data-parallel ranks, None for all; FSDP averages gradients over exactly these.
            rollout_n: Responses to each prompt.
            optimizer: Of the model that learns.
            scheduler: Stepped once for each training step.
            max_response_length: In tokens.
            accuracy_key: The reward function's key that `accuracies` come from, for errors.
        """
        self.config, self.forward, self.reference, self.group = config, forward, reference, group
        self.accuracy_key = accuracy_key
        self.updater = Updater(
            "prime",
            config,
            forward,
            group,
            optimizer,
            scheduler,
            rollout_n=rollout_n,
            max_response_length=max_response_length,
        )

    def compute_ref_log_probs(self, batch: DataProto) -> Tensor:
        """Compute log-probs under the reference: (B, R) float32 on CPU; collective over all ranks."""
        return self._log_probs(self.reference, batch)

    def compute_process_rewards(self, batch: DataProto) -> Tensor:
        """Compute the reward of each response token: (B, R) float32 on CPU; collective over all ranks.

        Args:
            batch: This rank's sequences, with `prime_ref_log_probs` (B, R).
        """
        log_probs = self._log_probs(self.forward, batch)
        tensors = batch.batch
        return process_rewards(
            log_probs, tensors["prime_ref_log_probs"], tensors["response_mask"], self.config.beta
        )

    def update(self, batch: DataProto) -> dict[str, float]:
        """Train on the correctness of responses, a step for each mini batch; collective over all ranks.

        The loss of a mini batch is the mean of `prime_loss` over its sequences with a response token.

        Args:
            batch: This rank's sequences in the order of the mini batches, with `prime_ref_log_probs` (B, R)
                and `accuracies` (B,).

        Returns:
            Metrics over all ranks, see `Updater.finish`, and means over sequences, before each one's update:
            `prime/accuracy`, how often model and reward function agree (right is above one half);
            `prime/score`, the logit; `prime/score_right` and `prime/score_wrong`, the logits of right and
            wrong responses, 0 if there are none.

        Raises:
            ValueError: The rows do not divide into mini batches, or an accuracy is outside of [0, 1].
        """
        check_accuracies(batch.batch["accuracies"], self.accuracy_key)
        for mini_batch in self.updater.mini_batches(batch.select(UPDATE_KEYS, OBJECT_KEYS)):
            for micro_batch in mini_batch.micro_batches():
                self.updater.backward(self._loss(micro_batch, mini_batch))
            self.updater.step()
        return self.updater.finish()

    def _loss(self, micro_batch: DataProto, mini_batch: MiniBatch) -> Tensor:
        tensors, metrics = micro_batch.batch, mini_batch.metrics
        mask, accuracies = tensors["response_mask"], tensors["accuracies"]  # (B, R), (B,)
        log_probs = self.forward.log_probs(micro_batch, TEMPERATURE).log_probs  # (B, R)
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

    def _log_probs(self, forward: PackedForward, batch: DataProto) -> Tensor:
        return forward_in_micro_batches(
            forward,
            batch.select(FORWARD_KEYS, OBJECT_KEYS),
            lambda micro_batch: forward.log_probs(micro_batch, TEMPERATURE).log_probs,
            size=as_number(self.config.micro_batch_size_per_device_for_experience),
            dynamic_batching=self.config.dynamic_batching,
            group=self.group,
        )


def check_prime_tokenizer(tokenizer: Any, policy_tokenizer: Any) -> None:
    """Raise `ValueError` if a token of the policy has another id in the model's tokenizer, or none."""
    if not has_same_tokens(tokenizer, policy_tokenizer):
        raise ValueError(
            "`worker.prime.model.model_path` must name a model with the tokens of"
            " `worker.actor.model.model_path`: process rewards belong to single tokens"
        )
