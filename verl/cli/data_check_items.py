# SPDX-License-Identifier: Apache-2.0
"""Rows as lines of text: prompts and conversations as the model will see them, with their media."""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from verl.cli.contact_sheet import Tile, save_sheet
from verl.data.bad_rows import BadRow
from verl.data.dataset import Item, RowDataset
from verl.data.media.loader import DecodedMedia
from verl.data.media.references import shown_name
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset

MAX_FRAMES = 64  # of a video on a contact sheet
GIVEN, LEARNED = "|", "+"  # what begins a line of text


def prompt_lines(dataset: RLHFDataset, place: int, sheet: Path) -> list[str] | BadRow:
    """Show a prompt as the model will see it, or say why it cannot be used.

    Args:
        dataset: That holds it.
        place: Among the rows that are used.
        sheet: The PNG to write, if the prompt has media.
    """
    item = dataset[place]
    if isinstance(item, BadRow):
        return item
    tokens = item["prompts"][item["prompt_mask"].bool()]  # (L,)
    return [
        f"prompt: {_counted(tokens, dataset)}",
        f"answer: {item['ground_truth']!r:.200}",
        *shown_media(item, dataset, sheet),
        *_marked(item["prompt_text"], GIVEN),
    ]


def conversation_lines(dataset: SFTDataset, place: int, sheet: Path) -> list[str] | BadRow:
    """Show a conversation with what is learned of it, or say why it cannot be used; see `prompt_lines`."""
    item = dataset[place]
    if isinstance(item, BadRow):
        return item
    num_learned = int(item["is_trained"].sum())
    row = dataset.render(dataset.rows[dataset.indices[place]])
    lines = [
        f"conversation: {_counted(item['input_ids'], dataset)}, {num_learned} of them learned",
        *shown_media(item, dataset, sheet),
    ]
    for is_learned, part in groupby(zip(row.is_trained, row.raw_ids, strict=True), key=itemgetter(0)):
        text = dataset.tokenizer.decode([token for _, token in part], clean_up_tokenization_spaces=False)
        lines += _marked(text.removeprefix("\n"), LEARNED if is_learned else GIVEN)
    return lines


def evenly(total: int, count: int) -> list[int]:
    """Numbers from 0 up to the last before `total`, at most `count`, at about the same distance."""
    count = min(total, count)
    return [number * (total - 1) // max(1, count - 1) for number in range(count)]


def _marked(text: str, mark: str) -> list[str]:
    stripped = text.rstrip("\n")
    return [f"{mark} {line}" for line in stripped.split("\n")] if stripped else []


def _counted(ids: Tensor, dataset: RowDataset) -> str:
    counts = ", ".join(f"{count} of {kind}" for kind, count in count_tokens(ids, dataset.processor).items())
    return f"{len(ids)} tokens ({counts})"


def count_tokens(ids: Tensor, processor: Any | None) -> dict[str, int]:
    """How many tokens stand for text, images and videos; media only where there are some.

    Args:
        ids: (L,)
        processor: Of a model that reads media.
    """
    counts = {
        f"{kind}s": int((ids == getattr(processor, f"{kind}_token_id")).sum())
        for kind in ("image", "video")
        if processor is not None
    }
    media = {kind: count for kind, count in counts.items() if count}
    return {"text": len(ids) - sum(media.values())} | media


def shown_media(item: Item, dataset: RowDataset, sheet: Path) -> Iterator[str]:
    """Yield what the media of an item are, and put them on a contact sheet.

    Args:
        item: Of the dataset.
        dataset: Has decoded the item's media.
        sheet: The PNG to write, if there are any.
    """
    if not item["multi_modal_data"]:
        return
    assert dataset.media is not None, "a row with media was read by a loader of media"
    decoded = dataset.media.decode(item["multi_modal_data"])  # from the cache
    yield from media_lines(item, decoded)
    save_sheet(list(media_tiles(decoded)), sheet)
    yield f"contact sheet: {sheet}"


def media_lines(item: Item, decoded: DecodedMedia) -> Iterator[str]:
    """Yield a line for each image and video of an item, with its size as the model gets it."""
    media = item["multi_modal_data"]
    for ref, image in zip(media["images"], decoded.images, strict=True):
        yield f"image {shown_name(ref)}: {image.width} x {image.height}"
    for ref, (frames, meta) in zip(media["videos"], decoded.videos, strict=True):
        num_frames, height, width, _ = frames.shape
        yield (
            f"video {shown_name(ref)}: {num_frames} of {meta['total_num_frames']} frames, {width} x {height},"
            f" from {_time(meta, 0):.2f} to {_time(meta, -1):.2f} s"
        )


def media_tiles(decoded: DecodedMedia) -> Iterator[Tile]:
    """Yield the pictures of an item: its images, and of each video up to 64 frames."""
    for number, image in enumerate(decoded.images):
        yield Tile(image, f"image {number}")
    for number, (frames, meta) in enumerate(decoded.videos):
        for place in evenly(len(frames), MAX_FRAMES):
            yield Tile(Image.fromarray(frames[place]), f"video {number}: {_time(meta, place):.2f} s")


def _time(meta: dict[str, Any], place: int) -> float:
    """When a sampled frame stands in its video, in seconds."""
    return meta["frames_indices"][place] / meta["fps"]
