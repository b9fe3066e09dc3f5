# SPDX-License-Identifier: Apache-2.0
import torch

from verl.trainer.metrics import draft_metrics


def test_shares_of_drafts_are_of_all_tokens_of_the_batch():
    # 6 of 12 drafted tokens were accepted, of 24 that were sampled; the second response had no draft
    metrics = draft_metrics(torch.tensor([8, 0, 4]), torch.tensor([5, 0, 1]), 24)

    assert metrics == {"rollout/draft_acceptance": 0.5, "rollout/drafted_frac": 0.25}
    assert draft_metrics(torch.zeros(2), torch.zeros(2), 3) == dict.fromkeys(metrics, 0.0)
