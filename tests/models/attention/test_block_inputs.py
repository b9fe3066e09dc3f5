# SPDX-License-Identifier: Apache-2.0
"""Models whose attention does not get the layout, or scales queries by their index in the sequence."""

import pytest
import torch

from tests.equivalence.test_packed_forward import as_batch, reference, text_rows
from tests.models.test_registry import build
from verl.models.attention.interface import running_block
from verl.models.registry import prepare_model
from verl.workers.packing.forward import PackedForward

# Llama 4 without a window, whose second layer has no rotary positions; temperatures change every 3 tokens.
LLAMA4 = {
    "num_local_experts": 2, "intermediate_size_mlp": 32, "no_rope_layers": [1, 0], "floor_scale": 3,
    "attn_scale": 0.5, "attention_chunk_size": 64,
}  # fmt: skip


def unpadded_batch():
    """Rows without padding on the left, where an index is a position in the model's own forward too."""
    return as_batch(text_rows(((8, 5), (8, 9), (8, 2)), vocabulary=128), prompt=8, response=9)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("model_type", "overrides"), [("stablelm", {}), ("llama4_text", LLAMA4)])
def test_attention_finds_its_layout_and_positions(model_type, overrides, checkpointed):
    batch = unpadded_batch()
    plain, packed = build(model_type, **overrides).eval(), build(model_type, **overrides)
    prepare_model(packed)
    if checkpointed:
        packed.gradient_checkpointing_enable({"use_reentrant": False})
        packed.train()

    expected = reference(plain, batch, 1.0)[0]
    expected.sum().backward()
    ours = PackedForward(packed).log_probs(batch, 1.0).log_probs
    ours.sum().backward()

    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    for (name, left), right in zip(packed.named_parameters(), plain.parameters(), strict=True):
        if right.grad is not None and right.grad.any():
            assert (left.grad - right.grad).norm() <= 1e-5 * right.grad.norm() + 1e-7, name
    assert running_block() is None


def test_temperatures_at_the_index_in_the_packed_sequence_would_be_wrong(monkeypatch):
    batch = unpadded_batch()
    model = build("llama4_text", **LLAMA4)
    prepare_model(model)
    right = PackedForward(model).log_probs(batch, 1.0).log_probs

    monkeypatch.setattr("verl.models.attention.interface.at_positions", lambda query, module: query)
    wrong = PackedForward(model).log_probs(batch, 1.0).log_probs

    torch.testing.assert_close(wrong[:1], right[:1])  # the first row, where both are the same
    assert (wrong[1:] - right[1:]).abs().max() > 1e-3


def test_a_block_that_fails_leaves_nothing_behind():
    model = build("llama")
    prepare_model(model)
    model.model.layers[1].mlp.forward = lambda hidden: 1 / 0

    with pytest.raises(ZeroDivisionError):
        PackedForward(model).log_probs(unpadded_batch(), 1.0)

    assert running_block() is None
