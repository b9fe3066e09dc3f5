# SPDX-License-Identifier: Apache-2.0
"""Model inputs of a micro batch's media: each distinct medium once, and the order they are used in."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.data.media.references import media_key
from verl.models.families.interface import Kind, Medium
from verl.protocol import DataProto

MediaRow = dict[str, Any]  # `images` and `videos` of a row
MEDIA_KEYS = ("multi_modal_data", "observation_media")  # of prompts, of responses
BLANK: MediaRow = {}  # a blank image, encoded where a rank's rows have no media


@dataclass(frozen=True)
class WholeRows:
    """Metadata of a micro batch whose rows this rank runs alone, while others run other rows."""

    media: tuple[MediaRow, ...] | None  # of all ranks' rows, to be encoded together; None: each its own

    @classmethod
    def of(cls, micro: DataProto) -> "WholeRows | None":
        return micro.meta_info.get("whole_rows")

    def attach_to(self, micro: DataProto) -> DataProto:
        return DataProto(micro.batch, micro.non_tensor_batch, micro.meta_info | {"whole_rows": self})


def has_media(row: MediaRow | None) -> bool:
    return bool(row) and any(row.values())


def media_in_packing_order(batch: DataProto, groups: Iterable[Sequence[int]]) -> list[MediaRow]:
    """List the media of packed rows: of the prompt that a group shares, then of each row's observations."""
    prompts, observations = (batch.non_tensor_batch.get(key) for key in MEDIA_KEYS)
    found: list[MediaRow] = []
    for rows in groups:
        found += [] if prompts is None else [prompts[row] for row in rows[:1]]
        found += [] if observations is None else [observations[row] for row in rows]
    return [row for row in found if has_media(row)]


def media_inputs(
    rows: Iterable[MediaRow],
    encoded: Iterable[MediaRow],
    media_of: Callable[[MediaRow], Sequence[Medium]],  # in the order of the prompt
    token_kind: Callable[[Kind], Kind],  # of the family
) -> tuple[list[Medium], dict[Kind, list[int]]]:
    """Read the media of all distinct rows in `encoded`, among them `rows`.

    Returns:
        The media, and for `rows` in order the number of each image and video among them, by the kind of the
        tokens that their features replace.
    """
    media: list[Medium] = []
    numbers: dict[tuple, range] = {}
    for row in encoded:
        key = media_key(row)
        if key not in numbers:
            first = len(media)
            media += media_of(row)
            numbers[key] = range(first, len(media))
    order: dict[Kind, list[int]] = {}
    for row in rows:
        for number in numbers[media_key(row)]:
            order.setdefault(token_kind(media[number].kind), []).append(number)
    return media, order
