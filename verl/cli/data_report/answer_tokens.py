# SPDX-License-Identifier: Apache-2.0
"""Tokens of the answers: can a response hold them, and does the tokenizer know their words?"""

import re
from collections.abc import Iterable
from typing import Any

from verl.cli.text_charts import quantile
from verl.data.readers import count_tokens
from verl.data.rl_dataset import RLHFDataset

MAX_ANSWERS = 2000  # that are counted, spread over all rows
TINY_VOCABULARY = 10_000  # tokens; a larger one has the common words
MANY_PIECES, MAX_SHOWN = 4, 3
WORD = re.compile(r"[^\W\d_]+")


def answer_lines(option: str, dataset: RLHFDataset) -> list[str]:
    """Count the tokens of the answers, and warn of any that no response can hold.

    Answers that are neither text nor numbers are not counted: a reward function takes them apart.
    """
    texts = _answers(dataset)
    if not texts:
        return []
    lengths = [count_tokens(dataset.tokenizer, text) for text in texts]
    single = lengths.count(1)
    lines = [
        f"  tokens of an answer: shortest {min(lengths)}, half up to {quantile(lengths, 0.5)}, longest"
        f" {max(lengths)}; {single} of {len(lengths)} answers are one token",
    ]
    if len(dataset.tokenizer) < TINY_VOCABULARY:
        lines += split_words(dataset.tokenizer, texts)
    limit = dataset.config.max_response_length
    too_long = [text for text, length in zip(texts, lengths, strict=True) if length > limit]
    if too_long:
        lines.append(
            f"warning: `{option}`: answers take up to {max(lengths)} tokens; `data.max_response_length` is"
            f" {limit}: no response can hold {len(too_long)} of {len(texts)} of them, such as"
            f" {too_long[0]!r:.80}"
        )
    return lines


def split_words(tokenizer: Any, texts: Iterable[str]) -> list[str]:
    """Name the words that the tokenizer splits most; a model learns these letter by letter."""
    words = dict.fromkeys(word for text in texts for word in WORD.findall(text))
    pieces = {word: count_tokens(tokenizer, word) for word in words}
    most = sorted((word for word in words if pieces[word] >= MANY_PIECES), key=lambda word: -pieces[word])
    if not most:
        return []
    shown = ", ".join(f"{word!r:.40} into {pieces[word]}" for word in most[:MAX_SHOWN])
    more = f" and {len(most) - MAX_SHOWN} words more" if len(most) > MAX_SHOWN else ""
    return [f"  words that the tokenizer splits into {MANY_PIECES} tokens or more: {shown}{more}"]


def _answers(dataset: RLHFDataset) -> list[str]:
    step = -(-len(dataset.indices) // MAX_ANSWERS)
    values = [dataset.rows[index].get(dataset.config.answer_key) for index in dataset.indices[::step]]
    return [str(value) for value in values if isinstance(value, str | int | float) and str(value)]
