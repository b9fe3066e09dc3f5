# SPDX-License-Identifier: Apache-2.0
"""Layers with a state that run whole rows: which ones they are, the rows they get, and over several ranks."""

import pytest
import torch

from tests.equivalence.test_packed_forward import as_batch, text_rows
from tests.equivalence.test_shared_prompts import text_batch
from tests.helpers.causal_families import FAMILIES, build_family
from tests.helpers.distributed import run_distributed
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.linear_attention.layers import row_layers
from verl.models.linear_attention.recurrence import Recurrence, group_segments
from verl.models.registry import check_sequence_parallel, prepare_model
from verl.workers.packing.forward import PackedForward

SOME = ["minimax", "falcon_h1", "lfm2", "nemotron_h"]


def test_rows_are_padded_behind_their_end_and_prompts_copied():
    # A prompt of two tokens with responses of three and one, and a row of five.
    rows = Recurrence(group_segments([(2, (3, 1)), (5, ())])).whole_rows

    assert [batch.tolist() for batch in rows.batches] == [
        [[0, 1, 5]],
        [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10]],
    ]
    assert rows.order.tolist() == [0, 1, 5, 6, 7, 2, 8, 9, 10, 11, 12]


def test_less_than_half_of_the_rows_is_padding():
    lengths = [1, 2, 3, 17, 100, 101, 5, 0, 30]
    batches = Recurrence(group_segments((length, ()) for length in lengths)).whole_rows.batches

    padding = sum((batch == sum(lengths)).sum().item() for batch in batches)
    assert padding < sum(lengths) / 2


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("minimax", "MiniMaxLightningAttention"), ("falcon_h1", "FalconH1Mixer"), ("lfm2", "Lfm2ShortConv")],
)
def test_only_layers_with_a_state_run_whole_rows(model_type, kind):
    model = build_family(model_type, FAMILIES[model_type])

    assert {type(layer).__name__ for layer in row_layers(model)} == {kind}


def test_models_without_a_state_are_left_alone():
    assert not list(row_layers(build_family("llama", {})))
    # Delta rules have code of their own.
    assert not list(row_layers(build_family("qwen3_next", FAMILIES["qwen3_next"])))


@pytest.mark.parametrize("model_type", SOME)
def test_a_state_that_leaks_over_the_start_of_a_row_would_be_seen(model_type, monkeypatch):
    batch = as_batch(text_rows(((8, 5), (9, 7))), prompt=24)
    model = build_family(model_type, FAMILIES[model_type])
    prepare_model(model)
    right = PackedForward(model).log_probs(batch, 1.0).log_probs

    one_row = Recurrence(group_segments([(int(batch.batch["attention_mask"].sum()), ())]))
    monkeypatch.setattr("verl.models.attention.layouts.PackedLayout.recurrence", one_row)
    wrong = PackedForward(model).log_probs(batch, 1.0).log_probs

    torch.testing.assert_close(wrong[:1], right[:1], atol=1e-5, rtol=0)
    assert (wrong[1:] - right[1:]).abs().max() > 1e-4


def test_a_ring_is_refused():
    config = build_family("lfm2", FAMILIES["lfm2"]).config

    with pytest.raises(ValueError, match=r"`ring_size` .2. must be 1 for lfm2.*carry a state"):
        check_sequence_parallel(config, SequenceParallel(1, 2))


def errors_on_this_rank(rank, world_size):
    sp = SequenceParallel.build(world_size, 1)
    batch = text_batch().select(non_tensor_batch_keys=["uid"])
    weights = torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))
    errors = {}
    for model_type in SOME[:3]:
        for share in (False, True):
            whole, sharded = (build_family(model_type, FAMILIES[model_type]) for _ in range(2))
            for model in (whole, sharded):
                prepare_model(model)
            expected = PackedForward(whole, share_prompt=share).log_probs(batch, 1.0).log_probs
            found = PackedForward(sharded, share_prompt=share, sp=sp).log_probs(batch, 1.0)
            (expected * weights).sum().backward()
            (found.log_probs * weights).sum().backward()
            error = (found.log_probs - expected).abs().max().item()
            for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
                grad = torch.zeros_like(ours) if ours.grad is None else ours.grad
                torch.distributed.all_reduce(grad)
                exact = torch.zeros_like(ours) if theirs.grad is None else theirs.grad
                error = max(error, (grad - exact).abs().max().item() / max(1.0, exact.abs().max().item()))
            errors[model_type, share] = error
    return errors


def test_layers_with_a_state_over_two_processes_equal_those_in_one():
    for errors in run_distributed(errors_on_this_rank, 2):
        assert max(errors.values()) <= 1e-5, errors
