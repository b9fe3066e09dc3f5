# SPDX-License-Identifier: Apache-2.0
"""Correction for the difference between the policy that sampled and the one that is trained.

The rollout engine and the trainer give the same weights slightly different probabilities, and with stale
samples or `bypass_mode` the weights differ too. With l = log_probs - rollout_log_probs, the log-ratio of
trainer to engine at a sampled token, this module makes weights for the loss (`importance_weights`), leaves
out what differs too much (`rejection_mask`), and measures the difference (`correction_metrics`).

All three read (B, R) tensors and a response mask, and compute on the response tokens alone: what lies outside
of the mask does not count, even if it is not finite. Sums over tokens are float64. Log-ratios are clamped to
+-20 before they are exponentiated.

To add a rejection: its measure or level in `verl/config/rollout_correction.py` and here.

Source: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(https://fengyao.notion.site/off-policy-rl).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verl.config.rollout_correction import Bounds, Rejection, parse_bounds, parse_rejections
from verl.utils.masking import check_same_shape

MAX_LOG_RATIO = 20.0  # exp(20) is finite in float32
SECTION = "algorithm.rollout_correction"
CUT_AT_TWO = Bounds(lower=None, upper=2.0)


@dataclass(frozen=True)
class RolloutCorrection:
    """What to do about the difference; as it is, nothing but to measure it.

    Example::

        spec = RolloutCorrection.parse("token", "0.5_5.0", False, "seq_mean_k1", "0.99_1.01")
        weights = importance_weights(old_log_probs, rollout_log_probs, mask, spec)  # (B, R)
        mask = rejection_mask(old_log_probs, rollout_log_probs, mask, spec)  # (B, R)
    """

    importance_sampling: str | None = None  # "token", "sequence" or None: no weights
    bounds: Bounds = CUT_AT_TWO
    batch_normalize: bool = False  # divide weights by their mean over the batch
    rejections: tuple[Rejection, ...] = ()

    @classmethod
    def parse(
        cls,
        importance_sampling: str | None,
        threshold: str,
        batch_normalize: bool,
        rejections: str | None,
        rejection_thresholds: str | None,
    ) -> "RolloutCorrection":
        """Read the options of the section `algorithm.rollout_correction`.

        Args:
            importance_sampling: `rollout_is`.
            threshold: `rollout_is_threshold`.
            batch_normalize: `rollout_is_batch_normalize`.
            rejections: `rollout_rs`.
            rejection_thresholds: `rollout_rs_threshold`.

        Raises:
            ValueError: One of them is wrong; the message names it.
        """
        if importance_sampling not in (None, "token", "sequence"):
            raise ValueError(
                f"`{SECTION}.rollout_is` must be token, sequence or null, got {importance_sampling!r}"
            )
        if batch_normalize and importance_sampling is None:
            raise ValueError(
                f"`{SECTION}.rollout_is_batch_normalize` must be false without `{SECTION}.rollout_is`"
            )
        return cls(
            importance_sampling,
            parse_bounds(threshold, f"{SECTION}.rollout_is_threshold"),
            batch_normalize,
            parse_rejections(rejections, rejection_thresholds, SECTION),
        )


def importance_weights(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, spec: RolloutCorrection
) -> Tensor:
    """Weights of the tokens' losses that make up for sampling from another policy.

        token:     w[i,t] = exp(l[i,t])
        sequence:  w[i,t] = exp(sum_s m[i,s] l[i,s])    the same for each token of sequence i

    Bounds with an upper end only cut: min(w, upper), truncated importance sampling. With both ends, weights
    outside become zero (IcePop). `batch_normalize` then divides by the mean, over response tokens or over
    sequences, so that the loss keeps its scale; an all-zero batch stays zero.

    Source: token, truncated: https://fengyao.notion.site/off-policy-rl; two bounds: "Every Step Evolves",
    section on IcePop (https://arxiv.org/abs/2510.18855).

    Args:
        log_probs: Under the trainer's policy, (B, R).
        rollout_log_probs: As the engine reported them, (B, R).
        mask: One on response tokens, (B, R).
        spec: Reads `importance_sampling`, `bounds`, `batch_normalize`.

    Returns:
        (B, R) float32 without gradient, zero outside of the mask; ones on it if there is no sampling to
        correct.

    Raises:
        ValueError: Shapes differ.
    """
    tokens = _Tokens.of(log_probs, rollout_log_probs, mask)
    if spec.importance_sampling is None:
        return tokens.keep.float()
    raw = _raw_weights(tokens, spec.importance_sampling)  # (N,) or (B,)
    weights = _bounded(raw, spec.bounds)
    if spec.batch_normalize:
        mean = _mean_weight(weights, tokens, spec.importance_sampling)
        weights = torch.where(mean > 0, weights / mean, weights)
    if spec.importance_sampling == "sequence":
        weights = tokens.spread(weights)  # (N,)
    return tokens.unpack(weights.float())


def rejection_mask(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, spec: RolloutCorrection
) -> Tensor:
    """The response mask without the tokens and sequences that any rejection leaves out.

        k1 = l, compared with the logarithms of its bounds;  k2 = l**2 / 2;  k3 = exp(l) - 1 - l

        token:     a token is kept where its k is within the bounds
        seq_sum:   a sequence is kept if the sum of k over its tokens is; for k1 the ratio of the sequences
        seq_mean:  ... if the mean is; for k1 the geometric mean of the tokens' ratios
        seq_max:   ... if the largest is

    Bounds belong to what is kept. A sequence without a token left has an empty mask: it then takes no part in
    losses and counts.

    Args:
        log_probs: Under the trainer's policy, (B, R).
        rollout_log_probs: As the engine reported them, (B, R).
        mask: One on response tokens, (B, R).
        spec: Reads `rejections`.

    Returns:
        (B, R) int64, ones and zeros.

    Raises:
        ValueError: Shapes differ.
    """
    tokens = _Tokens.of(log_probs, rollout_log_probs, mask)
    kept = torch.ones_like(tokens.log_ratio, dtype=torch.int64)  # (N,)
    for rejection in spec.rejections:
        kept *= _within(tokens, rejection)
    return tokens.unpack(kept)


def correction_metrics(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, spec: RolloutCorrection
) -> dict[str, float]:
    """How far trainer and engine are apart, and what the correction does about it.

    Perplexities are of sequences: the exponential of minus the mean log-prob of a response's tokens; the
    metrics are means over sequences. Sequences without a response token do not count.

    - `training_ppl`, `rollout_ppl`, `training_log_ppl`, `rollout_log_ppl`; `log_ppl_diff` is rollout minus
      training, with `_max` and `_min` over sequences and `log_ppl_abs_diff`; `ppl_ratio` is the geometric
      mean of training to rollout.
    - `kl` is the mean of -l over tokens and `k3_kl` of exp(l) - 1 - l, both estimate KL(engine || trainer);
      `chi2_token` is E[exp(2 l)] - 1 over tokens, `chi2_seq` the same over sequences' ratios.
    - With weights: `rollout_is_` `mean`, `std`, `max`, `min`, `eff_sample_size` (1 / mean((w / mean w)**2))
      and the shares `ratio_fraction_high` (above the upper bound), `ratio_fraction_low` (below the lower,
      or its inverse), `oob_ratio` (both), all of the weights before the bounds; `rollout_is_seq_mean`,
      `_std`, `_max`, `_min`, `_max_deviation` from 1, `_fraction_high`, `_fraction_low` of each sequence's
      mean weight; and `rollout_is_batch_norm_factor`, what normalisation divides by.
    - With rejections: `rollout_rs_masked_fraction` of tokens and `rollout_rs_seq_masked_fraction` of
      sequences that lose a token, for all rejections and, after `rollout_rs_<name>_`, for each.

    Args:
        log_probs: Under the trainer's policy, (B, R).
        rollout_log_probs: As the engine reported them, (B, R).
        mask: One on response tokens, (B, R).
        spec: What is done about it.

    Returns:
        Names that start with `rollout_corr/`; empty if there is no response token.

    Raises:
        ValueError: Shapes differ.
    """
    tokens = _Tokens.of(log_probs, rollout_log_probs, mask)
    if not len(tokens.log_ratio):
        return {}
    metrics = _difference_metrics(tokens, log_probs.detach()[tokens.keep].double())
    if spec.importance_sampling is not None:
        metrics |= _weight_metrics(tokens, spec, spec.importance_sampling)
    if spec.rejections:
        metrics |= _rejection_metrics(tokens, spec.rejections)
    names, values = zip(*metrics.items(), strict=True)
    numbers = torch.stack([value.double() for value in values]).tolist()
    return {f"rollout_corr/{name}": number for name, number in zip(names, numbers, strict=True)}


class _Tokens(NamedTuple):
    """The response tokens of a batch, one sequence behind the other."""

    log_ratio: Tensor  # (N,) float32, trainer to engine
    lengths: Tensor  # (B,) int64
    keep: Tensor  # (B, R) bool, where they stand

    @classmethod
    def of(cls, log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> "_Tokens":
        """Pick them out of (B, R)."""
        check_same_shape(log_probs=log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
        keep = mask != 0
        log_ratio = log_probs.detach()[keep].float() - rollout_log_probs[keep].float()
        return cls(log_ratio, keep.sum(-1), keep)

    def sums(self, values: Tensor) -> Tensor:
        """Sum over each sequence: (N,) to (B,) float64, zero for an empty one."""
        return torch.segment_reduce(values.double(), "sum", lengths=self.lengths, initial=0)

    def largest(self, values: Tensor) -> Tensor:
        """Largest value of each sequence: (N,) to (B,), minus infinity for an empty one."""
        return torch.segment_reduce(values, "max", lengths=self.lengths)

    def means(self, values: Tensor) -> Tensor:
        """Mean over each sequence: (N,) to (B,) float64, zero for an empty one."""
        return self.sums(values) / self.lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """Give each token its sequence's value: (B,) to (N,)."""
        return values.repeat_interleave(self.lengths)

    def unpack(self, values: Tensor) -> Tensor:
        """Put tokens' values back: (N,) to (B, R), zero where no token stands."""
        return values.new_zeros(self.keep.shape).masked_scatter_(self.keep, values)


def _raw_weights(tokens: _Tokens, level: str) -> Tensor:
    """Weights before the bounds: (N,) by token, (B,) by sequence."""
    return _exp(tokens.sums(tokens.log_ratio) if level == "sequence" else tokens.log_ratio)


def _bounded(weights: Tensor, bounds: Bounds) -> Tensor:
    if bounds.lower is None:
        return weights.clamp(max=bounds.upper)
    return weights.masked_fill((weights < bounds.lower) | (weights > bounds.upper), 0)


def _mean_weight(weights: Tensor, tokens: _Tokens, level: str) -> Tensor:
    """Mean over tokens, or over the sequences that have any, () float64; zero if there are none."""
    if level == "sequence":
        weights = weights[tokens.lengths > 0]
    return weights.sum(dtype=torch.float64) / max(len(weights), 1)


def _within(tokens: _Tokens, rejection: Rejection) -> Tensor:
    """Which tokens one rejection keeps, (N,) bool."""
    values = _measure(tokens.log_ratio, rejection.measure)  # (N,), and (B,) for levels of sequences
    if rejection.level != "token":
        reduce = {"seq_sum": tokens.sums, "seq_mean": tokens.means, "seq_max": tokens.largest}
        values = reduce[rejection.level](values)
    if rejection.lower is None:
        kept = values <= rejection.upper
    else:
        kept = (values >= math.log(rejection.lower)) & (values <= math.log(rejection.upper))
    return kept if rejection.level == "token" else tokens.spread(kept)


def _measure(log_ratio: Tensor, measure: str) -> Tensor:
    """k1 (without its sign), k2 or k3 of each token, (N,)."""
    if measure == "k1":
        return log_ratio
    if measure == "k2":
        return log_ratio.square() / 2
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(clamped) - clamped


def _difference_metrics(tokens: _Tokens, log_probs: Tensor) -> dict[str, Tensor]:
    """Perplexities and divergences, () each, from the log-ratio and the trainer's log-probs (N,)."""
    is_filled = tokens.lengths > 0
    training = -tokens.means(log_probs)[is_filled]  # (sequences,) here and below
    difference = tokens.means(tokens.log_ratio)[is_filled]
    rollout = training + difference
    log_ratio = tokens.log_ratio.double()
    sequence_ratio = _exp(tokens.sums(log_ratio)[is_filled])
    return {
        "training_ppl": training.exp().mean(),
        "training_log_ppl": training.mean(),
        "rollout_ppl": rollout.exp().mean(),
        "rollout_log_ppl": rollout.mean(),
        "kl": -log_ratio.mean(),
        "k3_kl": _measure(log_ratio, "k3").mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": (-difference.mean()).exp(),
        "chi2_token": _exp(log_ratio).square().mean() - 1,
        "chi2_seq": sequence_ratio.square().mean() - 1,
    }


def _weight_metrics(tokens: _Tokens, spec: RolloutCorrection, level: str) -> dict[str, Tensor]:
    """Statistics of the weights before the bounds, () each."""
    raw = _raw_weights(tokens, level)  # (N,) or (B,)
    weights = (tokens.spread(raw) if level == "sequence" else raw).double()  # (N,)
    by_sequence = tokens.means(weights)[tokens.lengths > 0]  # (sequences,)
    upper = spec.bounds.upper
    lower = 1 / upper if spec.bounds.lower is None else spec.bounds.lower
    high, low = (weights > upper).double().mean(), (weights < lower).double().mean()
    metrics = {
        **_statistics("rollout_is_", weights),
        "rollout_is_eff_sample_size": weights.mean().square() / weights.square().mean(),
        "rollout_is_ratio_fraction_high": high,
        "rollout_is_ratio_fraction_low": low,
        "rollout_is_oob_ratio": high + low,
        **_statistics("rollout_is_seq_", by_sequence),
        "rollout_is_seq_max_deviation": (by_sequence - 1).abs().max(),
        "rollout_is_seq_fraction_high": (by_sequence > upper).double().mean(),
        "rollout_is_seq_fraction_low": (by_sequence < lower).double().mean(),
    }
    if spec.batch_normalize:
        metrics["rollout_is_batch_norm_factor"] = _mean_weight(_bounded(raw, spec.bounds), tokens, level)
    return metrics


def _rejection_metrics(tokens: _Tokens, rejections: tuple[Rejection, ...]) -> dict[str, Tensor]:
    """Shares of tokens and sequences that lose a token, () each."""
    rejected = {f"{rejection.name}_": ~_within(tokens, rejection) for rejection in rejections}  # (N,)
    rejected[""] = torch.stack(list(rejected.values())).any(0)
    num_sequences = (tokens.lengths > 0).sum()
    metrics = {}
    for name, lost in rejected.items():
        metrics[f"rollout_rs_{name}masked_fraction"] = lost.double().mean()
        metrics[f"rollout_rs_{name}seq_masked_fraction"] = tokens.sums(lost).gt(0).sum() / num_sequences
    return metrics


def _statistics(prefix: str, values: Tensor) -> dict[str, Tensor]:
    return {
        f"{prefix}mean": values.mean(),
        f"{prefix}std": values.std(correction=0),
        f"{prefix}max": values.max(),
        f"{prefix}min": values.min(),
    }


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
