# SPDX-License-Identifier: Apache-2.0
"""A masked response, in any position, changes no advantage, weight or metric of the others."""

import pytest
import torch

from tests.trainer.test_observed_tokens import CORRECTIONS, PERTURBED, ROWS, conversations, finished
from verl.algorithms.advantages import ADV_ESTIMATORS
from verl.config.algorithm import AlgorithmConfig

OF_ROWS = ("accuracies", "reward_baselines", "reward_components")
# Alone, one of a group, a whole group, all but one of the batch, every second one.
MASKED = [[0], [1], [6, 7], [0, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6]]


def without(rows, scale):
    """The batch with masked rows whose every value is drawn again, `scale` times as large."""
    batch = conversations()
    is_masked = torch.zeros(ROWS, dtype=torch.bool)
    is_masked[rows] = True
    generator = torch.Generator().manual_seed(int(scale))
    changed = {"loss_mask": batch.batch["loss_mask"].masked_fill(is_masked.unsqueeze(-1), 0)}
    for name in (*PERTURBED, "token_level_scores", *OF_ROWS):
        values = batch.batch[name]
        noise = scale * torch.randn(values.shape, generator=generator)
        chosen = is_masked.view(-1, *[1] * (values.dim() - 1))
        changed[name] = torch.where(chosen, noise, values)
    return batch.merge(changed, replace=list(changed)), ~is_masked


@pytest.mark.parametrize("masked", MASKED, ids=str)
@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
@pytest.mark.parametrize("estimator", ADV_ESTIMATORS.names())
def test_a_masked_response_reaches_no_advantage_no_weight_and_no_metric(estimator, correction, masked):
    algorithm = AlgorithmConfig(
        adv_estimator=estimator,
        gamma=0.9,
        lam=0.8,
        rollout_correction=correction,
        kl_penalty="low_var_kl",
        kl_coef=0.1,
    )
    (first, kept), (second, _) = without(masked, 1.0), without(masked, 50.0)

    (tensors, metrics), (others, other_metrics) = finished(first, algorithm), finished(second, algorithm)

    for name, values in tensors.items():
        torch.testing.assert_close(values[kept], others[name][kept], atol=0, rtol=0, msg=name)
    assert metrics == pytest.approx(other_metrics, nan_ok=True, abs=0, rel=1e-12)
