# SPDX-License-Identifier: Apache-2.0
"""Look at the data of a run as its model will see them, without Ray, GPU or weights.

    python3 scripts/data_check.py config=run.yaml --rows 5 --out outputs/data_check

Opens the files with the run's own code and tells for each of them how many rows are used, too long or bad,
and why; how long the prompts are; and whether a run would start. Some rows, from the first to the last, are
shown whole: the rendered prompt, its tokens, and its images and video frames on a contact sheet. Their media
are decoded; of all other rows only the headers of files are read, unless `--decode` asks for more.

Exit status: 0; 2 where a run with this config would stop because of its data or its config.
"""

import argparse
import collections
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from verl.trainer.command import at_least, make_parser, run_command
from verl.trainer.config import PPOConfig
from verl.trainer.data_loader import Loaders, PromptLoader
from verl.trainer.ending import BAD_INPUT
from verl.trainer.opened_data import named, opened_data
from verl.trainer.plan import count_training_steps
from verl.utils.bad_rows import REPORT_NAME, BadRow
from verl.utils.contact_sheet import Tile, save_sheet
from verl.utils.dataset import RLHFDataset
from verl.utils.media_references import shown_name
from verl.utils.multimodal import DecodedMedia
from verl.utils.row_dataset import Item
from verl.utils.text_charts import histogram, quantile, table

MAX_LISTED = 10
MAX_FRAMES = 64  # of a video on a contact sheet
OUT = Path("outputs", "data_check")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = make_parser("data_check", __doc__)
    parser.add_argument("--rows", type=at_least(0), default=3, help="rows of each kind to show (default: 3)")
    parser.add_argument(
        "--out", type=Path, default=OUT, help=f"folder of contact sheets and bad rows (default: {OUT})"
    )
    parser.add_argument("--decode", action="store_true", help="decode the media of every row")
    return run_command(parser, arguments, _check)


def _check(switches: argparse.Namespace, config: PPOConfig) -> int:
    problems: list[str] = []
    with opened_data(config, switches.out, measures=True) as loaders:
        for option, loader in named(loaders).items():
            if switches.decode:
                collections.deque(loader, maxlen=0)  # reads an epoch, as a run does
            problems += _report(option, loader, config, switches)
        problems += _step_problems(config, loaders)
    report = switches.out / REPORT_NAME
    if report.exists():
        sys.stdout.write(f"the bad rows are listed in {report}\n")
    if problems:
        sys.stdout.write("a run with this config would stop:\n" + "".join(f"  - {one}\n" for one in problems))
        return BAD_INPUT
    sys.stdout.write("a run with this config can use its data\n")
    return 0


def _report(option: str, loader: PromptLoader, config: PPOConfig, switches: argparse.Namespace) -> list[str]:
    """Write about all rows and show some; return why a run would stop because of them."""
    dataset, report = loader.dataset, loader.dataset.report
    assert report is not None, "make_loaders gives every dataset the run's report"
    bad = {row.index: row for row in [*dataset.bad_rows, *loader.bad_rows.values()]}
    sys.stdout.write(describe_rows(option, dataset, bad))
    for number in evenly(len(dataset), switches.rows):
        item = dataset[number]
        where = dataset.rows.where(dataset.indices[number])
        if isinstance(item, BadRow):
            bad[item.index] = item
            report.add([item])
            sys.stdout.write(f"{where}\n  bad: {item.reason}\n\n")
        else:
            sheet = switches.out / f"{option.removeprefix('data.').removesuffix('_files')}_{number}.png"
            lines = [where, *describe_item(item, dataset, sheet)]
            sys.stdout.write("\n  ".join(lines) + "\n\n")
    return list(row_problems(option, dataset, len(bad), config))


def _step_problems(config: PPOConfig, loaders: Loaders) -> Iterator[str]:
    """Yield what the number of training rows is too small for."""
    if loaders.train is None:
        return
    try:
        count_training_steps(config, len(loaders.train.dataset))
    except ValueError as error:
        yield str(error)


def describe_rows(option: str, dataset: RLHFDataset, bad: Mapping[int, BadRow]) -> str:
    """What becomes of the rows of each file, how long their prompts are, and which are left out and why.

    Args:
        option: That names the files.
        dataset: Their rows.
        bad: Those that cannot be used, by their number over all files.
    """
    limit, overlong = dataset.config.max_prompt_length, overlong_rows(dataset)
    lengths = [length for length in dataset.lengths if length]  # 0 of rows that could not be measured
    num_used = len(set(dataset.indices) - set(bad))
    too_long = [f"{dataset.rows.where(index)}: {dataset.lengths[index]} tokens" for index in overlong]
    return (
        f"`{option}`: {len(dataset.rows)} rows, {num_used} used\n{table(list(_file_rows(dataset, bad)))}"
        f"  tokens of a prompt, media included: shortest {min(lengths)}, half up to"
        f" {quantile(lengths, 0.5)}, 95% up to {quantile(lengths, 0.95)}, longest {max(lengths)};"
        f" `data.max_prompt_length` is {limit}\n{histogram(lengths, limit, indent='    ')}"
        + _listed("longer than `data.max_prompt_length`", too_long)
        + _listed("bad", [str(bad[index]) for index in sorted(bad)])
        + "\n"
    )


def _file_rows(dataset: RLHFDataset, bad: Mapping[int, BadRow]) -> Iterator[tuple[object, ...]]:
    yield "file", "rows", "used", "too long", "bad"
    rows = dataset.rows
    kinds = dict.fromkeys(dataset.indices, "used") | dict.fromkeys(overlong_rows(dataset), "too long")
    kinds |= dict.fromkeys(bad, "bad")
    for source, start in zip(rows.sources, rows.starts, strict=False):  # one start more: the end
        size = len(source.rows)
        counts = Counter(kinds[index] for index in range(start, start + size))
        yield source.name, size, counts["used"], counts["too long"], counts["bad"]


def overlong_rows(dataset: RLHFDataset) -> list[int]:
    """The rows whose prompt is longer than `data.max_prompt_length`, by their number over all files."""
    limit = dataset.config.max_prompt_length
    return [index for index, length in enumerate(dataset.lengths) if length > limit]


def _listed(what: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    more = [f"... and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    return "\n    ".join([f"  {what}: {len(lines)} rows", *lines[:MAX_LISTED], *more]) + "\n"


def row_problems(option: str, dataset: RLHFDataset, num_bad: int, config: PPOConfig) -> Iterator[str]:
    """Yield why a run would not start with these rows, or end when it comes to them."""
    data, num_overlong = config.data, dataset.num_overlong
    if data.on_bad_row == "skip":
        return
    if num_bad:
        yield f"{num_bad} rows of `{option}` are bad: repair them, or set `data.on_bad_row=skip`"
    if num_overlong and not data.filter_overlong_prompts:
        yield (
            f"{num_overlong} rows of `{option}` are longer than `data.max_prompt_length`"
            f" ({data.max_prompt_length}): raise it, or set `data.filter_overlong_prompts=true`"
        )


def evenly(total: int, count: int) -> list[int]:
    """Numbers from 0 up to the last before `total`, at most `count`, at about the same distance."""
    count = min(total, count)
    return [number * (total - 1) // max(1, count - 1) for number in range(count)]


def describe_item(item: Item, dataset: RLHFDataset, sheet: Path) -> Iterator[str]:
    """Yield the lines that show a prompt as the model will see it; its media go to a contact sheet.

    Args:
        item: Of the dataset.
        dataset: Has decoded the item's media.
        sheet: The PNG to write, if the prompt has media.
    """
    tokens = count_tokens(item, dataset.processor)
    counts = ", ".join(f"{count} of {kind}" for kind, count in tokens.items())
    yield f"prompt: {sum(tokens.values())} tokens ({counts})"
    yield f"answer: {item['ground_truth']!r:.200}"
    if item["multi_modal_data"]:
        assert dataset.media is not None, "a row with media was read by a loader of media"
        decoded = dataset.media.decode(item["multi_modal_data"])  # from the cache
        yield from media_lines(item, decoded)
        save_sheet(list(media_tiles(decoded)), sheet)
        yield f"contact sheet: {sheet}"
    for line in item["prompt_text"].rstrip("\n").split("\n"):
        yield f"| {line}"


def count_tokens(item: Item, processor: Any | None) -> dict[str, int]:
    """How many tokens of a prompt stand for text, images and videos; media only where there are some."""
    num_all = int(item["prompt_mask"].sum())
    counts = {
        f"{kind}s": int((item["prompts"] == getattr(processor, f"{kind}_token_id")).sum())
        for kind in ("image", "video")
        if processor is not None
    }
    media = {kind: count for kind, count in counts.items() if count}
    return {"text": num_all - sum(media.values())} | media


def media_lines(item: Item, decoded: DecodedMedia) -> Iterator[str]:
    """Yield a line for each image and video of a prompt, with its size as the model gets it."""
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
    """Yield the pictures of a prompt: its images, and of each video up to 64 frames."""
    for number, image in enumerate(decoded.images):
        yield Tile(image, f"image {number}")
    for number, (frames, meta) in enumerate(decoded.videos):
        for place in evenly(len(frames), MAX_FRAMES):
            yield Tile(Image.fromarray(frames[place]), f"video {number}: {_time(meta, place):.2f} s")


def _time(meta: dict[str, Any], place: int) -> float:
    """When a sampled frame stands in its video, in seconds."""
    return meta["frames_indices"][place] / meta["fps"]
