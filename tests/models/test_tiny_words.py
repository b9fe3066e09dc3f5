# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of somebody's words: each is one token, and every text comes back as it was."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoProcessor, AutoTokenizer

from tests.helpers.nightly import by_day
from verl.models.tiny import (
    MAX_WORDS,
    SPECIAL_TOKENS,
    TINY_MODELS,
    find_words,
    save_tiny_model,
    texts_of,
    train_tokenizer,
)

ANSWERS = [
    "red",
    "New York",
    "3.14",
    "-5",
    "#1",
    r"\boxed{5}",
    "naïve",
    "数学",
    "a_b",
    "(B)",
    "O'Neil",
    "C++",
]
WORDS = find_words([*ANSWERS, "What colour is the circle in the image?"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", words=WORDS)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize(
    "before, after", [("", ""), (" ", "."), ("the answer is ", "\n"), ("\n", "<|im_end|>")]
)
def test_an_answer_is_one_token_wherever_it_stands(tokenizer, answer, before, after):
    ids = tokenizer.encode(before + answer + after)

    assert ids.count(tokenizer.vocab[tokenizer.tokenize(answer)[0]]) == 1
    assert len(tokenizer.encode(answer)) == 1
    assert len(ids) == len(tokenizer.encode(before)) + 1 + len(tokenizer.encode(after))


def test_a_word_within_a_longer_one_is_not_cut_out(tokenizer):
    red = tokenizer.vocab["red"]

    assert red not in tokenizer.encode("infrared reddish")
    assert tokenizer.encode("red red_ (red)").count(red) == 3


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from([*WORDS, " ", "\n", "Ġ"]), st.text(max_size=8))))
def test_every_text_is_decoded_as_it_was_encoded(parts):
    tokenizer, text = WORD_TOKENIZER, "".join(parts)

    assert tokenizer.decode(tokenizer.encode(text)) == text


WORD_TOKENIZER = train_tokenizer(words=WORDS)


def test_every_token_of_the_model_is_a_text(tokenizer):
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert all(tokenizer.decode([number]) for number in range(len(tokenizer)))
    assert {*SPECIAL_TOKENS, "user", "assistant"} <= tokenizer.get_vocab().keys()


@pytest.mark.parametrize(
    "family", by_day([name for name in TINY_MODELS if TINY_MODELS[name].keeps_words], "qwen2", "gemma3_vl")
)
def test_every_family_is_loaded_with_the_words(tmp_path, family):
    folder = save_tiny_model(tmp_path / "model", family, words=["New York"])
    loaded = [AutoTokenizer.from_pretrained(folder)]
    if TINY_MODELS[family].processor:
        loaded.append(AutoProcessor.from_pretrained(folder).tokenizer)

    assert [len(one.encode("New York")) for one in loaded] == [1] * len(loaded)


@pytest.mark.parametrize("family", ["deepseek", "qwen3_5"])
def test_words_are_refused_where_they_would_not_be_loaded(tmp_path, family):
    with pytest.raises(ValueError, match=f"{family} model cannot have words of its own; qwen3 can"):
        save_tiny_model(tmp_path / "model", family, words=["red"])
    assert not (tmp_path / "model").exists()


def test_frequent_words_come_first_and_long_texts_only_as_words():
    words = find_words(["yes", "yes", "no", "It is blue because the sky is blue and wide."])

    assert words[:2] == ["yes", "is"] or words[:2] == ["yes", "blue"]
    assert {"no", "blue", "sky"} < set(words) and not any(" " in word for word in words)
    assert len(find_words(str(number) for number in range(3 * MAX_WORDS))) == MAX_WORDS


def test_words_are_found_in_every_cell_that_holds_text():
    turns = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]

    assert texts_of(turns) == ["user", "text", "hello"]
    assert [texts_of(value) for value in (7, 2.0, 0.5, True, None, b"x")] == [
        ["7"],
        ["2"],
        ["0.5"],
        [],
        [],
        [],
    ]
