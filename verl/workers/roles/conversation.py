# SPDX-License-Identifier: Apache-2.0
"""Sequences for a reward model whose tokens or chat template are not the policy's: text out, tokens in.

A reward model was trained on conversations in its own template. The policy's tokens stand for other texts
there, and even the same tokens may stand in a frame that it never saw.
"""

from collections.abc import Sequence
from typing import Any

import jinja2
import torch
from torch import Tensor
from transformers import AutoTokenizer

from verl.data.files import use_modelscope_hub_if_asked
from verl.data.messages import Message
from verl.protocol import DataProto


def load_reward_tokenizer(tokenizer_path: str, trust_remote_code: bool = False) -> Any:
    """Load a reward model's tokenizer; unlike the policy's it may lack a chat template and padding.

    Args:
        tokenizer_path: A model folder or a hub name.
        trust_remote_code: Run code that comes with the model.

    Raises:
        ValueError: There is no tokenizer.
    """
    use_modelscope_hub_if_asked()
    try:
        return AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"`worker.reward_model.model.model_path` (or `tokenizer_path`): {tokenizer_path} is neither a"
            f" folder with a tokenizer nor a hub model that can be reached: {error}"
        ) from error


def has_same_tokens(tokenizer: Any, policy_tokenizer: Any) -> bool:
    """Whether every token of the policy has the same id in the other tokenizer, which may know more."""
    return policy_tokenizer.get_vocab().items() <= tokenizer.get_vocab().items()


def has_same_conversations(tokenizer: Any, policy_tokenizer: Any) -> bool:
    """Whether the policy's sequences can be read as they are: the same tokens, and no other chat template.

    A tokenizer without a chat template is taken to read the policy's.
    """
    same_template = tokenizer.chat_template in (None, policy_tokenizer.chat_template)
    return same_template and has_same_tokens(tokenizer, policy_tokenizer)


def response_texts(batch: DataProto, policy_tokenizer: Any) -> list[str]:
    """The text of each response without special tokens; tool output inside of it belongs to it.

    Args:
        batch: Reads `responses` (B, R) and `attention_mask` (B, T).
        policy_tokenizer: Of the policy that sampled them.
    """
    responses = batch.batch["responses"]  # (B, R)
    attended = batch.batch["attention_mask"][:, -responses.shape[1] :].bool()  # (B, R)
    token_ids = [row[kept].tolist() for row, kept in zip(responses, attended, strict=True)]
    return policy_tokenizer.batch_decode(token_ids, skip_special_tokens=True)


def encode_conversations(
    prompts: Sequence[list[Message]], responses: Sequence[str], tokenizer: Any
) -> DataProto:
    """Conversations in the tokenizer's own chat template.

    A response that was cut off ends like any other: the template closes the assistant's turn.

    Args:
        prompts: Chat messages of each row, their contents strings.
        responses: What the assistant answers in each row.
        tokenizer: With a chat template.

    Returns:
        `input_ids`, `attention_mask` and `position_ids`, (B, T) each, padded on the right.

    Raises:
        ValueError: The template refuses a conversation.
    """
    texts = [
        _render([*prompt, {"role": "assistant", "content": response}], tokenizer)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    rows = [torch.tensor(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    return DataProto.from_dict(
        {
            "input_ids": _right_padded(rows),
            "attention_mask": _right_padded([torch.ones_like(row) for row in rows]),
            "position_ids": _right_padded([torch.arange(len(row)) for row in rows]),
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


def _right_padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
