# SPDX-License-Identifier: Apache-2.0
"""Correction for the mismatch between the sampling policy and the trained one.

Rollout engine and trainer compute slightly different probabilities from the same weights; with stale samples
or `bypass_mode` the weights differ too. Here l = log_probs - rollout_log_probs is the log-ratio of trainer to
engine at a sampled token. All tensors are (B, R); values outside of the response mask may be anything, even
NaN. Sums over tokens are float64; log-ratios are clamped to +-20 before exponentiation.

To add a rejection: its measure or level in `verl/config/algorithm.py` and here.

Source: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(https://fengyao.notion.site/off-policy-rl).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.kl import MAX_LOG_RATIO, ratio_of
from verl.config.algorithm import Bounds, Rejection, RolloutCorrectionConfig, parse_bounds, parse_rejections
from verl.utils.masking import check_same_shape

SECTION = "algorithm.rollout_correction"


def importance_weights(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, options: RolloutCorrectionConfig
) -> Tensor:
    """Weights of the tokens' losses that correct for sampling from another policy, without gradient.

        token:     w[i,t] = exp(l[i,t])
        sequence:  w[i,t] = exp(sum_s m[i,s] l[i,s])    the same for each token of sequence i

    An upper bound alone truncates: min(w, upper). With two bounds, weights outside become zero (IcePop).
    `rollout_is_batch_normalize` then divides by the mean. Without `rollout_is` the weights are the mask.

    Source: truncation as in the module; IcePop: "Every Step Evolves" (https://arxiv.org/abs/2510.18855).
    """
    tokens = _Tokens.of(log_probs, rollout_log_probs, mask)
    level = options.rollout_is
    if level is None:
        return tokens.keep.float()
    weights = _bounded(_raw_weights(tokens, level), _bounds(options))  # (N,) or (B,)
    if options.rollout_is_batch_normalize:
        mean = _mean_weight(weights, tokens, level)
        weights = torch.where(mean > 0, weights / mean, weights)
    if level == "sequence":
        weights = tokens.spread(weights)  # (N,)
    return tokens.unpack(weights.float())


def rejection_mask(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, options: RolloutCorrectionConfig
) -> Tensor:
    """The response mask, (B, R) int64, without rejected tokens and sequences.

        k1 = l, compared with the logarithms of its bounds;  k2 = l**2 / 2;  k3 = exp(l) - 1 - l

        token:     keeps a token whose k is within the bounds
        seq_sum:   keeps a sequence whose sum of k is; for k1 the ratio of the sequences
        seq_mean:  ... whose mean is; for k1 the geometric mean of the tokens' ratios
        seq_max:   ... whose maximum is

    Bounds are inclusive.
    """
    tokens = _Tokens.of(log_probs, rollout_log_probs, mask)
    kept = torch.ones_like(tokens.log_ratio, dtype=torch.int64)  # (N,)
    for rejection in _rejections(options):
        kept *= _within(tokens, rejection)
    return tokens.unpack(kept)


def correction_metrics(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, options: RolloutCorrectionConfig
) -> dict[str, float]:
    """Measure the mismatch and the effect of the correction; empty without a response token.

    Names start with `rollout_corr/`; docs/algorithms/rollout_correction.md explains each. Perplexities are
    per sequence, exp(-mean log-prob), and averaged over non-empty sequences.
    """
    tokens = _Tokens.of(log_probs, rollout_log_probs, mask)
    if not len(tokens.log_ratio):
        return {}
    metrics = _difference_metrics(tokens, log_probs.detach()[tokens.keep].double())
    if options.rollout_is is not None:
        metrics |= _weight_metrics(tokens, options, options.rollout_is)
    if rejections := _rejections(options):
        metrics |= _rejection_metrics(tokens, rejections)
    names, values = zip(*metrics.items(), strict=True)
    numbers = torch.stack([value.double() for value in values]).tolist()
    return {f"rollout_corr/{name}": number for name, number in zip(names, numbers, strict=True)}


class _Tokens(NamedTuple):
    """The response tokens of a batch, concatenated."""

    log_ratio: Tensor  # (N,) float32, trainer to engine
    lengths: Tensor  # (B,) int64
    keep: Tensor  # (B, R) bool, the response mask

    @classmethod
    def of(cls, log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> "_Tokens":
        check_same_shape(log_probs=log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
        keep = mask != 0
        log_ratio = log_probs.detach()[keep].float() - rollout_log_probs[keep].float()
        return cls(log_ratio, keep.sum(-1), keep)

    def sums(self, values: Tensor) -> Tensor:
        """Sum over each sequence: (N,) to (B,) float64, zero for an empty one."""
        return torch.segment_reduce(values.double(), "sum", lengths=self.lengths, initial=0)

    def largest(self, values: Tensor) -> Tensor:
        """Maximum of each sequence: (N,) to (B,), minus infinity for an empty one."""
        return torch.segment_reduce(values, "max", lengths=self.lengths)

    def means(self, values: Tensor) -> Tensor:
        """Mean over each sequence: (N,) to (B,) float64, zero for an empty one."""
        return self.sums(values) / self.lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """Repeat each sequence's value for its tokens: (B,) to (N,)."""
        return values.repeat_interleave(self.lengths)

    def unpack(self, values: Tensor) -> Tensor:
        """Undo the concatenation: (N,) to (B, R), zero outside of the mask."""
        return values.new_zeros(self.keep.shape).masked_scatter_(self.keep, values)


def _bounds(options: RolloutCorrectionConfig) -> Bounds:
    return parse_bounds(options.rollout_is_threshold, f"{SECTION}.rollout_is_threshold")


def _rejections(options: RolloutCorrectionConfig) -> tuple[Rejection, ...]:
    return parse_rejections(options.rollout_rs, options.rollout_rs_threshold, SECTION)


def _raw_weights(tokens: _Tokens, level: str) -> Tensor:
    """Weights before the bounds: (N,) by token, (B,) by sequence."""
    return ratio_of(tokens.sums(tokens.log_ratio) if level == "sequence" else tokens.log_ratio)


def _bounded(weights: Tensor, bounds: Bounds) -> Tensor:
    if bounds.lower is None:
        return weights.clamp(max=bounds.upper)
    return weights.masked_fill((weights < bounds.lower) | (weights > bounds.upper), 0)


def _mean_weight(weights: Tensor, tokens: _Tokens, level: str) -> Tensor:
    """Mean over tokens or non-empty sequences, () float64; zero if there are none."""
    if level == "sequence":
        weights = weights[tokens.lengths > 0]
    return weights.sum(dtype=torch.float64) / max(len(weights), 1)


def _within(tokens: _Tokens, rejection: Rejection) -> Tensor:
    """Mask of the tokens that one rejection keeps, (N,) bool."""
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
    """k1, k2 or k3 of each token, (N,)."""
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
    sequence_ratio = ratio_of(tokens.sums(log_ratio)[is_filled])
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
        "chi2_token": ratio_of(log_ratio).square().mean() - 1,
        "chi2_seq": sequence_ratio.square().mean() - 1,
    }


def _weight_metrics(tokens: _Tokens, options: RolloutCorrectionConfig, level: str) -> dict[str, Tensor]:
    """Statistics of the weights before the bounds, () each."""
    raw = _raw_weights(tokens, level)  # (N,) or (B,)
    weights = (tokens.spread(raw) if level == "sequence" else raw).double()  # (N,)
    by_sequence = tokens.means(weights)[tokens.lengths > 0]  # (sequences,)
    bounds = _bounds(options)
    upper = bounds.upper
    lower = 1 / upper if bounds.lower is None else bounds.lower
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
    if options.rollout_is_batch_normalize:
        metrics["rollout_is_batch_norm_factor"] = _mean_weight(_bounded(raw, bounds), tokens, level)
    return metrics


def _rejection_metrics(tokens: _Tokens, rejections: tuple[Rejection, ...]) -> dict[str, Tensor]:
    """Fractions of tokens and sequences that lose a token, () each."""
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
