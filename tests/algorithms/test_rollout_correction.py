# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from verl.algorithms.rollout_correction import (
    correction_metrics,
    importance_weights,
    rejection_mask,
)
from verl.config.algorithm import REJECTIONS, RolloutCorrectionConfig

NAN = float("nan")
# Ratios of trainer to engine: 2, 1/2, 4; then 1/8 and 2 around a tool's token; then a row of padding.
RATIOS = [[2.0, 0.5, 4.0], [0.125, NAN, 2.0], [NAN, NAN, NAN]]
MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0]])
ROLLOUT = torch.tensor([[-2.0, -3.0, -4.0], [-1.0, NAN, -1.5], [NAN, 0.0, NAN]])
TRAINER = ROLLOUT + torch.tensor(RATIOS).log()


def spec(importance_sampling=None, threshold="100", normalize=False, rejections=None, thresholds=None):
    return RolloutCorrectionConfig(importance_sampling, threshold, normalize, rejections, thresholds)


def weights(*arguments):
    return importance_weights(TRAINER, ROLLOUT, MASK, spec(*arguments))


def kept(rejections, thresholds):
    return rejection_mask(TRAINER, ROLLOUT, MASK, spec(rejections=rejections, thresholds=thresholds)).tolist()


def assert_equal(ours, expected):
    torch.testing.assert_close(ours, torch.tensor(expected), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("token", "100"), [[2, 0.5, 4], [0.125, 0, 2], [0, 0, 0]]),
        (("token", "3"), [[2, 0.5, 3], [0.125, 0, 2], [0, 0, 0]]),  # cut
        (("token", "0.25_3"), [[2, 0.5, 0], [0, 0, 2], [0, 0, 0]]),  # dropped on both sides
        (("sequence", "100"), [[4, 4, 4], [0.25, 0, 0.25], [0, 0, 0]]),  # products 4 and 1/4
        (("sequence", "3"), [[3, 3, 3], [0.25, 0, 0.25], [0, 0, 0]]),
        (("sequence", "0.5_5"), [[4, 4, 4], [0, 0, 0], [0, 0, 0]]),
        ((None, "3"), [[1, 1, 1], [1, 0, 1], [0, 0, 0]]),  # no weights
    ],
)
def test_weights_by_hand(arguments, expected):
    assert_equal(weights(*arguments), [[float(value) for value in row] for row in expected])


def test_normalized_token_weights_have_mean_one_over_response_tokens():
    # Cut at 3: 2 + 0.5 + 3 + 0.125 + 2 = 7.625 over five tokens.
    assert_equal(weights("token", "3", True) * (7.625 / 5), [[2, 0.5, 3], [0.125, 0, 2], [0, 0, 0.0]])


def test_normalized_sequence_weights_have_mean_one_over_sequences():
    # Cut at 3: (3 + 0.25) / 2 = 1.625; the empty third sequence does not count.
    a, b = 3 / 1.625, 0.25 / 1.625
    assert_equal(weights("sequence", "3", True), [[a, a, a], [b, 0, b], [0, 0, 0]])


def test_normalizing_all_zero_weights_leaves_zeros():
    assert weights("sequence", "0.9_1.1", True).eq(0).all()


def test_weights_are_bounded_before_they_overflow_and_carry_no_gradient():
    trainer = torch.tensor([[0.0, -500.0]], requires_grad=True)

    result = importance_weights(
        trainer, torch.tensor([[-500.0, 0.0]]), torch.ones(1, 2), spec("token", "1e30")
    )

    torch.testing.assert_close(result, torch.tensor([[math.exp(20), math.exp(-20)]]))
    assert not result.requires_grad


@pytest.mark.parametrize(
    ("names", "thresholds", "expected"),
    [
        # Log-ratios in units of log 2: 1, -1, 2 and -3, 1. Sums 2 and -2, means 2/3 and -1.
        ("token_k1", "0.4_3", [[1, 1, 0], [0, 0, 1], [0, 0, 0]]),
        ("token_k1", "3", [[1, 1, 0], [0, 0, 1], [0, 0, 0]]),  # 1/3_3
        ("seq_sum_k1", "0.3_5", [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),
        ("seq_sum_k1", "0.2_3", [[0, 0, 0], [1, 0, 1], [0, 0, 0]]),
        ("seq_mean_k1", "0.6_1.6", [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),  # 2**(2/3) = 1.587, 1/2
        # k2 = log(2)**2 / 2 * (1, 1, 4) and (9, 1), with log(2)**2 / 2 = 0.2402
        ("token_k2", "0.5", [[1, 1, 0], [0, 0, 1], [0, 0, 0]]),
        ("seq_sum_k2", "1.5", [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),  # 1.441, 2.402
        ("seq_mean_k2", "1.0", [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),  # 0.480, 1.201
        ("seq_max_k2", "1.0", [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),  # 0.961, 2.162
        # k3 = r - 1 - log(r): 0.3069, 0.1931, 1.6137 and 1.2044, 0.3069
        ("token_k3", "0.25", [[0, 1, 0], [0, 0, 0], [0, 0, 0]]),
        ("seq_sum_k3", "2.0", [[0, 0, 0], [1, 0, 1], [0, 0, 0]]),  # 2.114, 1.511
        ("seq_mean_k3", "0.72", [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),  # 0.705, 0.756
        ("seq_max_k3", "1.5", [[0, 0, 0], [1, 0, 1], [0, 0, 0]]),  # 1.614, 1.204
        ("seq_sum_k1,token_k3", "0.3_5,0.5", [[1, 1, 0], [0, 0, 0], [0, 0, 0]]),  # both must agree
        (None, None, [[1, 1, 1], [1, 0, 1], [0, 0, 0]]),
    ],
)
def test_rejections_by_hand(names, thresholds, expected):
    assert kept(names, thresholds) == expected


def test_rejections_handle_log_ratios_that_overflow():
    trainer, rollout = torch.tensor([[-500.0, 0.0]]), torch.tensor([[0.0, -500.0]])

    result = rejection_mask(
        trainer, rollout, torch.ones(1, 2), spec(rejections="token_k1", thresholds="0.5_1e30")
    )

    assert result.tolist() == [[0, 0]]


def loop_metrics(trainer, rollout, mask):
    """The differences by loops over tokens, in Python floats."""
    rows = [
        [(a, b) for a, b, m in zip(*row, strict=True) if m]
        for row in zip(trainer, rollout, mask, strict=True)
    ]
    rows = [row for row in rows if row]
    tokens = [a - b for row in rows for a, b in row]
    training_log_ppl = [-sum(a for a, _ in row) / len(row) for row in rows]
    rollout_log_ppl = [-sum(b for _, b in row) / len(row) for row in rows]
    gaps = [b - a for a, b in zip(training_log_ppl, rollout_log_ppl, strict=True)]

    def mean(values):
        return sum(values) / len(values)

    return {
        "training_ppl": mean([math.exp(value) for value in training_log_ppl]),
        "training_log_ppl": mean(training_log_ppl),
        "rollout_ppl": mean([math.exp(value) for value in rollout_log_ppl]),
        "rollout_log_ppl": mean(rollout_log_ppl),
        "kl": -mean(tokens),
        "k3_kl": mean([math.exp(value) - 1 - value for value in tokens]),
        "log_ppl_diff": mean(gaps),
        "log_ppl_abs_diff": mean([abs(gap) for gap in gaps]),
        "log_ppl_diff_max": max(gaps),
        "log_ppl_diff_min": min(gaps),
        "ppl_ratio": math.exp(-mean(gaps)),
        "chi2_token": mean([math.exp(2 * value) for value in tokens]) - 1,
        "chi2_seq": mean([math.exp(2 * sum(a - b for a, b in row)) for row in rows]) - 1,
    }


def test_the_mismatch_metrics_equal_a_loop_over_tokens():
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(7, 9, generator=generator) * 3
    trainer = rollout + torch.randn(7, 9, generator=generator) * 0.2
    mask = torch.arange(9) < torch.tensor([9, 1, 4, 0, 6, 2, 9])[:, None]
    mask[0, 3] = False
    padded = [values.masked_fill(~mask, NAN) for values in (trainer, rollout)]

    metrics = correction_metrics(*padded, mask.long(), spec())

    expected = loop_metrics(trainer.double().tolist(), rollout.double().tolist(), mask.tolist())
    assert metrics == {
        f"rollout_corr/{name}": pytest.approx(value, rel=1e-5) for name, value in expected.items()
    }


def test_equal_policies_have_no_mismatch():
    metrics = correction_metrics(ROLLOUT, ROLLOUT, MASK, spec("token", "2", True, "token_k1", "2"))

    ones = {"ppl_ratio", "rollout_is_eff_sample_size", "rollout_is_batch_norm_factor"}
    ones |= {f"rollout_is_{level}{name}" for level in ("", "seq_") for name in ("mean", "max", "min")}
    perplexities = {"training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl"}
    for name, value in metrics.items():
        name = name.removeprefix("rollout_corr/")
        assert name in perplexities or value == pytest.approx(float(name in ones), abs=1e-12), name


def test_statistics_of_token_weights_by_hand():
    # Weights 2, 0.5, 4 and 0.125, 2: sum 8.625, squares 24.265625. Means of sequences 6.5 / 3 and 2.125 / 2.
    metrics = correction_metrics(TRAINER, ROLLOUT, MASK, spec("token", "3", True))

    expected = {
        "mean": 1.725,
        "std": math.sqrt(24.265625 / 5 - 1.725**2),
        "max": 4,
        "min": 0.125,
        "eff_sample_size": 1.725**2 / (24.265625 / 5),
        "ratio_fraction_high": 1 / 5,  # above 3
        "ratio_fraction_low": 1 / 5,  # below 1/3
        "oob_ratio": 2 / 5,
        "seq_mean": (6.5 / 3 + 2.125 / 2) / 2,
        "seq_std": (6.5 / 3 - 2.125 / 2) / 2,
        "seq_max": 6.5 / 3,
        "seq_min": 2.125 / 2,
        "seq_max_deviation": 6.5 / 3 - 1,
        "seq_fraction_high": 0,
        "seq_fraction_low": 0,
        "batch_norm_factor": 7.625 / 5,  # of the weights cut at 3
    }
    found = {name: value for name, value in metrics.items() if "rollout_is" in name}
    assert found == {
        f"rollout_corr/rollout_is_{name}": pytest.approx(value, rel=1e-6) for name, value in expected.items()
    }


def test_statistics_of_sequence_weights_by_hand():
    # 4 on three tokens, 1/4 on two; outside of 0.5_3 are all.
    metrics = correction_metrics(TRAINER, ROLLOUT, MASK, spec("sequence", "0.5_3"))

    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((3 * 4 + 2 * 0.25) / 5)
    assert metrics["rollout_corr/rollout_is_seq_mean"] == pytest.approx((4 + 0.25) / 2)
    assert metrics["rollout_corr/rollout_is_seq_fraction_high"] == 0.5
    assert metrics["rollout_corr/rollout_is_seq_fraction_low"] == 0.5
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == 1


def test_rejected_fractions_per_rejection_and_in_total():
    # token_k1 within 1/3_3 rejects one token of either sequence, seq_sum_k1 all of the second.
    metrics = correction_metrics(
        TRAINER, ROLLOUT, MASK, spec(rejections="token_k1,seq_sum_k1", thresholds="3,0.3_5")
    )

    found = {name: value for name, value in metrics.items() if "rollout_rs" in name}
    assert found == pytest.approx(
        {
            "rollout_corr/rollout_rs_token_k1_masked_fraction": 2 / 5,
            "rollout_corr/rollout_rs_token_k1_seq_masked_fraction": 1,
            "rollout_corr/rollout_rs_seq_sum_k1_masked_fraction": 2 / 5,
            "rollout_corr/rollout_rs_seq_sum_k1_seq_masked_fraction": 1 / 2,
            "rollout_corr/rollout_rs_masked_fraction": 3 / 5,
            "rollout_corr/rollout_rs_seq_masked_fraction": 1,
        }
    )


def test_a_batch_without_response_tokens_has_no_metrics_and_zero_weights():
    empty, everything = torch.zeros_like(MASK), spec("token", "2", True, "token_k1", "2")

    assert correction_metrics(TRAINER, ROLLOUT, empty, everything) == {}
    assert importance_weights(TRAINER, ROLLOUT, empty, everything).eq(0).all()
    assert rejection_mask(TRAINER, ROLLOUT, empty, everything).eq(0).all()


@pytest.mark.parametrize("function", [importance_weights, rejection_mask, correction_metrics])
def test_shapes_that_would_broadcast_are_rejected(function):
    with pytest.raises(ValueError, match="rollout_log_probs"):
        function(torch.zeros(3, 2), torch.zeros(3, 1), torch.ones(3, 2), spec("token"))


@pytest.mark.parametrize("mask", [MASK.bool(), MASK.float()])
def test_any_mask_dtype_works(mask):
    both = spec("sequence", "3", True, ",".join(REJECTIONS), ",".join(["3"] * len(REJECTIONS)))

    torch.testing.assert_close(
        importance_weights(TRAINER, ROLLOUT, mask, both), importance_weights(TRAINER, ROLLOUT, MASK, both)
    )
    assert rejection_mask(TRAINER, ROLLOUT, mask, both).dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("token", "0.55"), "rollout_is_threshold` must be a number of at least 1"),
        (("token", "2.0", False, "k1", "2"), "rollout_rs` must hold names of"),
        (("token", "2.0", False, "token_k1", "1"), "rollout_rs_threshold` of token_k1"),
    ],
)
def test_invalid_options_are_named(arguments, message):
    with pytest.raises(ValueError, match=f"`algorithm.rollout_correction.{message}"):
        correction_metrics(TRAINER, ROLLOUT, MASK, spec(*arguments))
