# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of tiny models, with chosen words as single tokens.

A tiny model learns to answer with one token within a few steps, and rarely with several. Its own tokenizer
knows few words; this one knows those of somebody's rows.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

MAX_WORDS = 1024  # of a tokenizer; the most frequent ones, as rare ones cannot be learned either
MAX_ANSWER_WORDS = 3  # in a text that is one token as a whole
MAX_ANSWER_CHARS = 32
PART = r"\p{L}[\p{L}\p{M}]*|\p{N}+|[^\s\p{L}\p{N}]+|\s+"  # of a text: word, number, signs or space
WORD = re.compile(r"[^\W\d_]+|\d+")


def find_words(texts: Iterable[str]) -> list[str]:
    """Return what deserves a token, the most frequent first: short texts as a whole, and all words."""
    counts: Counter[str] = Counter()
    for text in texts:
        text = text.strip()
        if text and len(text) <= MAX_ANSWER_CHARS and len(text.split()) <= MAX_ANSWER_WORDS:
            counts[text] += 1
        counts.update(word for word in WORD.findall(text) if word != text)
    return [word for word, _ in counts.most_common(MAX_WORDS)]


def texts_of(value: Any) -> list[str]:
    """Return the texts and numbers in a cell of a table, and in its lists and mappings, such as messages."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [f"{value:g}" if isinstance(value, float) else str(value)]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in texts_of(item)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [text for item in value for text in texts_of(item)]
    return []


def word_tokenizer(words: Sequence[str], special_tokens: Sequence[str]) -> Tokenizer:
    """Build a tokenizer of words, special tokens and single bytes, which decodes to exactly what it encoded.

    Spaces are tokens of their own, so a word is the same token at every position.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [as_bytes.pre_tokenize_str(word)[0][0] for word in words]
    tokens = dict.fromkeys([*special_tokens, *alphabet, *spelled])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # A part that is in the vocabulary becomes one token; without merges all others fall into bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    whole = [_whole(word) for word in sorted(words, key=len, reverse=True)]
    split = pre_tokenizers.Split(Regex("|".join([*whole, PART])), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer


def _whole(word: str) -> str:
    """A pattern for a word that is not a part of a longer one."""
    start = r"(?<![\p{L}\p{N}])" if word[0].isalnum() else ""
    end = r"(?![\p{L}\p{N}])" if word[-1].isalnum() else ""
    return start + re.sub(r"([^\w\s]|_)", r"\\\1", word) + end
