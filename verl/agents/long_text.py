# SPDX-License-Identifier: Apache-2.0
"""Cut texts to a number of tokens."""

from typing import Any

MARK = " [...] "  # where text was cut out


def cut_text(tokenizer: Any, text: str, limit: int, side: str) -> str:
    """Cut out the left, middle or right of a text that has more than `limit` tokens; characters stay whole.

    The result, with a mark where text is missing, has at most `limit` tokens. If the mark does not fit, the
    start of the text remains (its end, if the left is cut out).
    """
    offsets = _offsets(tokenizer, text)
    if len(offsets) <= limit:
        return text
    mark = MARK if len(_offsets(tokenizer, MARK)) < limit else ""
    side = "right" if side == "middle" and not mark else side
    # Tokens at a seam may be split otherwise than before, so the result is counted and not the parts.
    for kept in range(limit, 0, -1):
        head, tail = {"left": (0, kept), "middle": (-(-kept // 2), kept // 2), "right": (kept, 0)}[side]
        cut = _head(text, offsets, head) + mark + _tail(text, offsets, tail)
        if len(_offsets(tokenizer, cut)) <= limit:
            return cut
    return mark


def _offsets(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]


def _head(text: str, offsets: list[tuple[int, int]], count: int) -> str:
    # A character of several tokens has its own bounds as the offsets of each.
    return text[: offsets[count][0]] if count else ""


def _tail(text: str, offsets: list[tuple[int, int]], count: int) -> str:
    if not count:
        return ""
    first = len(offsets) - count
    return text[max(offsets[first][0], offsets[first - 1][1]) :]
