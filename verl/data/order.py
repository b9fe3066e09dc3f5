# SPDX-License-Identifier: Apache-2.0
"""Orders of rows: of an epoch, of the sources of a mixture, and by a sampler of the user's."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from math import ceil
from numbers import Integral
from typing import Any

import torch

from verl.utils.registry import ProtocolError


class Turns:
    """Whose turn it is: after any number of turns, each source had its share of them to within one.

    The rule of R. Tijdeman, The chairman assignment problem (1980): of the sources not ahead of their share,
    the one whose turn is due first. With S sources, counts are within 1 - 1 / (2 S - 2) of the shares.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
        self.shares = {name: weight / sum(exact.values()) for name, weight in exact.items()}
        self.slack = Fraction(1, max(1, 2 * len(exact) - 2))
        self.counts = dict.fromkeys(exact, 0)  # turns that each source had

    def take(self) -> str:
        """Return the name of the source that is next."""
        turn = sum(self.counts.values()) + 1
        ready = [
            name for name, share in self.shares.items() if share * turn - self.counts[name] >= self.slack
        ]
        chosen = min(ready, key=self._due)
        self.counts[chosen] += 1
        return chosen

    def _due(self, name: str) -> int:
        """Return the turn by which a source must have its next one."""
        return ceil((self.counts[name] + 1 - self.slack) / self.shares[name])


def order_of_rows(
    num_rows: int, epoch: int, position: int, seed: int | None, read_on: bool, buffer: int | None
) -> Iterator[int]:
    """Yield row numbers from a position of an epoch; without a seed in the order of the files."""
    while True:
        order: Iterable[int] = range(num_rows)
        if seed is not None:
            of_epoch = seed * 1_000_003 + epoch
            if buffer is None:
                order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(of_epoch)).tolist()
            else:
                order = _drawn_from_buffer(num_rows, random.Random(of_epoch), buffer)
        yield from islice(order, position, None)
        if not read_on:
            return
        epoch, position = epoch + 1, 0


def _drawn_from_buffer(num_rows: int, numbers: random.Random, buffer: int) -> Iterator[int]:
    """Yield all row numbers, each drawn among the next `buffer` ones that are left."""
    # No row is read for it, so a resumed run repeats the draws before its position in a second per million.
    waiting = list(range(min(buffer, num_rows)))
    for row in range(len(waiting), num_rows):
        place = int(numbers.random() * len(waiting))
        yield waiting[place]
        waiting[place] = row
    numbers.shuffle(waiting)
    yield from waiting


class RowSampler(ABC):
    """Chooses the rows of each batch by the scores that rows had before; `data.sampler` names a class.

    Args:
        sources: Indices of the usable rows of each source of a mixture; without one, all rows under "".
        weights: Shares of the sources, relative to each other.
        seed: `data.seed`.
    """

    def __init__(self, sources: Mapping[str, range], weights: Mapping[str, float], seed: int) -> None:
        self.sources, self.weights, self.seed = sources, weights, seed

    @abstractmethod
    def draw(self, count: int) -> Sequence[int]:
        """Return the indices of the next rows: at least one and at most `count`."""

    def see(self, row: int, scores: Mapping[str, Sequence[float]]) -> None:  # noqa: B027 - may read none
        """Take the scores of the responses to a row, by name: lists with a number for each response.

        They come in the order in which groups are scored, in two parts with `algorithm.early_stop`. A
        response without a score has nan.
        """

    def metrics(self) -> dict[str, float]:
        """Return what each step logs as `sampler/NAME`."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return numbers, text and tensors from which a resumed run continues to draw the same rows."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def draw(sampler: RowSampler, count: int, num_rows: int, name: str = "") -> list[int]:
    """Return the next rows of a sampler; raise a ProtocolError, after its name if given, for others."""
    drawn = [] if (found := sampler.draw(count)) is None else list(found)
    if 1 <= len(drawn) <= count and all(isinstance(row, Integral) and 0 <= row < num_rows for row in drawn):
        return drawn
    rule = f"must draw 1 to {count} indices below {num_rows}, got {drawn[: count + 1]}"
    raise ProtocolError((name and f"`data.sampler` ({name}) ") + f"{rule}; an index is an integer from 0 on")
