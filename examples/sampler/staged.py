# SPDX-License-Identifier: Apache-2.0
"""Draws the sources of a mixture with weights that change during a run.

    data.sampler=examples/sampler/staged.py:Staged
    'data.sampler_kwargs={stages: [{prompts: 6400, weights: {easy: 1}}, {weights: {easy: 1, hard: 3}}]}'

A stage ends when as many prompts were drawn as it says: its steps times `data.rollout_batch_size`, unless a
filter draws more. The last stage has no end. Within a stage, each source has its share to within one prompt;
a source goes through its rows in epochs, and continues where it stopped in the stage before.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl.data.order import RowSampler, Turns, order_of_rows


class Staged(RowSampler):
    """A sampler for `data.sampler`.

    Args:
        stages: For each stage, the `weights` of the sources, of which others have none, and `prompts`.
    """

    def __init__(
        self,
        sources: Mapping[str, range],
        weights: Mapping[str, float],
        seed: int,
        *,
        stages: Sequence[Mapping[str, Any]],
    ) -> None:
        super().__init__(sources, weights, seed)
        _check(stages, sources)
        self.stages = list(stages)
        self.drawn = dict.fromkeys(sources, 0)  # rows of each source
        self.stage = 0
        self.turns = Turns(self.stages[0]["weights"])
        self._rows = self._iterators()

    def draw(self, count: int) -> list[int]:
        return [self._draw_one() for _ in range(count)]

    def metrics(self) -> dict[str, float]:
        return {"stage": self.stage + 1}

    def state_dict(self) -> dict[str, Any]:
        weights = dict(self.stages[self.stage]["weights"])
        turns = dict(self.turns.counts)
        return {"drawn": dict(self.drawn), "stage": self.stage, "weights": weights, "turns": turns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; a stage of that number that has other weights in this run begins again."""
        self.drawn |= {name: count for name, count in state["drawn"].items() if name in self.drawn}
        self.stage = min(state["stage"], len(self.stages) - 1)
        weights = self.stages[self.stage]["weights"]
        self.turns = Turns(weights)
        is_same = state.get("weights", weights) == weights  # older checkpoints have none
        if is_same and state["turns"].keys() == self.turns.counts.keys():
            self.turns.counts.update(state["turns"])
        self._rows = self._iterators()

    def _draw_one(self) -> int:
        # More than that were drawn if the stage became shorter when the run was resumed.
        if sum(self.turns.counts.values()) >= self.stages[self.stage].get("prompts", math.inf):
            self.stage += 1
            self.turns = Turns(self.stages[self.stage]["weights"])
        name = self.turns.take()
        self.drawn[name] += 1
        return self.sources[name][next(self._rows[name])]

    def _iterators(self) -> dict[str, Iterator[int]]:
        """Return the rows that are left of each source, in an order of its own."""
        return {
            name: order_of_rows(
                len(rows), *divmod(self.drawn[name], len(rows)), self.seed + number, read_on=True, buffer=None
            )
            for number, (name, rows) in enumerate(self.sources.items())
        }


def _check(stages: Sequence[Mapping[str, Any]], sources: Mapping[str, range]) -> None:
    if empty := [name for name, rows in sources.items() if not rows]:
        raise ValueError(f"no row of the sources {empty} can be used")
    if not stages or not isinstance(stages, list | tuple):
        raise ValueError(f"`stages` is a list, and must have at least one, got {stages!r}")
    for number, stage in enumerate(stages, 1):
        weights = stage.get("weights") if isinstance(stage, Mapping) else None
        if not isinstance(weights, Mapping) or not stage.keys() <= {"weights", "prompts"}:
            raise ValueError(
                f"stage {number} must be a mapping with `weights`, a mapping too, and, unless it is the last,"
                f" with `prompts`, got {stage!r}"
            )
        if unknown := [name for name in weights if name not in sources]:
            raise ValueError(f"stage {number} names {unknown}, the sources are {list(sources)}")
        if not weights or not all(_is_weight(weight) for weight in weights.values()):
            raise ValueError(
                f"the weights of stage {number} must be above 0: leave a source out instead, got {weights}"
            )
        prompts, is_last = stage.get("prompts"), number == len(stages)
        if prompts is not None if is_last else not isinstance(prompts, int) or prompts < 1:
            raise ValueError(
                "each stage but the last must have `prompts`, an integer from 1, and the last one none:"
                f" stage {number} has {prompts!r}"
            )


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf
