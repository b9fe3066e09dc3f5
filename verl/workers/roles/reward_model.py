# SPDX-License-Identifier: Apache-2.0
"""A sequence-classification model that scores responses, on one data-parallel rank."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from verl.config.model import as_number
from verl.config.worker import RewardModelConfig
from verl.models.registry import model_type_of
from verl.models.scalar_head import is_scalar
from verl.protocol import DataProto
from verl.workers.model_builder import load_model_config
from verl.workers.packing.forward import PackedForward
from verl.workers.roles.conversation import (
    encode_conversations,
    has_same_conversations,
    response_texts,
)
from verl.workers.roles.updater import forward_in_micro_batches

OPTION = "worker.reward_model.model"
MODEL_KEYS = ["input_ids", "attention_mask", "position_ids"]


def check_has_score(config: RewardModelConfig) -> None:
    """Refuse a checkpoint that gives no score: a causal model's new head would call everything zero.

    Raises:
        FileNotFoundError: The folder has no config that can be read.
        ValueError: The checkpoint has no head that gives a single score.
    """
    files = load_model_config(config.model, OPTION)
    where = f"`{OPTION}.model_path` ({config.model.model_path})"
    if not is_scalar(files):
        raise ValueError(
            f"{where} must be a sequence-classification model with one label, got {files.architectures}:"
            " use a reward model"
        )
    if files.num_labels != 1:
        raise ValueError(f"{where} has {files.num_labels} labels, one is needed: use a reward model")


class RewardModelScorer:
    """Scores whole responses by the number that the reward model gives to the last token of a sequence.

    A reward model with the policy's tokens and chat template reads the policy's sequences as they are. For
    any other one the conversation is written anew from `prompt_messages` and the response's text, in the
    reward model's own template.

    Example::

        scorer = RewardModelScorer(forward, tokenizer, policy_tokenizer, config.reward_model, group)
        scores = scorer.score(batch)  # (B,)
    """

    def __init__(
        self,
        forward: PackedForward,
        tokenizer: Any,
        policy_tokenizer: Any,
        config: RewardModelConfig,
        group: dist.ProcessGroup | None,
        *,
        policy_model_type: str,
    ) -> None:
        """Put the parts together.

        Args:
            forward: The reward model, with a scalar head. Its media loader is the policy's: an image must
                become as many tokens as it did for the policy.
            tokenizer: The reward model's.
            policy_tokenizer: The policy's, with the chat template that its prompts were rendered by.
            config: `worker.reward_model`.
            group: The data-parallel ranks, None for all.
            policy_model_type: `model_type` of the policy's transformers config.

        Raises:
            ValueError: The conversation must be written anew and the reward model has no chat template.
        """
        self.forward = forward
        self.tokenizer = tokenizer
        self.policy_tokenizer = policy_tokenizer
        self.config = config
        self.group = group
        self.policy_model_type = policy_model_type
        self.reads_policy_tokens = has_same_conversations(tokenizer, policy_tokenizer)
        if not self.reads_policy_tokens and tokenizer.chat_template is None:
            raise ValueError(
                f"`{OPTION}.model_path` ({config.model.model_path}) has other tokens than the policy and no"
                f" chat template: set `{OPTION}.tokenizer_path` to a tokenizer that has one"
            )

    def score(self, batch: DataProto) -> Tensor:
        """Score each response, (B,) float32 on CPU: what the head gives, without a weight.

        Every rank must call it: the ranks agree on the number of micro batches.

        Args:
            batch: This rank's sequences; reads `input_ids`, `attention_mask`, `position_ids`, `responses`,
                `multi_modal_data` if it is there, and `prompt_messages` if the conversation is written anew.

        Raises:
            NotImplementedError: Rows hold media, and the reward model is of another type than the policy.
            ValueError: A score is not finite, or the chat template refuses a conversation.
        """
        self._check_media(batch)
        conversations = self._as_they_are(batch) if self.reads_policy_tokens else self._written_anew(batch)
        scores = forward_in_micro_batches(
            self.forward,
            conversations,
            self.forward.last_values,
            size=as_number(self.config.micro_batch_size_per_device),
            dynamic_batching=True,
            group=self.group,
        )
        if not scores.isfinite().all():
            raise ValueError(
                f"`{OPTION}.model_path` ({self.config.model.model_path}): the score of"
                f" {int((~scores.isfinite()).sum())} of {len(scores)} responses is not finite: compute in"
                " another type, see `worker.reward_model.fsdp.mp_param_dtype`"
            )
        return scores

    def _as_they_are(self, batch: DataProto) -> DataProto:
        """The policy's sequences, counted for a text model if the policy's positions are M-RoPE's."""
        rows = batch.select(MODEL_KEYS, ["multi_modal_data"])
        if rows.batch["position_ids"].ndim == 2 or model_type_of(self.forward.config).position_rows > 1:
            return rows
        positions = (rows.batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)  # (B, T)
        return rows.select(["input_ids", "attention_mask"]).merge(
            DataProto.from_dict({"position_ids": positions})
        )

    def _written_anew(self, batch: DataProto) -> DataProto:
        texts = response_texts(batch, self.policy_tokenizer)
        prompts = batch.non_tensor_batch["prompt_messages"].tolist()
        return encode_conversations(prompts, texts, self.tokenizer)

    def _check_media(self, batch: DataProto) -> None:
        media = batch.non_tensor_batch.get("multi_modal_data", ())
        model_type = self.forward.config.model_type
        readable = self.reads_policy_tokens and model_type == self.policy_model_type
        if not readable and any(row and any(row.values()) for row in media):
            raise NotImplementedError(
                f"`{OPTION}.model_path` ({self.config.model.model_path}, {model_type}): rows hold images or"
                " videos, which a reward model can only score with the tokens, the chat template and the"
                f" model type ({self.policy_model_type}) of `worker.actor.model.model_path`"
            )
