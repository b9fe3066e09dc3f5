# SPDX-License-Identifier: Apache-2.0
"""Batches of rows in an order that a resumed run continues exactly.

The order of an epoch follows from `data.seed` and the number of the epoch, so a loader's position is two
numbers: the epoch and how many of its rows were used. A row that turns out bad when it is read
(`data.on_bad_row=skip`) counts as used, and later rows fill its batch: batches keep their size, an epoch gets
shorter, and no row is repeated. Bad rows are listed in the checkpoint folder.

Processes read ahead: while a step uses a batch, they decode the media of the next one into the cache.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

from verl.batch_keys import BATCH_KEYS, SAMPLED_ROW
from verl.config.data import DataConfig, RowsConfig
from verl.config.sft import SFTDataConfig
from verl.data.bad_rows import BAD_ROW_REMEDY, REPORT_NAME, BadRow, BadRowReport
from verl.data.dataset import Item, Overlong, RowDataset, dataset_class
from verl.data.first_look import prompts_of_batch, too_few_rows
from verl.data.messages import BadRowError
from verl.data.order import RowSampler, Turns, draw, order_of_rows
from verl.data.readers import Readers
from verl.data.rl_dataset import RLHFDataset
from verl.data.row_readers import RowReaders
from verl.data.sft_dataset import SFTDataset
from verl.data.teachers import TeacherColumn
from verl.protocol import DataProto
from verl.utils.rank_logger import get_logger
from verl.utils.registry import Registry

D = TypeVar("D", bound=RowDataset)

SAMPLERS: Registry[Any] = Registry("data.sampler")  # its names are files only

logger = get_logger(__name__)


class PromptLoader(Generic[D]):
    """Iterates over one epoch of batches, from where the last iteration stopped.

    Args:
        shuffle: Use a new random order in each epoch.
        drop_last: Drop the rows at the end of an epoch that do not fill a batch.
        read_on: Read ahead beyond the end of an epoch, and keep the processes.
        num_workers: Processes that read rows; 0 reads in this process, without reading ahead.
        rows: Numbers, over all files, of the rows to use; None is all.
        readers: Read the rows, instead of own ones.
    """

    def __init__(
        self,
        dataset: D,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        read_on: bool,
        num_workers: int,
        rows: range | None = None,
        readers: RowReaders | None = None,
    ) -> None:
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.drop_last, self.read_on = drop_last, read_on
        self.rows = rows
        self._readers = readers or RowReaders(dataset, num_workers, batch_size)
        self.epoch = 0
        self.position = 0  # rows of this epoch that were used
        self.bad_rows: dict[int, BadRow] = {}  # found when they were read
        self.num_overlong = 0  # rows of a stream that were left out since the start
        self._rows: Iterator[dict[str, Any] | BadRow] = iter(())
        self._next: tuple[int, int] | None = None  # epoch and position of the next row of `_rows`

    @property
    def positions(self) -> range:
        """Positions in the data set of the rows to use."""
        return range(len(self.dataset)) if self.rows is None else positions_of(self.dataset, self.rows)

    @property
    def epochs(self) -> float:
        """Number of times that the rows were used."""
        return self.epoch + self.position / len(self.positions)

    def metrics(self) -> dict[str, float]:
        """Return what each step logs about the rows that it had so far."""
        return {}

    def __len__(self) -> int:
        whole, rest = divmod(len(self.positions), self.batch_size)
        return whole if self.drop_last or rest == 0 else whole + 1

    def __iter__(self) -> Iterator[DataProto]:
        is_filled = self.position > 0
        items: list[Item] = []
        for item in self.items():
            items.append(item)
            if len(items) == self.batch_size:
                is_filled = True
                yield DataProto.from_single_dict(self.dataset.batch(items))
                items = []
        if items and not self.drop_last:
            yield DataProto.from_single_dict(self.dataset.batch(items))
        elif not is_filled:
            raise self.too_few(f"batch of {self.batch_size} prompts can be filled")

    def items(self) -> Iterator[Item]:
        """Yield the usable rows that are left of an epoch; `position` counts all that were read."""
        while self.position < len(self.positions):
            item = self._read(self.position)
            self.position += 1
            if self._is_usable(item):
                yield item
        self.epoch, self.position = self.epoch + 1, 0
        if not self.read_on:
            self._rows, self._next = iter(()), None  # ends the processes

    def too_few(self, what: str) -> ValueError:
        """Return the error of rows of which an epoch is not enough."""
        rows = range(len(self.dataset.rows)) if self.rows is None else self.rows
        at_start = [row for row in self.dataset.bad_rows if row.index in rows]
        too_long = len(rows) - len(self.positions) - len(at_start) + self.num_overlong
        bad = [*at_start, *(row for row in self.bad_rows.values() if row.index in rows)]
        return ValueError(
            f"no {what}: {len(bad)} of {len(rows)} rows are bad, first {next(iter(bad), None)}, and"
            f" {too_long} too long"
        )

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was yielded, and the rows that it is a position in."""
        return {"epoch": self.epoch, "position": self.position} | self._rows_of_state()

    def changes(self, state: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return what differs from the rows of a state and their order, then and now."""
        now = self._rows_of_state()  # an older checkpoint has no digest
        return {name: (state[name], now[name]) for name in now if state.get(name, now[name]) != now[name]}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_changes: bool = False) -> None:
        """Continue from a position; raise `ValueError` if the rows or their order changed."""
        changed = self.changes(state)
        if changed and not allow_changes:
            raise ValueError(
                f"the data differ from the checkpoint's, (then, now): {changed}: resume with the same"
                " `data.train_files` or `data.sources`, `data.seed` and filter options"
            )
        self.epoch, self.position = state["epoch"], min(state["position"], len(self.positions))

    def _rows_of_state(self) -> dict[str, Any]:
        state = {"seed": self.seed, "num_rows": len(self.dataset), "rows": self.dataset.digest, "sources": []}
        state["sampler"] = None
        return state | ({} if self.buffer is None else {"shuffle_buffer": self.buffer})

    @property
    def buffer(self) -> int | None:
        """Number of rows among which the next one of a stream is drawn; None draws among all rows."""
        return self.dataset.config.shuffle_buffer if self.dataset.is_stream else None

    def _read(self, position: int) -> dict[str, Any] | BadRow:
        if self._next != (self.epoch, position):
            seed = self.seed if self.shuffle else None
            order = order_of_rows(len(self.positions), self.epoch, position, seed, self.read_on, self.buffer)
            self._rows = self._readers.rows(map(self.positions.__getitem__, order))
        self._next = None  # in case reading fails
        row = next(self._rows)
        is_last = position + 1 == len(self.positions)
        self._next = (self.epoch + 1, 0) if is_last else (self.epoch, position + 1)
        return row

    def _is_usable(self, item: Item | BadRow) -> TypeGuard[Item]:
        if isinstance(item, Overlong):
            self.num_overlong += 1
        elif isinstance(item, BadRow):
            self._leave_out(item)
        return not isinstance(item, BadRow)

    def _leave_out(self, row: BadRow) -> None:
        if self.dataset.report is not None:
            self.dataset.report.add([row])
        if self.dataset.config.on_bad_row == "error":
            raise BadRowError(f"{row}{BAD_ROW_REMEDY}")
        if row.index not in self.bad_rows:
            self.bad_rows[row.index] = row
            logger.warning("bad row left out: number=%d %s", len(self.bad_rows), row)


class MixedLoader(PromptLoader[D]):
    """Fills batches from the sources of a mixture, which take turns, so that each has its share of a batch.

    The rows of a source have an order and epochs of their own, and a turn takes the next usable one: bad rows
    change no share. What a batch cannot divide is made up by the next ones. An iteration never ends.

    Args:
        sources: For each source, the numbers of its rows over all files and its weight.
    """

    def __init__(
        self,
        dataset: D,
        batch_size: int,
        sources: Mapping[str, tuple[range, float]],
        *,
        seed: int,
        num_workers: int,
        **options: Any,
    ) -> None:
        share = -(-num_workers // len(sources)), -(-batch_size // len(sources))
        options |= {"num_workers": num_workers, "readers": RowReaders(dataset, *share)}
        super().__init__(dataset, batch_size, seed=seed, **options)
        self.weights = {name: weight for name, (_, weight) in sources.items()}
        self.turns = Turns(self.weights)
        self.parts = {
            name: PromptLoader(dataset, batch_size, seed=seed + number, rows=rows, **options)
            for number, (name, (rows, _)) in enumerate(sources.items())
        }
        for name, part in self.parts.items():
            if not part.positions:
                raise part.too_few(f"row of `data.sources.{name}` can be used")

    def __iter__(self) -> Iterator[DataProto]:
        usable = {name: _endless_items(name, part) for name, part in self.parts.items()}
        while True:
            items = [next(usable[self.turns.take()]) for _ in range(self.batch_size)]
            yield DataProto.from_single_dict(self.dataset.batch(items))

    def metrics(self) -> dict[str, float]:
        return {f"source/{name}/epoch": part.epochs for name, part in self.parts.items()}

    def state_dict(self) -> dict[str, Any]:
        parts = {name: [part.epoch, part.position] for name, part in self.parts.items()}
        mixture = {"parts": parts, "weights": self.weights, "turns": dict(self.turns.counts)}
        return super().state_dict() | mixture

    def load_state_dict(self, state: Mapping[str, Any], *, allow_changes: bool = False) -> None:
        super().load_state_dict(state, allow_changes=allow_changes)
        for name, part in self.parts.items():
            epoch, position = state.get("parts", {}).get(name, (0, 0))
            part.epoch, part.position = epoch, min(position, len(part.positions))
        if state.get("weights") == self.weights:  # else the shares are counted from here on
            self.turns.counts.update(state["turns"])

    def _rows_of_state(self) -> dict[str, Any]:
        return super()._rows_of_state() | {"sources": list(self.parts)}


def _endless_items(name: str, part: PromptLoader) -> Iterator[Item]:
    while True:
        is_found = part.position > 0
        for item in part.items():
            is_found = True
            yield item
        if not is_found:
            raise part.too_few(f"row of `data.sources.{name}` can be used")


class SampledLoader(PromptLoader[D]):
    """Fills batches with the rows that a sampler draws, and shows it the scores of their responses.

    No row is read ahead, since what is drawn next depends on these scores. An iteration never ends.
    """

    def __init__(self, dataset: D, batch_size: int, sampler: RowSampler, name: str, **options: Any) -> None:
        super().__init__(dataset, batch_size, **options)
        self.sampler, self.name = sampler, name
        self._lock = Lock()  # rows are drawn in another thread than the one that waits for scores

    def __iter__(self) -> Iterator[DataProto]:
        while True:
            items: list[Item] = []
            num_read = 0
            while len(items) < self.batch_size:
                if num_read - len(items) > len(self.positions):
                    raise self.too_few("other row that `data.sampler` draws can be used")
                with self._lock:
                    drawn = draw(self.sampler, self.batch_size - len(items), len(self.positions), self.name)
                read = zip(drawn, self._readers.rows(drawn), strict=True)
                items += [item | {SAMPLED_ROW: row} for row, item in read if self._is_usable(item)]
                num_read += len(drawn)
            epochs, self.position = divmod(self.position + num_read, len(self.positions))
            self.epoch += epochs
            yield DataProto.from_single_dict(self.dataset.batch(items))

    def see(self, prompts: DataProto, scores: Mapping[str, list[float]]) -> None:
        """Show the sampler the scores of the responses to its prompts; those to one are adjacent."""
        rows = prompts.non_tensor_batch.get(SAMPLED_ROW, ())  # none in a validation
        for place, row in enumerate(rows):
            n = len(scores["overall"]) // len(rows)
            with self._lock:
                self.sampler.see(row, {name: values[place * n :][:n] for name, values in scores.items()})

    def metrics(self) -> dict[str, float]:
        with self._lock:
            return {f"sampler/{name}": value for name, value in self.sampler.metrics().items()}

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return super().state_dict() | {"sampler_state": self.sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_changes: bool = False) -> None:
        super().load_state_dict(state, allow_changes=allow_changes)
        if state.get("sampler") == self.name:  # else it begins here
            self.sampler.load_state_dict(state["sampler_state"])

    def _rows_of_state(self) -> dict[str, Any]:
        return super()._rows_of_state() | {"sampler": self.name}


class Loaders(NamedTuple, Generic[D]):
    """Both loaders of a run; None where no files are named."""

    train: PromptLoader[D] | None
    val: PromptLoader[D] | None


def make_loaders(
    data: DataConfig, readers: Readers, run_folder: Path, teachers: TeacherColumn | None = None
) -> Loaders[RLHFDataset]:
    """Open the prompts of a run, in batches of one call of the rollout engine.

    Raises:
        ValueError: Data cannot be used, or the training rows do not fill one batch.
    """
    option, size = prompts_of_batch(data)
    val_size = None if data.val_batch_size == -1 else data.val_batch_size
    open_rows = partial(dataset_class(data, RLHFDataset), reserved=BATCH_KEYS)
    return _open_loaders(open_rows, data, readers, run_folder, size, val_size, option, teachers=teachers)


def make_sft_loaders(
    data: SFTDataConfig,
    batch_size: int,
    readers: Readers,
    run_folder: Path,
    teachers: TeacherColumn | None = None,
) -> Loaders[SFTDataset]:
    """Open the conversations of a run, in batches of one step; see `make_loaders`."""
    open_rows = dataset_class(data, SFTDataset)
    return _open_loaders(open_rows, data, readers, run_folder, batch_size, batch_size, teachers=teachers)


def _open_loaders(
    dataset_class: Callable[..., D],
    data: RowsConfig,
    readers: Readers,
    run_folder: Path,
    size: int,
    val_size: int | None,
    size_option: str | None = None,
    teachers: TeacherColumn | None = None,  # of the training rows
) -> Loaders[D]:
    """Open both loaders; with `size_option` the training rows must fill a batch."""
    open_rows = partial(
        dataset_class,
        tokenizer=readers.tokenizer,
        processor=readers.processor,
        config=data,
        row_timeout_s=data.row_timeout_s,
        report=BadRowReport(run_folder / REPORT_NAME),
        media=readers.media,
        position_ids=readers.position_ids,
        tools=readers.tools,
    )
    options: dict[str, Any] = {"seed": data.seed, "num_workers": data.num_workers}
    train = val = None
    if data.train_files:
        taught = {} if teachers is None else {"teachers": teachers}
        rows = open_rows(data.train_files, option="data.train_files", **taught)
        if size_option is not None and len(rows) < size:
            unusable = f", {rows.num_overlong} too long, {len(rows.bad_rows)} bad"
            raise too_few_rows(size_option, size, len(rows), f"{len(rows.rows)} rows{unusable}", data)
        train = _open_training(rows, size, data, options)
    if data.val_files:
        rows = open_rows(data.val_files, option="data.val_files")
        options |= {"shuffle": False, "drop_last": False, "read_on": False}
        val = PromptLoader(rows, val_size or len(rows), **options)
    return Loaders(train, val)


def _open_training(dataset: D, size: int, data: RowsConfig, options: dict[str, Any]) -> PromptLoader[D]:
    """Open the training rows: in epochs, as a mixture, or as a sampler draws them."""
    options = options | {"shuffle": data.shuffle, "drop_last": True, "read_on": True}
    found = dataset.rows.by_source()
    weights = {name: data.sources[name].weight for name in found}
    if data.sampler is not None:
        sources = {name: positions_of(dataset, rows) for name, rows in found.items()}
        sources, weights = sources or {"": range(len(dataset))}, weights or {"": 1.0}
        sampler = SAMPLERS[data.sampler](sources, weights, data.seed, **data.sampler_kwargs)
        return SampledLoader(dataset, size, sampler, Path(data.sampler).name, **options)
    if len(found) < 2:  # the rows of a single source have the order of a run without sources
        return PromptLoader(dataset, size, **options)
    return MixedLoader(dataset, size, {name: (found[name], weights[name]) for name in found}, **options)


def positions_of(dataset: RowDataset, rows: range) -> range:
    """Return the positions in a data set of the usable ones of rows that are numbered over all files."""
    first, end = (bisect_left(dataset.indices, row) for row in (rows.start, rows.stop))
    return range(first, end)
