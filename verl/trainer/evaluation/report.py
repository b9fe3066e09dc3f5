# SPDX-License-Identifier: Apache-2.0
"""The result of an evaluation: means, pass@k and categories, as a table and as JSON. Imports no torch."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from verl.checkpoint.manifest import write_json
from verl.utils.text_table import table

FILE = "evaluation.json"


class Question(NamedTuple):
    """Wishes for an evaluation beyond a run's validation."""

    ks: Sequence[int] = ()  # of pass@k; () is 1, 2, 4, ... and the number of responses
    correct_key: str | None = None  # value of the reward function that says what is correct
    correct_at: float = 1.0  # least value of a correct response
    keep: int = 256  # prompts whose responses are written for the viewer


@dataclass(frozen=True)
class ScoredResponse:
    """One response, as the report reads it."""

    prompt: str  # id of its prompt
    score: float  # nan if its scoring failed
    value: float  # that says whether it is correct; nan if its scoring failed


@dataclass(frozen=True)
class Summary:
    """Figures of the prompts of a category, or of all."""

    prompts: int
    responses: int
    failed: int  # responses that could not be scored, left out of everything else
    mean: float | None  # score; None if all failed
    correct: float | None  # share of the responses
    pass_at: dict[int, float | None]  # by k; None if no prompt has k scored responses


@dataclass(frozen=True)
class Evaluation:
    """The report on a model, which `verl.evaluate` returns and the command writes."""

    model: str
    step: int  # of the checkpoint; 0 for any other model
    metrics: dict[str, float]  # as a run's validation logs them
    correct_key: str
    correct_at: float
    overall: Summary
    categories: dict[str, dict[str, Summary]]  # by column of `data.category_keys` and its values
    folder: Path  # of the report, the log and the responses

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as `evaluation.json` has them."""
        plain = asdict(self) | {"folder": str(self.folder)}
        return json.loads(json.dumps(plain, allow_nan=False))

    def table(self) -> str:
        """Return one line for each category, its column in front if there are several, and one for all."""
        ks = list(self.overall.pass_at)
        rows: list[list[object]] = [
            ["", "prompts", "responses", "score", "correct", *(f"pass@{k}" for k in ks)]
        ]
        is_one = len(self.categories) == 1
        named = [
            (name if is_one else f"{column}: {name}", part)
            for column, parts in self.categories.items()
            for name, part in parts.items()
        ]
        named.append(("all", self.overall))
        for name, part in named:
            shares = [part.mean, part.correct, *(part.pass_at[k] for k in ks)]
            rows.append([name, part.prompts, part.responses, *map(_shown, shares)])
        failed, total = self.overall.failed, self.overall.responses
        note = f"  {failed} of {total} responses could not be scored and are left out\n" if failed else ""
        return table(rows) + note

    def write(self) -> Path:
        """Write the report into its folder; return the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / FILE, self.as_dict())
        return self.folder / FILE


def summarize(responses: Sequence[ScoredResponse], correct_at: float, ks: Sequence[int]) -> Summary:
    """Compute the figures of some responses; one is correct if its value is at least `correct_at`."""
    scored = [each for each in responses if not math.isnan(each.score)]
    counts = Counter(each.prompt for each in scored)
    correct = Counter(each.prompt for each in scored if each.value >= correct_at)
    pairs = [(number, correct[prompt]) for prompt, number in counts.items()]
    return Summary(
        prompts=len({each.prompt for each in responses}),
        responses=len(responses),
        failed=len(responses) - len(scored),
        mean=sum(each.score for each in scored) / len(scored) if scored else None,
        correct=correct.total() / len(scored) if scored else None,
        pass_at={k: mean_pass_at_k(pairs, k) for k in ks},
    )


def by_category(
    responses: Sequence[ScoredResponse], names: Sequence[str], correct_at: float, ks: Sequence[int]
) -> dict[str, Summary]:
    """Compute the figures of each category by name; `names` has the category of each response."""
    parts: dict[str, list[ScoredResponse]] = {}
    for each, name in zip(responses, names, strict=True):
        parts.setdefault(name, []).append(each)
    return {name: summarize(parts[name], correct_at, ks) for name in sorted(parts)}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of pass@k for a prompt with `correct` of `n` responses right.

        1 - C(n - c, k) / C(n, k)

    The mean of 1 - (1 - c / n)^k would be too low: it draws with replacement.

    Source: Evaluating Large Language Models Trained on Code, section 2.1 (https://arxiv.org/abs/2107.03374).
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(
            f"pass@k needs 1 <= k <= n and 0 <= correct <= n, got k={k}, n={n}, {correct} correct"
        )
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """Return the mean over prompts, given as (n, correct); None if no prompt has k responses."""
    chances = [pass_at_k(n, correct, k) for n, correct in counts if n >= k]
    return sum(chances) / len(chances) if chances else None


def powers_up_to(n: int) -> list[int]:
    """Return 1, 2, 4, ... below n, and n."""
    return sorted({*(2**exponent for exponent in range(n.bit_length()) if 2**exponent < n), n})


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
