# SPDX-License-Identifier: Apache-2.0
"""What `data_check` tells about the rows of a run: all of them in numbers, some of them whole.

`PROMPTS` and `CONVERSATIONS` hold what differs between the two kinds of runs.
"""

import collections
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from verl.cli.data_check_items import conversation_lines, evenly, prompt_lines
from verl.cli.data_check_open import named, opened_conversations, opened_data
from verl.cli.text_charts import histogram, quantile, table
from verl.config.data import DataConfig
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig, SFTDataConfig
from verl.data.bad_rows import REPORT_NAME, BadRow
from verl.data.dataset import RowDataset
from verl.data.loader import Loaders, PromptLoader
from verl.planning.sft_plan import count_sft_steps
from verl.planning.step_plan import count_training_steps
from verl.trainer.run.exit_status import BAD_INPUT

MAX_LISTED = 10

C = TypeVar("C", PPOConfig, SFTConfig)


@dataclass(frozen=True)
class Kind(Generic[C]):
    """What one kind of runs reads.

    Attributes:
        row: What a row becomes.
        open: Opens the data of a run; bad rows are listed in the folder.
        count_steps: Training steps of a run with so many rows; raises where they are too few.
        lines: Shows a row, by its place in a data set; its media go to a contact sheet.
    """

    row: str
    open: Callable[[C, Path], AbstractContextManager[Loaders]]
    count_steps: Callable[[C, int], int | None]
    lines: Callable[[Any, int, Path], list[str] | BadRow]


PROMPTS: Kind[PPOConfig] = Kind("prompt", opened_data, count_training_steps, prompt_lines)
CONVERSATIONS: Kind[SFTConfig] = Kind(
    "conversation", opened_conversations, count_sft_steps, conversation_lines
)


class Report(Generic[C]):
    """Opens the data of a run and writes about them.

    Args:
        config: Of the run.
        kind: Of the run.
        num_shown: Rows to show of the training and of the validation files.
        out: Folder of contact sheets and of the list of bad rows.
    """

    def __init__(self, config: C, kind: Kind[C], num_shown: int, out: Path) -> None:
        self.config, self.kind = config, kind
        self.num_shown, self.out = num_shown, out

    def check(self, *, decode: bool) -> int:
        """Write about all files; returns the exit status.

        Args:
            decode: Decode the media of every row.

        Raises:
            ValueError: The model's files or the data cannot be used, or no row can.
        """
        problems: list[str] = []
        with self.kind.open(self.config, self.out) as loaders:
            for option, loader in named(loaders).items():
                if decode:
                    collections.deque(loader, maxlen=0)  # reads an epoch, as a run does
                problems += self._describe(option, loader)
            problems += self._step_problems(loaders)
        listed = self.out / REPORT_NAME
        if listed.exists():
            sys.stdout.write(f"the bad rows are listed in {listed}\n")
        if problems:
            told = "".join(f"  - {one}\n" for one in problems)
            sys.stdout.write(f"a run with this config would stop:\n{told}")
            return BAD_INPUT
        sys.stdout.write("a run with this config can use its data\n")
        return 0

    def _describe(self, option: str, loader: PromptLoader) -> list[str]:
        """Write about all rows and show some; return why a run would stop because of them."""
        dataset, report = loader.dataset, loader.dataset.report
        assert report is not None, "a loader's dataset has the run's report"
        bad = {row.index: row for row in [*dataset.bad_rows, *loader.bad_rows.values()]}
        sys.stdout.write(describe_rows(option, dataset, bad, self.kind.row))
        for place in evenly(len(dataset), self.num_shown):
            where = dataset.rows.where(dataset.indices[place])
            sheet = self.out / f"{option.removeprefix('data.').removesuffix('_files')}_{place}.png"
            lines = self.kind.lines(dataset, place, sheet)
            if isinstance(lines, BadRow):
                bad[lines.index] = lines
                report.add([lines])
                lines = [f"bad: {lines.reason}"]
            sys.stdout.write("\n  ".join([where, *lines]) + "\n\n")
        return list(row_problems(option, dataset, len(bad), self.config.data))

    def _step_problems(self, loaders: Loaders) -> Iterator[str]:
        """Yield what the number of training rows is too small for."""
        if loaders.train is None:
            return
        try:
            self.kind.count_steps(self.config, len(loaders.train.dataset))
        except ValueError as error:
            yield str(error)


def describe_rows(option: str, dataset: RowDataset, bad: Mapping[int, BadRow], row: str) -> str:
    """What becomes of the rows of each file, how many tokens they have, and which are left out and why.

    Args:
        option: That names the files.
        dataset: Their rows.
        bad: Those that cannot be used, by their number over all files.
        row: What a row becomes.
    """
    limit_option, overlong = f"`data.{dataset.limit_option}`", overlong_rows(dataset)
    lengths = [length for length in dataset.lengths if length]  # 0 of rows that could not be measured
    too_long = [f"{dataset.rows.where(index)}: {dataset.lengths[index]} tokens" for index in overlong]
    used = [index for index in dataset.indices if index not in bad]
    return (
        f"`{option}`: {len(dataset.rows)} rows, {len(used)} used\n{table(list(_file_rows(dataset, bad)))}"
        f"  tokens of a {row}, media included: shortest {min(lengths)}, half up to"
        f" {quantile(lengths, 0.5)}, 95% up to {quantile(lengths, 0.95)}, longest {max(lengths)};"
        f" {limit_option} is {dataset.limit}\n{histogram(lengths, dataset.limit, indent='    ')}"
        + _sums(dataset, used)
        + _listed(f"longer than {limit_option}", too_long)
        + _listed("bad", [str(bad[index]) for index in sorted(bad)])
        + "\n"
    )


def _sums(dataset: RowDataset, used: Sequence[int]) -> str:
    """How many tokens an epoch has; of conversations also how many are learned."""
    num_all = sum(dataset.lengths[index] for index in used)
    num_learned = sum(dataset.num_learned[index] for index in used)
    share = f", {num_learned} of them learned ({num_learned / num_all:.1%})" if num_learned else ""
    return f"  tokens of the rows that are used: {num_all}{share}\n"


def _file_rows(dataset: RowDataset, bad: Mapping[int, BadRow]) -> Iterator[tuple[object, ...]]:
    yield "file", "rows", "used", "too long", "bad"
    rows = dataset.rows
    kinds = dict.fromkeys(dataset.indices, "used") | dict.fromkeys(overlong_rows(dataset), "too long")
    kinds |= dict.fromkeys(bad, "bad")
    for source, start in zip(rows.sources, rows.starts, strict=False):  # one start more: the end
        size = len(source.rows)
        counts = Counter(kinds[index] for index in range(start, start + size))
        yield source.name, size, counts["used"], counts["too long"], counts["bad"]


def overlong_rows(dataset: RowDataset) -> list[int]:
    """The rows that have more tokens than the limit, by their number over all files."""
    return [index for index, length in enumerate(dataset.lengths) if length > dataset.limit]


def _listed(what: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    more = [f"... and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    return "\n    ".join([f"  {what}: {len(lines)} rows", *lines[:MAX_LISTED], *more]) + "\n"


def row_problems(
    option: str, dataset: RowDataset, num_bad: int, data: DataConfig | SFTDataConfig
) -> Iterator[str]:
    """Yield why a run would not start with these rows, or end when it comes to them.

    Args:
        option: That names the files.
        dataset: Their rows, opened leniently.
        num_bad: Of the rows that cannot be used.
        data: As the run has it.
    """
    num_overlong = dataset.num_overlong
    if data.on_bad_row == "skip":
        return
    if num_bad:
        yield f"{num_bad} rows of `{option}` are bad: repair them, or set `data.on_bad_row=skip`"
    if num_overlong and not data.filter_overlong_prompts:
        yield (
            f"{num_overlong} rows of `{option}` are longer than `data.{dataset.limit_option}`"
            f" ({dataset.limit}): raise it, or set `data.filter_overlong_prompts=true`"
        )
