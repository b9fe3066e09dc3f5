# SPDX-License-Identifier: Apache-2.0
"""Bytes of a model that is small enough to be counted by hand."""

from dataclasses import replace

import pytest

from verl.config.model import OptimConfig
from verl.config.schema import list_options
from verl.planning.memory_model import (
    Handling,
    Line,
    ModelShape,
    Stack,
    cache_bytes_per_token,
    chunk,
    gathered,
    gradients,
    kept,
    load,
    log_prob_pass,
    optimizer_state,
    update_pass,
    weights,
)

STACK = Stack(layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, head_dim=2, params=100)
SHAPE = ModelShape(
    params=260, stored=1040, learning=260, learning_stored=1040, root=60, learning_root=60,
    largest_stored=160, vocab=10, is_tied=True, text=STACK,
)  # fmt: skip
HOW = Handling(device="cpu", ranks=1, c=2)
LINE = Line(tokens=6, responses=4)


def test_a_layer_keeps_norms_attention_and_the_gated_product():
    assert STACK.saved(2) == 64 + 32 + 64  # 2 (4 + 2*2) * 4, 4*2*4, 4*2*8
    assert STACK.saved(4) == 96 + 64 + 128
    assert replace(STACK, has_head_norms=True).saved(2) == 160 + 6 * (4 + 2)  # queries 2*2, keys 1*2


def test_what_passes_through_a_layer_is_its_widest_step():
    assert STACK.passing(2) == 16 + 48  # states 2*2*4, then 3*2*8 of the product
    assert replace(STACK, intermediate=1).passing(2) == 16 + 40  # now 5*2*4 of attention
    assert STACK.gradients(2) == 8 + 32


def test_weights_gradients_and_optimizer_are_sharded():
    four = replace(HOW, ranks=4)

    assert (weights(SHAPE, HOW), gradients(SHAPE, HOW), optimizer_state(SHAPE, HOW)) == (1040, 1040, 2080)
    assert (weights(SHAPE, four), gradients(SHAPE, four), optimizer_state(SHAPE, four)) == (260, 260, 520)


def test_what_does_not_learn_has_neither_gradient_nor_moments():
    adapted = replace(SHAPE, learning=10, learning_stored=40)

    assert weights(adapted, HOW) == 1040
    assert (gradients(adapted, HOW), optimizer_state(adapted, HOW)) == (40, 80)


def test_weights_in_bf16_keep_a_moment_and_what_was_rounded_in_bf16_and_a_moment_in_float32():
    half = replace(SHAPE, stored=520, learning_stored=520)

    assert optimizer_state(half, replace(HOW, optimizer="adamw_bf16")) == 260 * (2 + 2 + 4)


def test_other_optimizers_keep_less():
    assert optimizer_state(SHAPE, replace(HOW, optimizer="adamw_8bit")) == 2 * 260 * 260 // 256
    assert (
        optimizer_state(SHAPE, replace(HOW, optimizer="muon")) == 1040 + 240
    )  # 60 weights outside of layers


def test_every_optimizer_is_known():
    (strategy,) = (entry for entry in list_options(OptimConfig) if entry.key == "strategy")

    assert all(optimizer_state(SHAPE, replace(HOW, optimizer=name)) for name in strategy.info.choices)


def test_gathered_weights_are_the_roots_and_one_layers_on_one_rank_and_three_of_it_on_several():
    assert gathered(SHAPE, HOW) == 2 * (60 + 100)
    assert gathered(SHAPE, replace(HOW, ranks=2)) == 2 * (120 + 300)
    assert gathered(SHAPE, replace(HOW, keeps_gathered=True)) == 2 * 260


def test_the_first_rank_reads_the_whole_model_beside_its_shard():
    assert load(SHAPE, replace(HOW, ranks=2)) == 1040 + 520
    assert load(SHAPE, HOW) == 1040 + 1040


def test_the_largest_tensor_is_there_twice_before_the_others_or_after_them():
    large = replace(SHAPE, largest_stored=800)

    assert load(large, HOW) == 1040 + 2 * 800
    assert load(replace(large, is_tied=False), HOW) == 1040 + 1040 + 800


def test_logits_are_held_by_chunks():
    assert chunk(SHAPE, HOW, LINE) == 2 * 4 * 10 + 16 * 4 * 10  # bf16 logits, four float32 tensors of them
    large = replace(SHAPE, vocab=1 << 20)
    assert chunk(large, HOW, Line(1000, 1000)) == (256 << 20) + (8 << 20)  # 128 rows at once
    assert chunk(large, replace(HOW, device="cuda"), Line(1000, 1000)) == (1 << 30) + (1 << 30)


def test_checkpointing_keeps_the_input_of_each_layer_only():
    last_norm, wanted = (4 + 2 * 2) * 4 * 6, 2 * 4 * 4
    assert kept(SHAPE, HOW, LINE) == 2 * (2 * 4) * 6 + last_norm + wanted
    assert kept(SHAPE, replace(HOW, checkpointing=False), LINE) == 2 * 160 * 6 + last_norm + wanted


def test_a_pass_without_gradients_peaks_in_a_layer_or_in_the_head():
    # Layer: 64 * 6 tokens + its weights 200 = 584. Head: states 2*4*10 + logits 720 = 800. Root: 120.
    assert log_prob_pass(SHAPE, HOW, LINE) == 120 + 800
    # 64 * 60 + 200 = 4040 beside the head's 2*4*64 + 720.
    assert log_prob_pass(SHAPE, HOW, Line(60, 4)) == 120 + 4040


def test_an_update_peaks_in_the_last_layer_where_tokens_are_many():
    # Before: root 120, kept 320. Layer: the head's gradient 80, (160 + 40) * 6 of tokens; its weights, their
    # gradient, and that of the layer before in float32: (2 + 2 + 4) * 100.
    assert update_pass(SHAPE, HOW, LINE) == 120 + 320 + 80 + 1200 + 800
    # Two ranks have the next layer's weights on their way.
    assert update_pass(SHAPE, replace(HOW, ranks=2), LINE) == 120 + 320 + 80 + 1200 + 1000


def test_an_update_peaks_in_the_head_where_its_vocabulary_is_large():
    # Before: root 2*4020, kept 320. Head: 2*4*1000 logits, 16*4*1000 beside, its gradient 2*4000, states 32.
    large = replace(SHAPE, vocab=1000, root=4020, learning_root=4020)
    assert update_pass(large, HOW, LINE) == 8040 + 320 + 8000 + 64000 + 8000 + 32
    frozen = replace(large, learning_root=0)
    assert update_pass(frozen, HOW, LINE) == 8040 + 320 + 8000 + 64000 + 32


def test_an_update_peaks_where_the_embeddings_gradient_is_summed_if_tokens_are_few():
    # Gradients of 2**20 embeddings in float32, sent and received; logits of one token are small.
    large = replace(SHAPE, root=1 << 20, learning_root=1 << 20, vocab=10, is_tied=False)
    assert update_pass(large, HOW, Line(1, 1)) == 2 * 4 * (1 << 20)
    two = replace(HOW, ranks=2)  # half of it is received, and gloo sends a copy
    assert update_pass(large, two, Line(1, 1)) == 4 * (1 << 21) + 2 * (1 << 20)
    assert update_pass(large, replace(two, device="cuda"), Line(1, 1)) == 4 * (1 << 20) + 2 * (1 << 20)


def test_a_vision_tower_counts_its_patches():
    tower = replace(STACK, hidden=8)
    seeing = replace(SHAPE, tower=tower)

    more = kept(seeing, HOW, Line(6, 4, patches=5)) - kept(SHAPE, HOW, LINE)

    assert more == 2 * (2 * 8) * 5


def test_attention_states_of_a_token_are_a_key_and_a_value_in_each_layer():
    assert cache_bytes_per_token(STACK, 2) == 2 * 2 * 1 * 2 * 2


@pytest.mark.parametrize("what", [log_prob_pass, update_pass])
def test_more_tokens_never_take_less(what):
    sizes = [what(SHAPE, HOW, Line(tokens, tokens // 2)) for tokens in range(2, 200, 7)]

    assert sizes == sorted(sizes)
