# SPDX-License-Identifier: Apache-2.0
import torch

from verl.protocol import DataProto
from verl.trainer.rollouts.balancing import balance_over_ranks


def batch_of(prompts, responses):
    columns = torch.arange(100)
    prompt, response = (torch.tensor(lengths)[:, None] for lengths in (prompts, responses))
    mask = torch.cat([columns >= 100 - prompt, columns < response], 1).long()
    return DataProto.from_dict({"attention_mask": mask, "responses": mask[:, 100:]})


def test_ranks_get_whole_groups_by_the_work_that_their_layout_leaves():
    # The groups of two of `test_groups_are_balanced_by_the_work_of_shared_prompts`: a b c d.
    batch = batch_of([99, 99, 1, 1, 1, 1, 1, 1], [1, 1, 79, 79, 49, 49, 44, 44])

    separate, _ = balance_over_ranks(batch, 8, 2, 2)
    shared, _ = balance_over_ranks(batch, 8, 2, 2, share_prompt=True)

    assert sorted([sorted(separate[:4]), sorted(separate[4:])]) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert sorted([sorted(shared[:4]), sorted(shared[4:])]) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_every_rank_holds_its_share_of_each_mini_batch_in_turn():
    batch = batch_of([5] * 8, [1, 2, 3, 4, 5, 6, 7, 8])

    order, metrics = balance_over_ranks(batch, 4, 1, 2)

    for shard in (order[:4], order[4:]):
        assert [row // 4 for row in shard] == [0, 0, 1, 1]
    # 5 x 8 prompt tokens and 36 response tokens; as the batch came, rank 0 had 20 + 10 of them.
    assert metrics["global_seqlen/mean"] == 38
    assert metrics["global_seqlen/min"] == 30
