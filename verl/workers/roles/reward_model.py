# SPDX-License-Identifier: Apache-2.0
"""A sequence-classification model that scores responses, on one data-parallel rank.

A reward model was trained on conversations in its own tokens and chat template. One with the policy's reads
the policy's sequences unchanged; for any other, the conversation is rendered again from `prompt_messages` and
the text of the response.
"""

from collections.abc import Sequence
from typing import Any

import jinja2
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl.config.model import as_number
from verl.config.worker import RewardModelConfig
from verl.data.messages import Message
from verl.models.families.registry import family_of
from verl.protocol import DataProto
from verl.workers.packing.forward import PackedForward
from verl.workers.packing.media_inputs import MEDIA_KEYS, has_media
from verl.workers.packing.schedule import run_in_micro_batches

OPTION = "worker.reward_model.model"
MODEL_KEYS = ["input_ids", "attention_mask", "position_ids"]


class RewardModelScorer:
    """Scores whole responses: the reward model's output at the last token of the sequence."""

    def __init__(
        self,
        forward: PackedForward,  # with the policy's media loader: as many tokens for an image
        tokenizer: Any,
        policy_tokenizer: Any,  # with the chat template of the prompts
        config: RewardModelConfig,
        *,
        policy_model_type: str,  # `model_type` of its transformers config
    ) -> None:
        self.config, self.forward, self.policy_model_type = config, forward, policy_model_type
        self.tokenizer, self.policy_tokenizer = tokenizer, policy_tokenizer
        self.reads_policy_tokens = has_same_conversations(tokenizer, policy_tokenizer)
        if not self.reads_policy_tokens and tokenizer.chat_template is None:
            raise ValueError(
                f"`{OPTION}.model_path` ({config.model.model_path}) has other tokens than the policy and no"
                f" chat template: set `{OPTION}.tokenizer_path` to a tokenizer that has one"
            )

    def score(self, batch: DataProto) -> Tensor:
        """Score each response: (B,) float32 on CPU, unweighted; collective over all ranks.

        Raises:
            NotImplementedError: Rows hold media, and the reward model is of another type than the policy.
            ValueError: A score is not finite, or the chat template refuses a conversation.
        """
        self._check_media(batch)
        rows = self._policy_sequences(batch) if self.reads_policy_tokens else self._rendered_again(batch)
        scores = run_in_micro_batches(
            self.forward,
            rows,
            self.forward.last_values,
            size=as_number(self.config.micro_batch_size_per_device),
            dynamic_batching=True,
        )
        if not scores.isfinite().all():
            raise ValueError(
                f"`{OPTION}.model_path` ({self.config.model.model_path}): the score of"
                f" {int((~scores.isfinite()).sum())} of {len(scores)} responses is not finite: compute in"
                " another type, see `worker.reward_model.fsdp.mp_param_dtype`"
            )
        return scores

    def _policy_sequences(self, batch: DataProto) -> DataProto:
        rows = batch.select(MODEL_KEYS, MEDIA_KEYS)
        if rows.batch["position_ids"].ndim == 2 or family_of(self.forward.config).position_rows > 1:
            return rows
        # a text model cannot read the policy's M-RoPE positions
        positions = (rows.batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)  # (B, T)
        return rows.select(["input_ids", "attention_mask"]).merge({"position_ids": positions})

    def _rendered_again(self, batch: DataProto) -> DataProto:
        texts = response_texts(batch, self.policy_tokenizer)
        prompts = batch.non_tensor_batch["prompt_messages"].tolist()
        return encode_conversations(prompts, texts, self.tokenizer)

    def _check_media(self, batch: DataProto) -> None:
        media = [row for key in MEDIA_KEYS for row in batch.non_tensor_batch.get(key, ())]
        model_type = self.forward.config.model_type
        readable = self.reads_policy_tokens and model_type == self.policy_model_type
        if not readable and any(map(has_media, media)):
            raise NotImplementedError(
                f"`{OPTION}.model_path` ({self.config.model.model_path}, {model_type}): rows hold images or"
                " videos, which a reward model can only score with the tokens, the chat template and the"
                f" model type ({self.policy_model_type}) of `worker.actor.model.model_path`"
            )


def has_same_tokens(tokenizer: Any, policy_tokenizer: Any) -> bool:
    """True if every token of the policy has the same id in the other tokenizer, which may have more."""
    return policy_tokenizer.get_vocab().items() <= tokenizer.get_vocab().items()


def has_same_conversations(tokenizer: Any, policy_tokenizer: Any) -> bool:
    """True if tokens and chat template are the policy's; without a template it reads the policy's."""
    same_template = tokenizer.chat_template in (None, policy_tokenizer.chat_template)
    return same_template and has_same_tokens(tokenizer, policy_tokenizer)


def response_texts(batch: DataProto, policy_tokenizer: Any) -> list[str]:
    """Decode `responses` (B, R) without special tokens, observations included."""
    responses, mask = batch.batch["responses"], batch.batch["response_mask"].bool()  # (B, R)
    token_ids = [row[kept].tolist() for row, kept in zip(responses, mask, strict=True)]
    return policy_tokenizer.batch_decode(token_ids, skip_special_tokens=True)


def encode_conversations(
    prompts: Sequence[list[Message]], responses: Sequence[str], tokenizer: Any
) -> DataProto:
    """Render and tokenize conversations with the tokenizer's own chat template, padded on the right.

    A response that was cut off ends like any other: the template closes the assistant's turn.
    """
    texts = [
        _render([*prompt, {"role": "assistant", "content": response}], tokenizer)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    rows = [torch.tensor(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    return DataProto.from_dict(
        {
            "input_ids": pad_sequence(rows, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
            "position_ids": pad_sequence([torch.arange(len(row)) for row in rows], batch_first=True),
        }
    )


def _render(messages: list[Message], tokenizer: Any) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    except jinja2.TemplateError as error:
        roles = [message["role"] for message in messages]
        raise ValueError(
            f"`worker.reward_model.model.tokenizer_path`: the chat template refuses messages of {roles}:"
            f" {error}; use prompts, or a template, that fit"
        ) from error
