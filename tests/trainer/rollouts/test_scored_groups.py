# SPDX-License-Identifier: Apache-2.0
"""Groups with their scores: chosen, joined, stored."""

import math

import pytest
import torch

from verl.protocol import DataProto, objects
from verl.trainer.rollouts.scores import ScoredGroups


def make_groups(first, num_groups, **values):
    rows = list(range(2 * first, 2 * (first + num_groups)))
    sequences = DataProto.from_dict(
        {"responses": torch.tensor(rows).unsqueeze(-1)},
        {
            "uid": objects([f"p{row // 2}" for row in rows]),
            "multi_modal_data": objects([{"images": [b"x"]}] * len(rows)),
        },
        {"kept": "as it is"},
    )
    return ScoredGroups(sequences, {"overall": [float(row) for row in rows], **values}, 2)


def test_choosing_groups_keeps_rows_and_scores_together():
    chosen = make_groups(0, 4).select(torch.tensor([2, 0]))

    assert len(chosen) == 2
    assert chosen.sequences.batch["responses"].flatten().tolist() == [4, 5, 0, 1]
    assert chosen.values == {"overall": [4.0, 5.0, 0.0, 1.0]}
    assert len(make_groups(0, 2).select(torch.tensor([], dtype=torch.int64))) == 0


def test_joining_puts_groups_one_behind_the_other_and_empty_ones_add_nothing():
    empty = make_groups(0, 1).select(torch.tensor([], dtype=torch.int64))

    joined = ScoredGroups.concat([empty, make_groups(0, 1), make_groups(1, 1, rare=[1.0, 2.0])])

    assert len(joined) == 2 and joined.values["overall"] == [0.0, 1.0, 2.0, 3.0]
    assert joined.values["rare"][2:] == [1.0, 2.0] and math.isnan(joined.values["rare"][0])


@pytest.mark.parametrize(("first", "sizes"), [(0, (0, 3)), (2, (2, 1)), (3, (3, 0))])
def test_a_split_gives_the_first_groups_and_the_others(first, sizes):
    head, rest = make_groups(0, 3).split(first)

    assert (len(head), len(rest)) == sizes
    assert head.values["overall"] + rest.values["overall"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert rest.sequences.batch["responses"].flatten().tolist() == list(range(2 * first, 6))


def test_groups_come_back_from_a_file_as_they_were(tmp_path):
    groups = make_groups(3, 2, rare=[math.nan, 0.1, math.nan, 0.3])

    groups.save(tmp_path / "groups.pt")
    restored = ScoredGroups.load(tmp_path / "groups.pt")

    assert restored.group_size == 2 and restored.values["overall"] == groups.values["overall"]
    assert restored.values["rare"][1] == 0.1 and math.isnan(restored.values["rare"][0])
    assert sorted(restored.sequences.keys()) == sorted(groups.sequences.keys())
    assert restored.sequences.meta_info == {"kept": "as it is"}
    assert restored.sequences.non_tensor_batch["multi_modal_data"].tolist() == [{"images": [b"x"]}] * 4
    assert groups.sequences.keys() == make_groups(0, 1).sequences.keys()  # saving changes nothing


def test_a_column_that_cannot_be_stored_is_named_before_anything_is_saved():
    groups = make_groups(0, 1)
    groups.sequences.non_tensor_batch["created"] = objects([object()] * 2)

    with pytest.raises(TypeError, match=r"column `created` of the training rows holds a object"):
        groups.check_storable()
