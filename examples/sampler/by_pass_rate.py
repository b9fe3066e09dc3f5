# SPDX-License-Identifier: Apache-2.0
"""Draws the rows that are neither solved nor hopeless.

    data.sampler=examples/sampler/by_pass_rate.py:ByPassRate
    'data.sampler_kwargs={score: accuracy, easy: 0.9, hard: 0.1, rest: 20}'

A group whose responses are all right, or all wrong, has no advantage. So a row is drawn in proportion to
p (1 - p), the variance of one response's score, where p is its pass rate: an exponential average of the mean
scores of its visits, half of it the last one. A row that was never drawn is as likely as one with p = 1/2.

Rows of at least `easy` or at most `hard` rest for `rest` draws. After that they are drawn again now and
then, since the policy that failed or passed them was another one. A batch is one draw, or more: if rows are
bad, or if a source has fewer rows than its share of a batch, whose rows are then in the batch repeatedly.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.data.order import RowSampler, Turns

UNSEEN = math.nan
LATEST = 0.5  # weight of the last visit in a pass rate
REVIVED = (
    0.05  # weight of an easy or hard row that has rested; a row that half of the responses pass has 0.25
)


class ByPassRate(RowSampler):
    """A sampler for `data.sampler`; each source of a mixture has its share, as without one.

    Args:
        score: Value of the reward function that is a pass rate: between 0, wrong, and 1, right.
        easy, hard: Pass rates from which, and down to which, rows rest.
        rest: Draws for which they do.
    """

    def __init__(
        self,
        sources: Mapping[str, range],
        weights: Mapping[str, float],
        seed: int,
        *,
        score: str = "overall",
        easy: float = 0.9,
        hard: float = 0.1,
        rest: int = 20,
    ) -> None:
        super().__init__(sources, weights, seed)
        if empty := [name for name, rows in sources.items() if not rows]:
            raise ValueError(f"no row of the sources {empty} can be used")
        if not (isinstance(hard, int | float) and isinstance(easy, int | float) and 0 <= hard < easy <= 1):
            raise ValueError(f"`hard` ({hard}) must be below `easy` ({easy}), both between 0 and 1")
        if not isinstance(rest, int) or rest < 0:
            raise ValueError(f"`rest` ({rest}) must be an integer of at least 0")
        self.score, self.easy, self.hard, self.rest = score, easy, hard, rest
        size = max(rows.stop for rows in sources.values())
        self.rates = torch.full((size,), UNSEEN)
        self.seen = torch.zeros(size, dtype=torch.int64)  # draws that there had been when a row was scored
        self.draws = 0
        self.turns = Turns(weights)

    def draw(self, count: int) -> list[int]:
        """Draw distinct rows; where fewer have a weight, the rows that rested longest follow.

        A source that has too few rows for its turns gives some back, and the next draw begins with them.
        """
        self.draws += 1
        numbers = torch.Generator().manual_seed(self.seed * 1_000_003 + self.draws)
        taken = [self.turns.take() for _ in range(count)]
        drawn: list[int] = []
        for name, rows in self.sources.items():
            own = slice(rows.start, rows.stop)
            weights = self.weights_of(self.rates[own], self.seen[own])  # (N,)
            wanted = min(taken.count(name), len(rows))
            self.turns.counts[name] -= taken.count(name) - wanted
            likely = min(wanted, int(weights.count_nonzero()))
            found = torch.multinomial(weights, likely, generator=numbers) if likely else torch.empty(0).long()
            waiting = self.seen[own].masked_fill(weights > 0, torch.iinfo(torch.int64).max)
            found = torch.cat([found, waiting.argsort(stable=True)[: wanted - likely]])
            drawn += (found + rows.start).tolist()
        return drawn

    def weights_of(self, rates: Tensor, seen: Tensor) -> Tensor:
        """Return how likely rows are, relative to each other, from pass rates and last visits, all (N,)."""
        weights = torch.where(rates.isnan(), 0.25, rates * (1 - rates))
        is_extreme = (rates >= self.easy) | (rates <= self.hard)
        rests = self.draws - seen <= self.rest
        return torch.where(is_extreme, torch.where(rests, 0.0, REVIVED), weights)

    def see(self, row: int, scores: Mapping[str, Sequence[float]]) -> None:
        try:
            values = scores[self.score]
        except KeyError:
            raise ValueError(
                f"`data.sampler_kwargs.score` ({self.score}) must be one of the reward function's values:"
                f" {sorted(scores)}"
            ) from None
        known = [min(max(value, 0.0), 1.0) for value in values if not math.isnan(value)]
        if not known:
            return
        rate, before = sum(known) / len(known), float(self.rates[row])
        self.rates[row] = rate if math.isnan(before) else LATEST * rate + (1 - LATEST) * before
        self.seen[row] = self.draws

    def metrics(self) -> dict[str, float]:
        """Return the number of rows in each pool, and the mean pass rate of the rows that were drawn."""
        rates = torch.cat([self.rates[rows.start : rows.stop] for rows in self.sources.values()])
        known = rates[~rates.isnan()]
        easy, hard = int((known >= self.easy).sum()), int((known <= self.hard).sum())
        counts = {"unseen": len(rates) - len(known), "easy": easy, "hard": hard}
        counts["medium"] = len(known) - easy - hard
        return {**counts, "pass_rate": known.mean().item() if len(known) else math.nan}

    def state_dict(self) -> dict[str, Any]:
        turns = {"weights": dict(self.weights), "turns": dict(self.turns.counts)}
        return {"rates": self.rates, "seen": self.seen, "draws": self.draws, **turns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["rates"]) != len(self.rates):  # of other rows, which a run has to allow
            return
        self.rates, self.seen, self.draws = state["rates"].clone(), state["seen"].clone(), state["draws"]
        self.turns = Turns(self.weights)
        if state.get("weights", self.weights) == self.weights:  # else the shares are counted from here on
            self.turns.counts.update(state["turns"])
