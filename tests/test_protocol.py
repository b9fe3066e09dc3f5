# SPDX-License-Identifier: Apache-2.0
import copy
import pickle
import random
from datetime import datetime, timedelta, timezone
from decimal import Decimal

import numpy as np
import pytest
import torch

from verl.batch_keys import BATCH_KEYS, BatchError
from verl.protocol import (
    DataProto,
    DataProtoItem,
    objects,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)


def make(values=(1, 2, 3, 4, 5, 6), labels="abcdef", **meta_info):
    labels = objects(labels[: len(values)])
    return DataProto.from_dict(
        {"obs": torch.tensor(values)}, {"labels": labels}, {"info": "test", **meta_info}
    )


def content(batch):
    return batch.batch["obs"].tolist(), "".join(batch.non_tensor_batch["labels"])


# Two prompts of 2 tokens, two responses of 3 tokens.
def full_batch(**changes):
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    tensors = {
        "prompts": torch.tensor([[0, 5], [6, 7]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "responses": torch.tensor([[8, 9, 0], [8, 8, 9]]),
        "response_mask": mask,
        "input_ids": torch.zeros(2, 5, dtype=torch.int64),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        "position_ids": torch.zeros(2, 4, 5, dtype=torch.int64),
        "old_log_probs": -torch.ones(2, 3),
    } | {key: value for key, value in changes.items() if isinstance(value, torch.Tensor)}
    arrays = {"uid": objects(["a", "b"])} | {k: v for k, v in changes.items() if isinstance(v, np.ndarray)}
    return DataProto.from_dict(tensors, arrays)


def test_objects_keeps_nested_lists_whole():
    array = objects([[1, 2], [3, 4]])

    assert array.shape == (2,)
    assert array[1] == [3, 4]


def test_a_batch_is_built_from_tensors_and_objects_with_equal_rows():
    assert len(make()) == 6
    assert len(DataProto.from_dict(non_tensors={"labels": objects("abc")})) == 3
    assert len(DataProto.from_single_dict({"obs": torch.zeros(2), "labels": objects("ab")})) == 2
    assert len(DataProto()) == 0
    assert DataProto.from_dict(non_tensors={"labels": objects("abc")}).batch.batch_size == (3,)
    with pytest.raises(BatchError, match="`labels` has 2 rows, the batch 3"):
        DataProto.from_dict({"obs": torch.zeros(3)}, {"labels": objects("ab")})
    with pytest.raises(BatchError, match=r"'obs': 3, 'act': 2"):
        DataProto.from_dict({"obs": torch.zeros(3), "act": torch.zeros(2)})
    with pytest.raises(BatchError, match="`obs` must be a tensor or an array"):
        DataProto.from_single_dict({"obs": [1, 2]})


def test_errors_of_a_batch_are_value_errors_and_the_assertion_errors_that_users_of_easyr1_expect():
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind):
            make().chunk(5)
        with pytest.raises(kind):
            DataProto.from_dict({"obs": torch.zeros(3, 2)}, num_batch_dims=2)


def test_an_integer_selects_a_row_and_other_indices_a_batch():
    batch = make()

    assert isinstance(batch[0], DataProtoItem)
    assert batch[-1].batch["obs"] == 6
    assert batch[-1].non_tensor_batch["labels"] == "f"
    assert isinstance(batch[torch.tensor(2)], DataProtoItem)
    assert content(batch[1:3]) == ([2, 3], "bc")
    assert content(batch[[0, 2]]) == ([1, 3], "ac")
    assert content(batch[np.array([5, 0])]) == ([6, 1], "fa")
    assert content(batch[torch.tensor([1])]) == ([2], "b")
    assert content(batch[torch.tensor([True, False] * 3)]) == ([1, 3, 5], "ace")
    assert content(batch[[]]) == ([], "")


def test_a_slice_shares_memory_and_other_indices_do_not():
    batch = make()

    assert batch[1:3].batch["obs"].data_ptr() == batch.batch["obs"][1:].data_ptr()
    batch[[1, 2]].batch["obs"].zero_()
    assert content(batch)[0] == [1, 2, 3, 4, 5, 6]


def test_select_keeps_the_batch_and_pop_modifies_it():
    batch = DataProto.from_dict(
        {"obs": torch.ones(2), "act": torch.zeros(2)}, {"uid": objects("ab")}, {"p": 1, "q": 2}
    )

    selected = batch.select(batch_keys=["obs"], non_tensor_batch_keys=[], meta_info_keys=["p"])
    assert selected.keys() == ["obs"]
    assert selected.meta_info == {"p": 1}
    assert sorted(batch.keys()) == ["act", "obs", "uid"]
    assert selected.batch["obs"].data_ptr() == batch.batch["obs"].data_ptr()

    popped = batch.pop(batch_keys=["obs"], non_tensor_batch_keys=["uid"], meta_info_keys=["p"])
    assert sorted(popped.keys()) == ["obs", "uid"]
    assert popped.meta_info == {"p": 1}
    assert batch.keys() == ["act"]
    assert batch.meta_info == {"q": 2}

    with pytest.raises(KeyError, match="no tensor `obs`"):
        batch.select(batch_keys=["obs"])
    with pytest.raises(KeyError, match="no tensor `obs`"):
        batch.pop(batch_keys=["obs"])


def test_a_batch_without_its_last_tensor_keeps_its_length():
    batch = DataProto.from_dict({"obs": torch.zeros(3)})

    batch.pop(batch_keys=["obs"])

    assert len(batch) == 3
    assert batch.union(DataProto.from_dict({"act": torch.ones(3)})).keys() == ["act"]


def test_chunks_are_equal_and_the_last_split_may_be_shorter():
    assert [content(part) for part in make().chunk(2)] == [([1, 2, 3], "abc"), ([4, 5, 6], "def")]
    assert [content(part) for part in make().split(4)] == [([1, 2, 3, 4], "abcd"), ([5, 6], "ef")]
    with pytest.raises(BatchError, match="6 rows cannot be split into 5 equal chunks: pad it"):
        make().chunk(5)


def test_concat_undoes_chunk():
    joined = DataProto.concat(make().chunk(3))

    assert content(joined) == content(make())
    assert joined.meta_info == {"info": "test"}


def test_concat_rejects_incompatible_batches():
    with pytest.raises(BatchError, match="empty list"):
        DataProto.concat([])
    with pytest.raises(BatchError, match="batch 1 has the keys"):
        DataProto.concat([make(), DataProto.from_dict({"act": torch.zeros(1)})])
    with pytest.raises(BatchError, match="`obs` must have one shape"):
        DataProto.concat([DataProto.from_dict({"obs": torch.zeros(1, n)}) for n in (2, 3)])


def test_reorder_changes_the_batch_in_place():
    batch = make()

    batch.reorder(torch.tensor([3, 4, 2, 0, 1, 5]))

    assert content(batch) == ([4, 5, 3, 1, 2, 6], "decabf")


def test_repeat_is_interleaved_or_not():
    batch = make([1, 2])

    assert content(batch.repeat(2, interleave=True)) == ([1, 1, 2, 2], "aabb")
    assert content(batch.repeat(3, interleave=False)) == ([1, 2, 1, 2, 1, 2], "ababab")


def test_padding_repeats_rows_from_the_start_and_can_be_undone():
    batch = make([1, 2, 3])

    padded, pad_size = pad_dataproto_to_divisor(batch, 2)
    assert (content(padded), pad_size) == (([1, 2, 3, 1], "abca"), 1)
    assert content(unpad_dataproto(padded, pad_size)) == content(batch)

    padded, pad_size = pad_dataproto_to_divisor(batch, 8)
    assert (content(padded), pad_size) == (([1, 2, 3, 1, 2, 3, 1, 2], "abcabcab"), 5)

    same, pad_size = pad_dataproto_to_divisor(batch, 3)
    assert (same, pad_size) == (batch, 0)
    assert unpad_dataproto(same, 0) is batch


def test_union_modifies_the_batch_and_merge_returns_a_new_one():
    batch, other = make(), DataProto.from_dict({"act": torch.zeros(6)}, meta_info={"more": 1})

    merged = batch.merge(other)
    assert merged.keys() == ["obs", "act", "labels"]
    assert merged.meta_info == {"info": "test", "more": 1}
    assert batch.keys() == ["obs", "labels"]

    assert batch.union(other) is batch
    assert batch.keys() == ["obs", "act", "labels"]


def test_union_rejects_different_values_of_a_key_and_changes_nothing():
    batch = make()

    batch.union(make())
    for other in (
        DataProto.from_dict({"act": torch.zeros(6), "obs": torch.zeros(6)}),
        DataProto.from_dict(non_tensors={"labels": objects("abcdeX")}),
        DataProto.from_dict({"act": torch.zeros(6)}, meta_info={"info": "other"}),
    ):
        with pytest.raises(ValueError, match="has different values in the two batches"):
            batch.union(other)
    with pytest.raises(ValueError, match="6 and 2 rows"):
        batch.union(make([1, 2]))
    assert batch.keys() == ["obs", "labels"]


def test_union_compares_nested_objects_by_value():
    def media():
        return DataProto.from_dict(
            non_tensors={"media": objects([{"images": [np.arange(3), torch.ones(2)]}, None])}
        )

    assert media().union(media()).keys() == ["media"]


def test_changing_a_derived_batch_keeps_the_original():
    batch = make()
    for derived in (batch.select(), batch[:], batch.chunk(1)[0]):
        derived.union(DataProto.from_dict({"act": torch.zeros(6)}))
        derived.rename("obs", "seen")
        derived.pop(non_tensor_batch_keys=["labels"])
        derived.meta_info["step"] = 1

    assert batch.keys() == ["obs", "labels"]
    assert batch.meta_info == {"info": "test"}


def test_rename_renames_tensors():
    assert make().rename("obs", "seen").keys() == ["seen", "labels"]
    assert make().rename(["obs"], ["seen"]).keys() == ["seen", "labels"]
    with pytest.raises(KeyError, match="no tensor `nothing`"):
        make().rename("nothing", "else")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_pickling_keeps_every_dtype_and_shape(dtype):
    tensors = {
        "a": torch.ones(2, 3).to(dtype),
        "empty": torch.zeros(2, 0).to(dtype),
        "flat": torch.ones(2).to(dtype),
    }
    batch = DataProto.from_dict(tensors, {"o": objects([[1], {"x": None}])}, {"m": 1})

    for back in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert all(torch.equal(back.batch[key], value) for key, value in tensors.items())
        assert all(back.batch[key].dtype == dtype for key in tensors)
        assert back.non_tensor_batch["o"].tolist() == [[1], {"x": None}]
        assert back.meta_info == {"m": 1}


def test_a_slice_pickles_only_its_own_rows():
    batch = DataProto.from_dict({"a": torch.zeros(1000, 100)})

    assert len(pickle.dumps(batch[:10])) < 10 * 100 * 4 + 2000


def test_tensors_are_pickled_out_of_band_and_restored_writable():
    buffers = []
    data = pickle.dumps(
        DataProto.from_dict({"a": torch.zeros(1000)}), protocol=5, buffer_callback=buffers.append
    )
    assert len(data) < 2000
    assert sum(buffer.raw().nbytes for buffer in buffers) == 4000

    back = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])

    back.batch["a"].add_(1)
    assert back.batch["a"].sum() == 1000


def test_shared_objects_are_pickled_once():
    image = random.Random(0).randbytes(10_000)
    batch = DataProto.from_dict(non_tensors={"media": objects([image])}).repeat(8)

    assert len(pickle.dumps(batch)) < 15_000


def test_a_batch_round_trips_through_the_disk(tmp_path):
    rows = [
        {"text": "x", "list": [1, 2.5, None, True], "tuple": (1, b"y")},
        {
            "array": np.arange(3),
            "nested": objects([[1], "z"]),
            "tensor": torch.ones(2),
            "number": np.float32(0.5),
        },
    ]
    batch = DataProto.from_dict({"obs": torch.ones(2, 3).bfloat16()}, {"rows": objects(rows)}, {"step": 3})

    batch.save_to_disk(tmp_path / "batch.pt")
    back = DataProto.load_from_disk(tmp_path / "batch.pt")

    assert torch.equal(back.batch["obs"], batch.batch["obs"])
    assert back.meta_info == {"step": 3}
    first, second = back.non_tensor_batch["rows"]
    assert first == rows[0]
    np.testing.assert_array_equal(second["array"], np.arange(3))
    assert second["nested"].tolist() == [[1], "z"]
    assert torch.equal(second["tensor"], torch.ones(2))
    assert second["number"] == 0.5


def test_other_values_of_tables_round_trip_through_the_disk(tmp_path):
    noon = datetime(2026, 2, 3, 12, 30, 15, 250, tzinfo=timezone(timedelta(hours=-5)))
    values = [noon, noon.date(), noon.time(), timedelta(-1, 2, 3), Decimal("1.50"), b"", np.array(["a", "b"])]
    batch = DataProto.from_dict(non_tensors={"values": objects([values])})

    batch.save_to_disk(tmp_path / "batch.pt")

    *back, texts = DataProto.load_from_disk(tmp_path / "batch.pt").non_tensor_batch["values"][0]
    assert back == values[:-1] and list(map(type, back)) == list(map(type, values[:-1]))
    assert texts.tolist() == ["a", "b"]


def test_a_slice_stores_only_its_own_rows(tmp_path):
    DataProto.from_dict({"a": torch.zeros(1000, 100)})[:10].save_to_disk(tmp_path / "batch.pt")

    assert (tmp_path / "batch.pt").stat().st_size < 10_000


def test_an_unsafe_object_is_named(tmp_path):
    batch = DataProto.from_dict(non_tensors={"media": objects([None, {"images": [object()]}])})

    with pytest.raises(TypeError, match="`media`, row 1 holds a object, which cannot be stored safely"):
        batch.save_to_disk(tmp_path / "batch.pt")


def test_loading_executes_no_code_from_the_file(tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("harmed").touch, ())

    torch.save(
        {"format": "verl.DataProto.v1", "tensors": {}, "objects": {}, "meta_info": Evil()},
        tmp_path / "evil.pt",
    )
    with pytest.raises(pickle.UnpicklingError):
        DataProto.load_from_disk(tmp_path / "evil.pt")
    assert not (tmp_path / "harmed").exists()

    torch.save({"other": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="not a batch written by"):
        DataProto.load_from_disk(tmp_path / "other.pt")


def test_the_table_names_each_key_once_with_known_letters():
    letters = set("BPQRTKEZ24")

    assert all(name == row.name for name, row in BATCH_KEYS.items())
    assert all(set(dims) <= letters and dims[0] == "B" for row in BATCH_KEYS.values() for dims in row.dims)
    assert {row.kind for row in BATCH_KEYS.values()} == {"int32", "int64", "float32", "mask", "object"}


def test_a_batch_that_matches_the_table_passes_the_check():
    full_batch().check()
    full_batch(position_ids=torch.zeros(2, 5, dtype=torch.int64)).check()
    full_batch(something_else=torch.zeros(2, 7)).check()
    DataProto.from_dict(non_tensors={"uid": objects("ab")}).check()
    DataProto().check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"old_log_probs": torch.zeros(2, 4)},
            r"`old_log_probs` must have shape \(B, R\) with R = 3 from `responses`, got \(2, 4\)",
        ),
        (
            {"input_ids": torch.zeros(2, 6, dtype=torch.int64)},
            r"`input_ids` must have shape \(B, T\) with T = 5 from `prompts` and `responses`, got \(2, 6\)",
        ),
        (
            {"position_ids": torch.zeros(2, 3, 5, dtype=torch.int64)},
            r"`position_ids` must have shape \(B, T\) or \(B, 4, T\), got \(2, 3, 5\)",
        ),
        (
            {"position_ids": torch.zeros(2, dtype=torch.int64)},
            r"`position_ids` must have shape .*, got \(2,\)",
        ),
        ({"responses": torch.zeros(2, 3)}, "`responses` must be a tensor of int64, got a tensor of float32"),
        (
            {"response_mask": torch.ones(2, 3).bool()},
            "`response_mask` must be a tensor of int64, got .* bool",
        ),
        (
            {"response_mask": torch.full((2, 3), 2)},
            r"`response_mask` must hold zeros and ones only, got \[2\]",
        ),
        (
            {"old_log_probs": torch.tensor([[0.0, 0, 0], [0, float("nan"), 0]])},
            r"must be finite, .* rows \[1\]",
        ),
        ({"accuracies": torch.tensor([0.0, float("inf")])}, r"must be finite, .* rows \[1\]"),
        ({"teacher_top_log_probs": torch.full((2, 3, 4), float("nan"))}, r"must be finite, .* rows \[0, 1\]"),
        ({"advantages": objects([1, 2])}, "`advantages` must be a tensor of float32, got an array of object"),
        ({"ground_truth": torch.zeros(2)}, "`ground_truth` must be an object array, got a tensor of float32"),
    ],
)
def test_a_key_that_violates_the_table_is_an_error_with_expected_and_found(changes, message):
    with pytest.raises(BatchError, match=message):
        full_batch(**changes).check()
