# SPDX-License-Identifier: Apache-2.0
"""The report of `data_check`: all rows of a run in numbers, and some of them as the model will see them.

`PROMPTS` and `CONVERSATIONS` hold the differences between the two kinds of runs.
"""

import os
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from verl.cli.data_report.opened import opened_conversations, opened_data
from verl.config.data import DataConfig
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig, SFTDataConfig
from verl.data import bad_rows
from verl.data.bad_rows import REPORT_NAME, BadRow
from verl.data.dataset import Item, RowDataset
from verl.data.loader import Loaders, PromptLoader
from verl.data.media.decoded import DecodedMedia
from verl.data.media.references import shown_name
from verl.data.readers import count_tokens
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.planning.step_plan import StepPlan, make_plan, make_sft_plan
from verl.trainer.run.exit_status import BAD_INPUT
from verl.utils.text_table import histogram, quantile, table
from verl.viewer.pictures import draw_waveform

MAX_LISTED = 10
MAX_FRAMES = 64  # of a video on a contact sheet
CONTEXT, TRAINED = "|", "+"  # first character of a line of text
TILE, LABEL, GAP = 192, 16, 4  # pixels: side of a picture, height of its label, margin
COLUMNS = 8
PAPER, INK = (255, 255, 255), (0, 0, 0)
MAX_ANSWERS = 2000  # that are counted, spread over all rows
TINY_VOCABULARY = 10_000  # tokens; a larger one has the common words
MANY_PIECES, MAX_WORDS = 4, 3  # tokens of a word, and such words, that are shown
WORD = re.compile(r"[^\W\d_]+")

C = TypeVar("C", PPOConfig, SFTConfig)
Tile = tuple[Image.Image, str]  # a picture and the label below it


def prompt_lines(dataset: RLHFDataset, position: int, sheet: Path) -> list[str] | BadRow:
    """Show a prompt as the model will see it, or return why it cannot be used.

    `position` counts the rows that are used; `sheet` is the contact sheet to write if the prompt has media.
    """
    item = dataset[position]
    if isinstance(item, BadRow):
        return item
    tokens = item["prompts"][item["prompt_mask"].bool()]  # (L,)
    return [
        f"prompt: {_token_counts(tokens, dataset)}",
        f"answer: {item['ground_truth']!r:.200}",
        *_show_media(item, dataset, sheet),
        *_marked(item["prompt_text"], CONTEXT),
    ]


def conversation_lines(dataset: SFTDataset, position: int, sheet: Path) -> list[str] | BadRow:
    """Show a conversation and which of its tokens are trained on; see `prompt_lines`."""
    item = dataset[position]
    if isinstance(item, BadRow):
        return item
    counts, num_trained = _token_counts(item["input_ids"], dataset), int(item["is_trained"].sum())
    row = dataset.render(dataset.rows[dataset.indices[position]])
    lines = [f"conversation: {counts}, {num_trained} of them learned", *_show_media(item, dataset, sheet)]
    for is_trained, part in groupby(zip(row.is_trained, row.raw_ids, strict=True), key=itemgetter(0)):
        text = dataset.tokenizer.decode([token for _, token in part], clean_up_tokenization_spaces=False)
        lines += _marked(text.removeprefix("\n"), TRAINED if is_trained else CONTEXT)
    return lines


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
        f" {max(lengths)}; {single} of {len(lengths)} answers are one token"
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
    shown = ", ".join(f"{word!r:.40} into {pieces[word]}" for word in most[:MAX_WORDS])
    more = f" and {len(most) - MAX_WORDS} words more" if len(most) > MAX_WORDS else ""
    return [f"  words that the tokenizer splits into {MANY_PIECES} tokens or more: {shown}{more}"]


def _answers(dataset: RLHFDataset) -> list[str]:
    step = -(-len(dataset.indices) // MAX_ANSWERS)
    values = [dataset.rows[index].get(dataset.config.answer_key) for index in dataset.indices[::step]]
    return [str(value) for value in values if isinstance(value, str | int | float) and str(value)]


@dataclass(frozen=True)
class Kind(Generic[C]):
    """Functions that open and show the data of one kind of run."""

    row: str  # name of a row
    open: Callable[[C, Path], AbstractContextManager[Loaders]]  # lists bad rows in the folder
    make_plan: Callable[[C, int], StepPlan]  # raises ValueError if there are too few rows
    lines: Callable[[Any, int, Path], list[str] | BadRow]
    answers: Callable[[str, Any], list[str]] = lambda option, dataset: []  # lines on all rows of an option


PROMPTS: Kind[PPOConfig] = Kind("prompt", opened_data, make_plan, prompt_lines, answer_lines)
CONVERSATIONS: Kind[SFTConfig] = Kind("conversation", opened_conversations, make_sft_plan, conversation_lines)


def report_data(config: C, kind: Kind[C], num_shown: int, out: Path, *, decode: bool) -> int:
    """Open the data of a run, write about all files, and return the exit status.

    Shows `num_shown` rows of the training files, and as many of the validation files. The folder `out` gets
    contact sheets and the list of bad rows. With `decode` the media of every row are read.

    Raises:
        ValueError: The model's files or the data cannot be used, or no row can.
    """
    problems: list[str] = []
    with kind.open(config, out) as loaders:
        for option, loader in (("data.train_files", loaders.train), ("data.val_files", loaders.val)):
            if loader is None:
                continue
            if decode:
                deque(loader, maxlen=0)  # reads an epoch, as a run does
            num_bad = _describe(option, loader, kind, num_shown, out)
            problems += row_problems(option, loader.dataset, num_bad, config.data)
        if loaders.train is not None:
            try:
                kind.make_plan(config, len(loaders.train.dataset))
            except ValueError as error:
                problems.append(str(error))
    if (out / REPORT_NAME).exists():
        sys.stdout.write(f"the bad rows are listed in {out / REPORT_NAME}\n")
    if problems:
        listed = "".join(f"  - {problem}\n" for problem in problems)
        sys.stdout.write(f"a run with this config would stop:\n{listed}")
        return BAD_INPUT
    sys.stdout.write("a run with this config can use its data\n")
    return 0


def _describe(option: str, loader: PromptLoader, kind: Kind[Any], num_shown: int, out: Path) -> int:
    """Write about all rows and show some; return the number of bad ones."""
    dataset, report = loader.dataset, loader.dataset.report
    assert report is not None, "a loader's dataset has the run's report"
    bad = {row.index: row for row in [*dataset.bad_rows, *loader.bad_rows.values()]}
    sys.stdout.write(describe_rows(option, dataset, bad, kind.row))
    if option == "data.train_files":
        sys.stdout.write(describe_shares(dataset, bad))
    notes = [*kind.answers(option, dataset), *(f"note: {note}" for note in dataset.notes)]
    sys.stdout.write("".join(f"{note}\n" for note in notes) + "\n")
    for position in evenly(len(dataset), num_shown):
        where = dataset.rows.where(dataset.indices[position])
        sheet = out / f"{option.removeprefix('data.').removesuffix('_files')}_{position}.png"
        lines = kind.lines(dataset, position, sheet)
        if isinstance(lines, BadRow):
            bad[lines.index] = lines
            report.add([lines])
            lines = [f"bad: {lines.reason}"]
        sys.stdout.write("\n  ".join([where, *lines]) + "\n\n")
    return len(bad)


def describe_rows(option: str, dataset: RowDataset, bad: Mapping[int, BadRow], row: str) -> str:
    """Count the used, long and bad rows of each file and their tokens, with a reason for each row left out.

    `option` is the key of the files, `bad` has bad rows by their number over all files, `row` names one.
    """
    limit_option, overlong = f"`data.{dataset.limit_option}`", _overlong_rows(dataset)
    lengths = [length for length in dataset.lengths if length]  # 0 is a row that could not be measured
    too_long = [f"{dataset.rows.where(index)}: {dataset.lengths[index]} tokens" for index in overlong]
    used = [index for index in dataset.indices if index not in bad]
    num_tokens = sum(dataset.lengths[index] for index in used)
    num_learned = sum(dataset.num_learned[index] for index in used)  # 0 for prompts
    share = f", {num_learned} of them learned ({num_learned / num_tokens:.1%})" if num_learned else ""
    return (
        f"`{option}`: {len(dataset.rows)} rows, {len(used)} used\n{table(list(_file_rows(dataset, bad)))}"
        f"  tokens of a {row}, media included: shortest {min(lengths)}, half up to"
        f" {quantile(lengths, 0.5)}, 95% up to {quantile(lengths, 0.95)}, longest {max(lengths)};"
        f" {limit_option} is {dataset.limit}\n{histogram(lengths, dataset.limit, indent='    ')}"
        f"  tokens of the rows that are used: {num_tokens}{share}\n"
        + _listed(f"longer than {limit_option}", too_long)
        + _bad_lines([bad[index] for index in sorted(bad)])
    )


def describe_shares(dataset: RowDataset, bad: Mapping[int, BadRow]) -> str:
    """Say which share of the training rows each source of a mixture has; empty without one."""
    ranges, sources = dataset.rows.by_source(), dataset.config.sources
    used = [index for index in dataset.indices if index not in bad]
    total = sum(sources[name].weight for name in ranges)
    lines = []
    for name, rows in ranges.items():
        count, share = sum(index in rows for index in used), sources[name].weight / total
        lines.append(
            f"  source {name}: {share:.1%} of the rows, each of its {count} once in {count / share:.0f}\n"
        )
    return "".join(lines)


def _file_rows(dataset: RowDataset, bad: Mapping[int, BadRow]) -> Iterator[tuple[object, ...]]:
    yield "file", "rows", "used", "too long", "bad"
    rows = dataset.rows
    kinds = dict.fromkeys(dataset.indices, "used") | dict.fromkeys(_overlong_rows(dataset), "too long")
    kinds |= dict.fromkeys(bad, "bad")
    for source, start in zip(rows.sources, rows.starts, strict=False):  # `starts` also has the end
        size = len(source.rows)
        counts = Counter(kinds[index] for index in range(start, start + size))
        yield source.name, size, counts["used"], counts["too long"], counts["bad"]


def _overlong_rows(dataset: RowDataset) -> list[int]:
    return [index for index, length in enumerate(dataset.lengths) if length > dataset.limit]


def _listed(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    more = [f"... and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    return "\n    ".join([f"  {title}: {len(lines)} rows", *lines[:MAX_LISTED], *more]) + "\n"


def _bad_lines(bad: Sequence[BadRow]) -> str:
    return "\n    ".join([f"  bad: {len(bad)} rows", *bad_rows.describe_rows(bad)]) + "\n" if bad else ""


def row_problems(
    option: str, dataset: RowDataset, num_bad: int, data: DataConfig | SFTDataConfig
) -> Iterator[str]:
    """Yield why a run with these rows, opened leniently here, would not start or would stop."""
    if data.on_bad_row == "skip":
        return
    if num_bad:
        yield f"{num_bad} rows of `{option}` are bad: repair them, or set `data.on_bad_row=skip`"
    if dataset.num_overlong and not data.filter_overlong_prompts:
        yield (
            f"{dataset.num_overlong} rows of `{option}` are longer than `data.{dataset.limit_option}`"
            f" ({dataset.limit}): raise it, or set `data.filter_overlong_prompts=true`"
        )


def evenly(total: int, count: int) -> list[int]:
    """Choose at most `count` evenly spaced numbers from 0 to `total - 1`."""
    count = min(total, count)
    return [number * (total - 1) // max(1, count - 1) for number in range(count)]


def _marked(text: str, mark: str) -> list[str]:
    stripped = text.rstrip("\n")
    return [f"{mark} {line}" for line in stripped.split("\n")] if stripped else []


def _token_counts(ids: Tensor, dataset: RowDataset) -> str:
    counts = {"text": len(ids)}
    kinds = {} if dataset.media is None else dataset.media.family.placeholders(dataset.processor)
    for token, kind in kinds.items():
        if count := int((ids == token).sum()):
            counts["audio" if kind == "audio" else f"{kind}s"] = count
            counts["text"] -= count
    return f"{len(ids)} tokens ({', '.join(f'{count} of {kind}' for kind, count in counts.items())})"


def _show_media(item: Item, dataset: RowDataset, sheet: Path) -> Iterator[str]:
    """Yield a line for each medium of a row, and put them on a contact sheet."""
    media = item["multi_modal_data"]
    if not media:
        return
    assert dataset.media is not None, "a row with media was read by a media loader"
    decoded = dataset.media.decode(media)  # from the cache
    for ref, image in zip(media["images"], decoded.images, strict=True):
        yield f"image {shown_name(ref)}: {image.width} x {image.height}"
    for ref, (frames, meta) in zip(media["videos"], decoded.videos, strict=True):
        num_frames, height, width, _ = frames.shape
        yield (
            f"video {shown_name(ref)}: {num_frames} of {meta['total_num_frames']} frames, {width} x {height},"
            f" from {_seconds(meta, 0):.2f} to {_seconds(meta, -1):.2f} s"
        )
    heard = {"audios": "audio", "sounds": "sound of"}
    for (kind, noun), clips in zip(heard.items(), (decoded.audios, decoded.sounds), strict=True):
        for ref, (samples, rate) in zip(media.get(kind, ()), clips, strict=True):
            yield f"{noun} {shown_name(ref)}: {len(samples) / rate:.2f} s"
    save_sheet(list(_tiles(decoded)), sheet)
    yield f"contact sheet: {sheet}"


def _tiles(decoded: DecodedMedia) -> Iterator[Tile]:
    for number, image in enumerate(decoded.images):
        yield image, f"image {number}"
    for number, (frames, meta) in enumerate(decoded.videos):
        for position in evenly(len(frames), MAX_FRAMES):
            yield Image.fromarray(frames[position]), f"video {number}: {_seconds(meta, position):.2f} s"
    for noun, clips in (("audio", decoded.audios), ("sound of video", decoded.sounds)):
        for number, (samples, rate) in enumerate(clips):
            yield draw_waveform(samples), f"{noun} {number}: {len(samples) / rate:.2f} s"


def _seconds(meta: dict[str, Any], position: int) -> float:
    return meta["frames_indices"][position] / meta["fps"]


def contact_sheet(tiles: Sequence[Tile]) -> Image.Image:
    """Draw pictures in rows of eight, each scaled to fit its tile."""
    columns, lines = min(len(tiles), COLUMNS), -(-len(tiles) // COLUMNS)
    sheet = Image.new("RGB", (GAP + columns * (TILE + GAP), GAP + lines * (TILE + LABEL + GAP)), PAPER)
    pen = ImageDraw.Draw(sheet)
    for number, (picture, label) in enumerate(tiles):
        line, column = divmod(number, COLUMNS)
        left, top = GAP + column * (TILE + GAP), GAP + line * (TILE + LABEL + GAP)
        sheet.paste(ImageOps.contain(picture, (TILE, TILE)), (left, top))
        pen.text((left, top + TILE + 2), label, fill=INK)
    return sheet


def save_sheet(tiles: Sequence[Tile], path: Path) -> None:
    """Write a contact sheet as PNG, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        contact_sheet(tiles).save(part, format="PNG")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
