# SPDX-License-Identifier: Apache-2.0
"""Categories of held-out rows: the values of the columns that `data.category_keys` names.

A validation logs the means of each category, and an evaluation reports them as a table.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from verl.trainer.metrics import Metrics, compute_reward_metrics, known_mean
from verl.utils.rank_logger import get_logger

NO_CATEGORY = "(none)"  # of rows whose column is empty
MAX_LOGGED = 100  # categories of a column; more would drown the other metrics
# MLflow refuses other characters, and `/` separates the parts of a name.
NOT_IN_NAMES = re.compile(r"[^\w.: -]")

logger = get_logger(__name__)


class Categories(NamedTuple):
    """The columns of categories and how a batch names them.

    Attributes:
        keys: Columns of the rows, of `data.category_keys`.
        answer_key: Column of the answers, which a batch calls `ground_truth`.
    """

    keys: Sequence[str]
    answer_key: str

    def of(self, columns: Mapping[str, Any], number: int) -> dict[str, list[str]]:
        """Return the category of each of `number` rows by column; rows without one have `NO_CATEGORY`."""
        found = {key: self._name_in(columns, key) for key in self.keys}
        return {
            key: [NO_CATEGORY] * number if name is None else [as_category(value) for value in columns[name]]
            for key, name in found.items()
        }

    def _name_in(self, columns: Mapping[str, Any], key: str) -> str | None:
        # A column with the name of a batch key was renamed, and the answers are `ground_truth`.
        names = (f"{key}_column", "ground_truth" if key == self.answer_key else key)
        return next((name for name in names if name in columns), None)


def as_category(value: Any) -> str:
    """Return the category that a cell of a row names."""
    return NO_CATEGORY if value is None or value == "" else str(value)


def means_by_category(
    categories: Mapping[str, Sequence[str]], values: Mapping[str, Sequence[float]], scores: Sequence[float]
) -> Metrics:
    """Compute the means of each category: `val/COLUMN/CATEGORY/{NAME}_reward` and `.../reward_score`.

    Responses that could not be scored (nan) are left out. Columns with more than `MAX_LOGGED` categories have
    no metrics, which a warning says.
    """
    metrics: Metrics = {}
    for key, names in categories.items():
        parts: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            parts.setdefault(NOT_IN_NAMES.sub("_", name.strip("()")), []).append(row)
        if len(parts) > MAX_LOGGED:
            logger.warning(
                "a column has too many categories for metrics: column=%s categories=%d limit=%d", key,
                len(parts), MAX_LOGGED,
            )  # fmt: skip
            continue
        for name, rows in sorted(parts.items()):
            part = {value: [column[row] for row in rows] for value, column in values.items()}
            prefix = f"val/{NOT_IN_NAMES.sub('_', key)}/{name}/"
            metrics |= score_means(prefix, part, [scores[row] for row in rows])
    return metrics


def score_means(prefix: str, values: dict[str, list[float]], scores: Iterable[float]) -> Metrics:
    """Compute the mean of each value as `{NAME}_reward`, and that of the scores, if any is known."""
    metrics = {f"{key}_reward": mean for key, mean in compute_reward_metrics(values, prefix).items()}
    score = known_mean(scores)
    return metrics if score is None else metrics | {f"{prefix}reward_score": score}
