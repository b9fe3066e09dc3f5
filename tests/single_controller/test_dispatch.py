# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller.dispatch import (
    AxisRank,
    Dispatch,
    RemoteMethod,
    check_axis,
    join,
    register,
    remote_methods,
    shard,
)


def numbers(*values):
    return DataProto.from_dict({"numbers": torch.tensor(values, dtype=torch.int64)})


def values_of(parts):
    return [part.batch["numbers"].tolist() for part in parts]


SHARDED = RemoteMethod("f", Dispatch.SHARD, "phase", streaming=False, axis="rollout")
TP2_DP2 = [AxisRank(0, 2, True), AxisRank(0, 2, False), AxisRank(1, 2, True), AxisRank(1, 2, False)]


def test_a_batch_is_split_into_equal_parts_in_order():
    assert values_of(shard(numbers(1, 2, 3, 4), 2, even=True)) == [[1, 2], [3, 4]]


def test_parts_lack_the_columns_that_a_method_does_not_read_and_the_batch_keeps_them():
    batch = numbers(1, 2).merge({"words": np.array(["a", "b"], dtype=object), "more": torch.zeros(2)})

    parts = shard(batch, 2, even=True, unread=("words", "more", "others"))
    assert [part.keys() for part in parts] == [["numbers"]] * 2
    assert sorted(batch.keys()) == ["more", "numbers", "words"]


def test_parts_that_may_be_uneven_differ_by_at_most_one_row():
    assert values_of(shard(numbers(*range(7)), 3, even=False)) == [[0, 1], [2, 3], [4, 5, 6]]
    assert values_of(shard(numbers(9), 3, even=False)) == [[], [], [9]]


def test_an_uneven_batch_is_an_error_with_a_remedy():
    with pytest.raises(
        ValueError, match=r"3 rows .* 2 data-parallel ranks: pad it with `pad_dataproto_to_divisor`"
    ):
        shard(numbers(1, 2, 3), 2, even=True)


def test_only_the_first_rank_of_a_model_parallel_group_counts():
    results = [numbers(1), numbers(-1), numbers(2), numbers(-2)]

    assert join(SHARDED, results, TP2_DP2).batch["numbers"].tolist() == [1, 2]
    assert join(SHARDED, ["a", "-", "b", "-"], TP2_DP2) == ["a", "b"]


def test_results_are_joined_in_the_order_of_the_axis_not_of_the_ranks():
    axis_ranks = [AxisRank(1, 2, True), AxisRank(0, 2, True)]

    assert join(SHARDED, ["late", "early"], axis_ranks) == ["early", "late"]


def test_an_axis_needs_one_first_rank_for_each_index():
    assert check_axis("rollout", TP2_DP2) == TP2_DP2
    with pytest.raises(RuntimeError, match="one first rank for each index"):
        check_axis("rollout", [AxisRank(0, 2, True), AxisRank(0, 2, True)])
    with pytest.raises(RuntimeError, match=r"ranks \[1\] have not called `set_axis\('train'"):
        check_axis("train", [AxisRank(0, 1, True), None])


def test_registered_methods_are_found_in_base_classes_too():
    class Base:
        @register(Dispatch.ALL, phase="save")
        def save(self): ...

        def private(self): ...

    class Derived(Base):
        @register(Dispatch.SHARD, phase="gen", streaming=True, axis="rollout")
        def generate(self): ...

    assert remote_methods(Derived) == {
        "save": RemoteMethod("save", Dispatch.ALL, "save", False, "train"),
        "generate": RemoteMethod("generate", Dispatch.SHARD, "gen", True, "rollout"),
    }
