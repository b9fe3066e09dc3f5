# SPDX-License-Identifier: Apache-2.0
"""Long texts are cut to a number of tokens."""

import pytest

from tests.helpers.tool_templates import tool_tokenizer
from verl.agents.rules import cut_text
from verl.models.tiny import train_tokenizer

TOKENIZER = tool_tokenizer("hermes")
LETTERS = "ZQXJKVUYZQXJKVUYZQXJKVUYZQXJKV"  # a token each


def count(text):
    return len(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("side", ["left", "middle", "right"])
def test_a_text_within_the_limit_is_unchanged(side):
    for text in ("", "a", LETTERS):
        assert cut_text(TOKENIZER, text, max(count(text), 1), side) == text


def test_a_side_is_cut_out_and_marked():
    # One token too many, and room for the 7 tokens of the mark.
    assert count(LETTERS) == 30 and count(" [...] ") == 7

    assert cut_text(TOKENIZER, LETTERS, 29, "left") == " [...] " + LETTERS[8:]
    assert cut_text(TOKENIZER, LETTERS, 29, "right") == LETTERS[:22] + " [...] "


def test_the_middle_is_cut_out_between_halves():
    assert cut_text(TOKENIZER, LETTERS, 20, "middle") == LETTERS[:7] + " [...] " + LETTERS[24:]  # 20 - 7


@pytest.mark.parametrize(("side", "cut"), [("left", "KV"), ("middle", "ZQ"), ("right", "ZQ")])
def test_without_room_for_the_mark_one_end_remains(side, cut):
    assert cut_text(TOKENIZER, LETTERS, 2, side) == cut


@pytest.mark.parametrize("side", ["left", "middle", "right"])
@pytest.mark.parametrize(
    "text", ["日本語のテキスト" * 5, "🙂🙃" * 9, "naïve façade " * 8, "a\nb  c\t" * 9, "e\u0301" * 20]
)
def test_characters_stay_whole_and_the_limit_holds(text, side):
    for tokenizer in (TOKENIZER, train_tokenizer(words=["naïve", "日本"])):
        total = len(tokenizer.encode(text, add_special_tokens=False))
        for limit in range(1, total + 2):
            cut = cut_text(tokenizer, text, limit, side)

            assert len(tokenizer.encode(cut, add_special_tokens=False)) <= limit
            assert "\ufffd" not in cut
            head, mark, tail = cut.partition(" [...] ")
            assert (text.startswith(head) and text.endswith(tail)) or (not mark and text.endswith(cut))
            assert (cut == text) == (limit >= total)
