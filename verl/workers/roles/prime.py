# SPDX-License-Identifier: Apache-2.0
"""The implicit process reward model of PRIME on one data-parallel rank: it rewards tokens, and learns online.

A step computes the log-probs of the frozen reference once and keeps them in the batch; process rewards and
the update read them there. `worker.prime.update` says which of the two comes first, and the trainer calls
them in that order.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from verl.algorithms.aggregation import LossDenominators
from verl.algorithms.prime import check_accuracies, prime_loss, process_rewards
from verl.config.model import as_number
from verl.config.worker import PrimeConfig
from verl.protocol import DataProto
from verl.workers.packing.forward import PackedForward
from verl.workers.roles.conversation import has_same_tokens
from verl.workers.roles.updater import (
    FORWARD_KEYS,
    OBJECT_KEYS,
    MetricSums,
    Updater,
    UpdateSettings,
    forward_in_micro_batches,
)

UPDATE_KEYS = [*FORWARD_KEYS, "prime_ref_log_probs", "accuracies"]
TEMPERATURE = 1.0  # the model is no sampler: its own distribution, whatever the rollout's temperature


class DataParallelPrimeModel:
    """Computes process rewards and trains the model that they come from.

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
        """Put the parts together.

        Args:
            config: `worker.prime`.
            forward: The model that learns, a causal or vision-language model with the policy's tokens.
            reference: The same model as it was, or without its adapters; frozen, computing in the same dtype.
            group: The data-parallel ranks, None for all; FSDP averages gradients over exactly these.
            rollout_n: Responses to each prompt: `global_batch_size` counts prompts.
            optimizer: Of the model that learns.
            scheduler: Of the optimizer's learning rate; stepped once for each training step.
            max_response_length: Tokens of a response at most.
            accuracy_key: The value of the reward function that `accuracies` hold, for errors.
        """
        self.config = config
        self.forward = forward
        self.reference = reference
        self.group = group
        self.accuracy_key = accuracy_key
        settings = UpdateSettings.of(
            "prime", config, rollout_n=rollout_n, max_response_length=max_response_length
        )
        self.updater = Updater(forward, group, settings, optimizer, scheduler)

    def compute_ref_log_probs(self, batch: DataProto) -> Tensor:
        """Log-probs of the response tokens under the reference, (B, R) float32 on CPU, zero on padding.

        Every rank must call it: the ranks agree on the number of micro batches.
        """
        return self._log_probs(self.reference, batch)

    def compute_process_rewards(self, batch: DataProto) -> Tensor:
        """Reward of each response token under the present weights, (B, R) float32 on CPU, zero on padding.

        Every rank must call it: the ranks agree on the number of micro batches.

        Args:
            batch: This rank's sequences, with `prime_ref_log_probs` (B, R).
        """
        log_probs = self._log_probs(self.forward, batch)
        tensors = batch.batch
        return process_rewards(
            log_probs, tensors["prime_ref_log_probs"], tensors["response_mask"], self.config.beta
        )

    def update(self, batch: DataProto) -> dict[str, float]:
        """Train on which responses were right: an optimizer step for each mini batch, one of the scheduler.

        The loss of a mini batch is the mean of `prime_loss` over its sequences with a response token, on all
        ranks. Every rank must call it.

        Args:
            batch: This rank's sequences in the order of the mini batches, with `prime_ref_log_probs` (B, R)
                and `accuracies` (B,).

        Returns:
            Metrics over all ranks, the same on each: `prime/dpo_loss`, a mean over mini batches; means over
            sequences, before each one's update: `prime/accuracy`, the share that the model judges as the
            reward function does (above one half is right), `prime/score`, the logit, and the logits of right
            and of wrong responses, `prime/score_right` and `prime/score_wrong`, 0 if there are none; and
            `prime/grad_norm`, `prime/skipped_updates`, `prime/lr`.

        Raises:
            ValueError: The rows do not divide into mini batches, or an accuracy is outside of [0, 1].
        """
        check_accuracies(batch.batch["accuracies"], self.accuracy_key)
        return self.updater.run(batch.select(UPDATE_KEYS, OBJECT_KEYS), self._micro_batch_loss)

    def _micro_batch_loss(
        self, micro_batch: DataProto, denominators: LossDenominators, metrics: MetricSums
    ) -> Tensor:
        tensors = micro_batch.batch
        mask, accuracies = tensors["response_mask"], tensors["accuracies"]  # (B, R), (B,)
        log_probs = self.forward.log_probs(micro_batch, TEMPERATURE).log_probs  # (B, R)
        rewards = process_rewards(log_probs, tensors["prime_ref_log_probs"], mask, self.config.beta)
        losses, scores = prime_loss(rewards, accuracies, mask)  # (B,), (B,)
        loss = losses.sum() / denominators.num_sequences.clamp(min=1)
        metrics.add_loss("prime/dpo_loss", loss)

        answered, right = mask.any(-1), accuracies > 0.5  # (B,), (B,)
        agrees = (scores > 0) == right
        metrics.add_tokens("prime/accuracy", agrees, answered)
        metrics.add_tokens("prime/score", scores, answered)
        metrics.add_tokens("prime/score_right", scores, answered & right)
        metrics.add_tokens("prime/score_wrong", scores, answered & ~right)
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
    """Refuse a process reward model that reads the policy's tokens as others.

    Raises:
        ValueError: A token of the policy has another id in the model's tokenizer, or none.
    """
    if not has_same_tokens(tokenizer, policy_tokenizer):
        raise ValueError(
            "`worker.prime.model.model_path` must name a model with the tokens of"
            " `worker.actor.model.model_path`: process rewards belong to single tokens"
        )
