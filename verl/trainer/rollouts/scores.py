# SPDX-License-Identifier: Apache-2.0
"""From what the reward function returned to scores on tokens.

`Scoring` waits for the reward function; `score` adds the overlong penalty and the reward model's score and
puts the sum on each response's last token. To add another term: one more column in `shaping_terms`.

A response whose call of the reward function failed may have no score, `overall` is nan: it is masked.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl.algorithms.reward_shaping import overlong_penalty
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.rewards.failures import FAILURES, RETRIES
from verl.trainer.metrics import Metrics, compute_reward_metrics

Values = dict[str, list[float]]  # what the reward function returned, by name; one number for each sequence


class PendingScores(Protocol):
    """The scores of some sequences, known now or later."""

    def result(self) -> Values:
        """Wait for the scores."""
        ...


@dataclass(frozen=True)
class KnownScores:
    """Scores that nobody needs to wait for."""

    values: Values

    def result(self) -> Values:
        """Return the scores."""
        return self.values


@dataclass(frozen=True)
class Scoring:
    """The scores of sequences while they are computed: part after part, each of some sequences.

    Example::

        scoring = Scoring([job, KnownScores({"overall": [1.0]})]).reorder([1, 0])
        scoring.result()  # {"overall": [1.0, 0.0]}
    """

    parts: Sequence[PendingScores]
    order: list[int] | None = None  # where the sequences stand now, if they were reordered

    def reorder(self, order: list[int]) -> "Scoring":
        """The same scores for sequences that were put into another order."""
        return Scoring([self], order)

    def result(self) -> Values:
        """Wait for the scores: every value of the reward function by name, in the order of the sequences."""
        values = join_values([part.result() for part in self.parts])
        if self.order is None:
            return values
        return {key: [column[row] for row in self.order] for key, column in values.items()}


def join_values(parts: Sequence[Values]) -> Values:
    """Put the scores of several batches one behind the other; what a batch has no value for is nan.

    A batch that does not say which calls failed or were repeated had none of them.
    """
    keys = dict.fromkeys(key for part in parts for key in part)
    joined: Values = {key: [] for key in keys}
    for part in parts:
        for key in keys:
            absent = 0.0 if key in (FAILURES, RETRIES) else math.nan
            joined[key].extend(part.get(key) or [absent] * len(part["overall"]))
    return joined


def score(
    batch: DataProto, values: Values, config: PPOConfig, model_scores: Tensor | None = None
) -> tuple[DataProto, Metrics]:
    """Put each response's score on its last token.

        score_i = overall_i + overlong penalty_i + coef * model_score_i

    The penalty with `worker.reward.overlong_buffer_length`, the last term with a reward model. A response
    without a single token in its mask has no score. One whose `overall` is nan, or for which `remax` has no
    baseline, because a call of the reward function failed, loses its mask: from here on it takes no part.

    Args:
        batch: Reads `response_mask` (B, R), and `reward_baselines` (B,) if there.
        values: What `Scoring.result` returned for these rows.
        config: The whole config.
        model_scores: Of the reward model, (B,); None without one.

    Returns:
        What to put into the batch: `token_level_scores` (B, R) and, for estimators that read single values of
        the reward function, `reward_components` (B, K) in the order of `component_keys`; in place of those
        that are there, `response_mask` and `reward_baselines` if responses are masked. And the mean of each
        value and term as `reward/<name>`; `reward/failures` is the share of responses whose call failed,
        `reward/retries` how often one was repeated, for each response.

    Raises:
        ValueError: A value that is needed is missing, or a term has the name of one.
    """
    mask = batch.batch["response_mask"]
    terms = shaping_terms(mask.sum(-1), config)
    if model_scores is not None:
        terms["reward_model"] = model_scores.float()
    _check_names(values, terms)
    overall = torch.tensor(values["overall"])  # (B,)
    total = overall + terms.get("overlong_penalty", 0.0)  # (B,)
    if model_scores is not None:
        total = total + config.worker.reward_model.coef * terms["reward_model"]
    tensors, is_masked = _without_masked(batch, overall)
    tensors["token_level_scores"] = on_last_tokens(total.masked_fill(is_masked, 0.0), mask)
    keys = component_keys(config)
    if keys:
        components = reward_components(values, keys, _component_option(config))  # (B, K)
        tensors["reward_components"] = components.masked_fill(is_masked.unsqueeze(-1), 0.0)
    calls = {name: [0.0] * len(overall) for name in (FAILURES, RETRIES)}
    logged = calls | values | {name: term.tolist() for name, term in terms.items()}
    known = {name: column for name, column in logged.items() if not all(map(math.isnan, column))}
    return DataProto.from_dict(tensors), compute_reward_metrics(known)


def _without_masked(batch: DataProto, overall: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What masks responses without a score, if there are any, and which they are: (B,) bool."""
    baselines = batch.batch.get("reward_baselines")  # (B,) of remax, or None
    is_masked = overall.isnan() if baselines is None else overall.isnan() | baselines.isnan()  # (B,)
    if not is_masked.any():
        return {}, is_masked
    tensors = {"response_mask": batch.batch["response_mask"].masked_fill(is_masked.unsqueeze(-1), 0)}
    if baselines is not None:
        tensors["reward_baselines"] = baselines.masked_fill(is_masked, 0.0)
    return tensors, is_masked


def shaping_terms(lengths: Tensor, config: PPOConfig) -> dict[str, Tensor]:
    """What the lengths of responses (B,) add to their scores, each (B,); empty if there is no such term.

    `overlong` is one where a penalty applies, `overlong_penalty` the penalty itself.
    """
    reward = config.worker.reward
    if reward.overlong_buffer_length == 0:
        return {}
    penalty = overlong_penalty(
        lengths,
        config.data.max_response_length,
        reward.overlong_buffer_length,
        reward.overlong_penalty_factor,
    )
    start = config.data.max_response_length - reward.overlong_buffer_length
    return {"overlong": (lengths > start).float(), "overlong_penalty": penalty}


def on_last_tokens(scores: Tensor, mask: Tensor) -> Tensor:
    """Put scores (B,) on the last token of each row of the mask (B, R); rows without a token stay zero."""
    positions = torch.arange(1, mask.shape[-1] + 1)  # (R,)
    last = (mask * positions).argmax(-1, keepdim=True)  # (B, 1)
    kept = torch.where(mask.any(-1), scores.float(), 0.0)  # (B,)
    return torch.zeros(mask.shape).scatter(1, last, kept.unsqueeze(-1))


def component_keys(config: PPOConfig) -> list[str]:
    """The values of the reward function that the advantage estimator reads one by one; mostly none."""
    algorithm = config.algorithm
    if algorithm.adv_estimator == "gdpo":
        return list(algorithm.gdpo_reward_keys)
    return [algorithm.prime_accuracy_key] if algorithm.adv_estimator == "prime" else []


def reward_components(values: Values, keys: Sequence[str], option: str) -> Tensor:
    """The named values of the reward function as float32 columns, (B, K).

    Raises:
        ValueError: The function does not return one of them, or not for every response.
    """
    return torch.stack([column_of(values, key, option) for key in keys], dim=-1).float()


def column_of(values: Values, key: str, option: str) -> Tensor:
    """One value of the reward function, (B,) float64; of a response whose call failed, its `overall`.

    Args:
        values: What `Scoring.result` returned.
        key: Its name.
        option: Where the user wrote the name, for errors.

    Raises:
        ValueError: The function does not return it, or not for every response.
    """
    failed = torch.tensor(values.get(FAILURES, [0.0] * len(values["overall"]))) > 0  # (B,)
    if key not in values and not failed.all():
        raise ValueError(
            f"`{option}` must name values that the reward function returns, got {key!r}: it returns"
            f" {sorted(set(values) - {FAILURES, RETRIES})}"
        )
    overall = torch.tensor(values["overall"], dtype=torch.float64)
    column = torch.tensor(values.get(key, values["overall"]), dtype=torch.float64)
    column = torch.where(failed, overall, column)
    missing = int((column.isnan() & ~failed).sum())
    if missing:
        raise ValueError(
            f"`{option}` names {key!r}, which the reward function must return for every response: it is"
            f" missing for {missing} of {len(column)}"
        )
    return column


def _check_names(values: Values, terms: Mapping[str, Tensor]) -> None:
    both = sorted(set(values) & set(terms))
    if both:
        raise ValueError(
            f"the reward function returns {both}, which the trainer adds as well: rename them in the"
            " function, or set `worker.reward.overlong_buffer_length=0` if it has a penalty of its own"
        )


def _component_option(config: PPOConfig) -> str:
    is_gdpo = config.algorithm.adv_estimator == "gdpo"
    return "algorithm.gdpo_reward_keys" if is_gdpo else "algorithm.prime_accuracy_key"
