# SPDX-License-Identifier: Apache-2.0
"""Bytes of a model that is small enough to be counted by hand."""

from dataclasses import replace

import pytest

from verl.config.model import OptimConfig
from verl.config.schema import list_options
from verl.models import tiled_mlp
from verl.models.head import logit_chunks
from verl.planning import memory_model
from verl.planning.layer_sizes import TILE, Latent, LayerCache, Stack
from verl.planning.memory_model import (
    MicroBatch,
    ModelSetup,
    ModelShape,
    gathered,
    gradients,
    log_prob_peak,
    logit_chunk,
    optimizer_state,
    padded,
    reading,
    saved_activations,
    update_peak,
    weights,
)

STACK = Stack(layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, head_dim=2, params=100)
SHAPE = ModelShape(
    params=260, stored=1040, trained=260, trained_stored=1040, root=60, trained_root=60,
    largest_stored=160, vocab=10, is_tied=True, text=STACK,
)  # fmt: skip
SETUP = ModelSetup(device="cpu", ranks=1, c=2)
BATCH = MicroBatch(tokens=6, responses=4)


def test_a_layer_keeps_norms_attention_and_the_gated_product():
    assert STACK.saved(2) == 64 + 32 + 64  # 2 (4 + 2*2) * 4, 4*2*4, 4*2*8
    assert STACK.saved(4) == 96 + 64 + 128
    assert replace(STACK, has_head_norms=True).saved(2) == 160 + 6 * (4 + 2)  # queries 2*2, keys 1*2


def test_a_layer_that_saves_nothing_takes_its_widest_operation():
    assert STACK.transient(2, tokens=6) == (16 + 48) * 6  # states 2*2*4, then 3*2*8 of the product
    assert replace(STACK, intermediate=1).transient(2, tokens=6) == (16 + 40) * 6  # now 5*2*4 of attention
    assert STACK.backward(2, tokens=6, recomputes=False) == (8 + 32) * 6
    assert STACK.backward(2, tokens=6, recomputes=True) == (160 + 8 + 32) * 6


def test_an_mlp_in_tiles_takes_the_product_of_one_tile():
    tiled, tokens = replace(STACK, is_tiled=True), 3 * TILE

    assert tiled.transient(2, TILE) == STACK.transient(2, TILE)
    assert tiled.transient(2, tokens) == (16 + 40) * tokens  # of attention
    wide = replace(tiled, intermediate=64)
    assert wide.transient(2, tokens) == 16 * tokens + 3 * 2 * 64 * TILE + 2 * 2 * 4 * tokens
    saved = 64 + 32 + 8  # without the product
    assert wide.backward(2, tokens, recomputes=True) == saved * tokens + 6 * 2 * 64 * TILE + 2 * 4 * tokens


def test_weights_gradients_and_optimizer_are_sharded():
    four = replace(SETUP, ranks=4)

    assert (weights(SHAPE, SETUP), gradients(SHAPE, SETUP), optimizer_state(SHAPE, SETUP)) == (
        1040,
        1040,
        2080,
    )
    assert (weights(SHAPE, four), gradients(SHAPE, four), optimizer_state(SHAPE, four)) == (260, 260, 520)


def test_gradients_that_wait_for_a_sum_over_copies_have_the_type_of_the_sum():
    half = replace(SHAPE, stored=520, trained_stored=520)

    assert [gradients(half, replace(SETUP, reduces_once=waits)) for waits in (False, True)] == [520, 1040]


def test_frozen_weights_have_neither_gradient_nor_moments():
    adapted = replace(SHAPE, trained=10, trained_stored=40)

    assert weights(adapted, SETUP) == 1040
    assert (gradients(adapted, SETUP), optimizer_state(adapted, SETUP)) == (40, 80)


def test_adamw_bf16_keeps_a_moment_and_the_rounding_error_in_bf16_and_a_moment_in_float32():
    half = replace(SHAPE, stored=520, trained_stored=520)

    assert optimizer_state(half, replace(SETUP, optimizer="adamw_bf16")) == 260 * (2 + 2 + 4)


def test_other_optimizers_keep_less():
    assert optimizer_state(SHAPE, replace(SETUP, optimizer="adamw_8bit")) == 2 * 260 * 260 // 256
    assert (
        optimizer_state(SHAPE, replace(SETUP, optimizer="muon")) == 1040 + 240
    )  # 60 weights outside of layers


def test_the_plan_knows_the_sizes_of_chunks_and_tiles():
    chunks = {False: logit_chunks.CHUNK_BYTES, True: logit_chunks.CHUNK_BYTES_CUDA}

    assert chunks == memory_model.CHUNK_BYTES
    assert (logit_chunks.PRODUCT_ROWS, tiled_mlp.TILE) == (memory_model.PRODUCT_ROWS, TILE)


def test_every_optimizer_is_known():
    (strategy,) = (entry for entry in list_options(OptimConfig) if entry.key == "strategy")

    assert all(optimizer_state(SHAPE, replace(SETUP, optimizer=name)) for name in strategy.info.choices)


def test_gathered_weights_are_the_root_and_one_copy_of_a_layer_or_three_on_several_ranks():
    assert gathered(SHAPE, SETUP) == 2 * (60 + 100)
    assert gathered(SHAPE, replace(SETUP, ranks=2)) == 2 * (120 + 300)
    assert gathered(SHAPE, replace(SETUP, keeps_gathered=True)) == 2 * 260


def test_a_rank_gathers_only_its_own_part_of_divided_experts():
    mixture = replace(SHAPE, text=replace(STACK, experts=80, choices=2), experts=160, trained_experts=160)
    divided = replace(SETUP, ranks=8, expert_ranks=4)

    assert mixture.text.held(4) == 20 + 80 // 4
    assert gathered(mixture, divided) == 2 * (120 + 3 * 40)
    assert gathered(mixture, replace(divided, keeps_gathered=True)) == 2 * (260 - 120) + 2 * 2 * 40
    assert (weights(mixture, divided), divided.expert_shards) == (1040 // 8, 2)


def test_states_arrive_at_divided_experts_once_for_each_choice():
    mixture = replace(SHAPE, text=replace(STACK, experts=80, choices=2), experts=160, trained_experts=160)
    few, many = replace(SETUP, ranks=4), replace(SETUP, ranks=4, expert_ranks=4)

    # Gathered weights are 60 less, three times, in two bytes; 60 tokens arrive with two choices of 2*4 bytes.
    assert (
        log_prob_peak(mixture, many, MicroBatch(60, 4)) - log_prob_peak(mixture, few, MicroBatch(60, 4))
        == 60 * 2 * 2 * 4 - 3 * 2 * 60
    )


def test_the_first_rank_reads_blocks_of_a_weight():
    assert reading(replace(SHAPE, largest_stored=800)) == 2 * 800
    assert reading(replace(SHAPE, largest_stored=1 << 30)) == 2 * (1 << 26)


def test_the_first_rank_reads_at_least_an_expert():
    mixture = replace(SHAPE, largest_stored=1 << 31, largest_row=1 << 20)

    assert reading(mixture) == 2 * (1 << 26)
    assert reading(replace(mixture, largest_row=1 << 27)) == 2 * (1 << 27)  # its parts, and joined


def test_latent_attention_saves_what_keys_and_values_are_parts_of():
    # Two heads of 6 for queries and keys, 2 of which all heads share, and 4 for values.
    latent = replace(STACK, head_dim=6, latent=Latent(queries=3, keys=5, rotary=2, value_dim=4))

    # Queries and keys 2*12, parts of 4 and 4 numbers, output 8; norms of 4 + 4 in two types, and of 3 + 5.
    assert latent.saved_by_attention(2) == 2 * (2 * 12 + 2 * 8 + 8) + 8 * (2 * 4 + 3 + 5)
    assert latent.saved(2) == latent.saved_by_attention(2) + 4 * 2 * 8
    # Sums in float32 of 6, 6 and 4, and wide gradients and tensors, six of 6, in two bytes.
    assert latent.latent_backward(2, 10) == 10 * 2 * (4 * 16 + 2 * 36)
    assert STACK.latent_backward(2, 10) == 0


def test_the_first_ranks_hold_more_experts_where_these_do_not_divide():
    mixture = replace(
        SHAPE, text=replace(STACK, experts=60), experts=120, trained_experts=120, divisible_experts=6
    )

    # Six experts on 4 ranks are two on each of the first three: eight places, a third more than there are.
    assert weights(mixture, replace(SETUP, ranks=4)) == (SHAPE.stored + 4 * 40) // 4
    assert weights(mixture, replace(SETUP, ranks=6)) == SHAPE.stored // 6
    # Two parts of three experts each over two ranks.
    assert padded(mixture, replace(SETUP, ranks=4, expert_ranks=2)).text.experts == 80


def test_logits_are_computed_in_chunks():
    assert (
        logit_chunk(SHAPE, SETUP, BATCH) == 2 * 4 * 10 + 16 * 4 * 10
    )  # bf16 logits, four float32 tensors of them
    large = replace(SHAPE, vocab=1 << 20)
    assert logit_chunk(large, SETUP, MicroBatch(1000, 1000)) == (256 << 20) + (8 << 20)  # 128 rows at once
    # On a GPU kernels read the logits and overwrite them with gradients.
    assert logit_chunk(large, replace(SETUP, device="cuda"), MicroBatch(1000, 1000)) == 1 << 30


def test_checkpointing_saves_only_the_input_of_each_layer():
    assert saved_activations(SHAPE, SETUP, BATCH) == 2 * (2 * 4) * 6
    assert saved_activations(SHAPE, replace(SETUP, checkpointing=False), BATCH) == 2 * 160 * 6


def test_a_pass_without_gradients_peaks_in_a_layer_or_in_the_head():
    # Layer: 64 * 6 tokens + its weights 200 = 584. Head: states 2*4*10 + logits 720 = 800. Root: 120.
    assert log_prob_peak(SHAPE, SETUP, BATCH) == 120 + 800
    # 64 * 60 + 200 = 4040, more than the head's 2*4*64 + 720.
    assert log_prob_peak(SHAPE, SETUP, MicroBatch(60, 4)) == 120 + 4040


def test_an_update_peaks_in_the_last_layer_where_tokens_are_many():
    # Before: root 120, saved 96. Layer: the head's gradient 80, (160 + 40) * 6 of tokens; its weights, their
    # gradient, and that of the previous layer in float32: (2 + 2 + 4) * 100.
    assert update_peak(SHAPE, SETUP, BATCH) == 120 + 96 + 80 + 1200 + 800
    # On two ranks the next layer's weights arrive at the same time.
    assert update_peak(SHAPE, replace(SETUP, ranks=2), BATCH) == 120 + 96 + 80 + 1200 + 1000


def test_an_update_peaks_in_the_head_where_its_vocabulary_is_large():
    # Before: root 2*4020, saved 96, last norm (4 + 2*2)*4*6, states 2*4*4. Head: 2*4*1000 logits, 16*4*1000
    # of softmax, gradient 2*4000, states 32.
    large = replace(SHAPE, vocab=1000, root=4020, trained_root=4020)
    assert update_peak(large, SETUP, BATCH) == 8040 + 320 + 8000 + 64000 + 8000 + 32
    frozen = replace(large, trained_root=0)
    assert update_peak(frozen, SETUP, BATCH) == 8040 + 320 + 8000 + 64000 + 32


def test_an_update_peaks_where_the_embeddings_gradient_is_summed_if_tokens_are_few():
    # Gradients of 2**20 embeddings in float32, sent and received; logits of one token are small.
    large = replace(SHAPE, root=1 << 20, trained_root=1 << 20, vocab=10, is_tied=False)
    assert update_peak(large, SETUP, MicroBatch(1, 1)) == 2 * 4 * (1 << 20)
    two = replace(SETUP, ranks=2)  # half of it is received, and gloo sends a copy
    assert update_peak(large, two, MicroBatch(1, 1)) == 4 * (1 << 21) + 2 * (1 << 20)
    assert update_peak(large, replace(two, device="cuda"), MicroBatch(1, 1)) == 4 * (1 << 20) + 2 * (1 << 20)


def test_an_update_peaks_where_the_first_layer_begins_if_few_weights_are_trained():
    # Two ranks hold root and layer as received and as read, and the states of a token: 2*4.
    adapted = replace(SHAPE, root=1 << 20, trained_root=0, trained=10, trained_stored=40)
    assert update_peak(adapted, replace(SETUP, ranks=2), MicroBatch(1, 1)) == 2 * 2 * ((1 << 20) + 100) + 8
    assert update_peak(adapted, SETUP, MicroBatch(1, 1)) < 2 * 2 * (1 << 20)


def test_a_vision_tower_saves_activations_of_its_patches():
    tower = replace(STACK, hidden=8)
    seeing = replace(SHAPE, tower=tower)

    more = saved_activations(seeing, SETUP, MicroBatch(6, 4, patches=5)) - saved_activations(
        SHAPE, SETUP, BATCH
    )

    assert more == 2 * (2 * 8) * 5


def test_a_layers_cache_depends_on_its_kind_and_ranks_divide_heads_but_no_latent():
    full, window, latent = LayerCache(32, heads=2), LayerCache(32, heads=2, window=5), LayerCache(24)
    linear = LayerCache(0, heads=4, state=100, float32_state=50)
    stack = replace(STACK, caches=(full, window, latent, linear))

    state = 2 * 100 + 4 * 50
    assert stack.cached(2, 3) == 2 * 3 * (32 + 32 + 24) + state
    assert stack.cached(2, 9) == 2 * (9 * 32 + 5 * 32 + 9 * 24) + state
    assert stack.cached(2, 9, ranks=2) == (9 * 32 + 5 * 32) + 2 * 9 * 24 + state / 2
    assert stack.cached(2, 9, ranks=4) == (9 * 32 + 5 * 32) + 2 * 9 * 24 + state / 4  # heads are repeated
    assert STACK.keys_and_values == 2 * 2 * 1 * 2


@pytest.mark.parametrize("peak", [log_prob_peak, update_peak])
def test_more_tokens_never_take_less(peak):
    sizes = [peak(SHAPE, SETUP, MicroBatch(tokens, tokens // 2)) for tokens in range(2, 200, 7)]

    assert sizes == sorted(sizes)


def test_a_part_of_divided_layers_is_a_smaller_model_with_whole_states():
    part = SHAPE.part(2)

    assert (part.params, part.stored, part.trained, part.root, part.vocab) == (130, 520, 130, 30, 5)
    assert (part.text.params, part.text.intermediate, part.text.heads) == (50, 4, 1)
    assert part.text.saved(2) == 64 + 16 + 32  # norms as before, half of the heads and of the product
    assert weights(part, replace(SETUP, ranks=2)) == weights(SHAPE, replace(SETUP, ranks=4)) == 260
    assert SHAPE.part(1) is SHAPE
