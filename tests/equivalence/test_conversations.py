# SPDX-License-Identifier: Apache-2.0
"""Conversations of several turns with images in the middle: packed, shared and divided as padded rows are.

`tests/models/families/test_every_family.py` has a row of two turns for every family.
"""

import numpy as np
import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.families import load_tiny, open_tiny, random_image
from tests.helpers.family_training import (
    TEMPERATURE,
    assert_small,
    batch_of,
    load_model,
    own_results,
    training_errors,
)
from verl.distributed.sequence_parallel import SequenceParallel
from verl.workers.packing.forward import PackedForward

KINDS = ["qwen2_5_vl", "gemma3_vl", "internvl", "glm4v"]


def groups():
    rng = np.random.default_rng(3)
    wide, small, other = (random_image(rng, *size) for size in ((56, 112), (56, 56), (84, 56)))
    talk = [4, ["a part of it:\n", small], 3, ["and another:\n", other, "look"], 5]
    return [
        (["What colour?\n", wide], (6, talk, [2, ["no picture"], 3])),
        (["How many?"], (talk, 5)),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_and_shared_turns_are_the_padded_ones(kind):
    tiny, turns = load_tiny(kind), groups()
    own = own_results(tiny, turns)

    assert_small(training_errors(tiny, turns, share_prompt=False, own=own))
    assert_small(training_errors(tiny, turns, share_prompt=True, own=own))
    assert_small(training_errors(tiny, turns, share_prompt=True, parts=[[3, 0], [1, 4, 2]], own=own))


def errors_on_four_ranks(rank, world_size, folder):
    tiny, turns = open_tiny(folder), groups()
    own = own_results(tiny, turns)
    sizes = ((4, 1), (2, 2), (1, 4))
    groups_of_ranks = [SequenceParallel.build(*each) for each in sizes]
    return [
        training_errors(tiny, turns, share_prompt=shared, sp=sp, own=own)
        for sp in groups_of_ranks
        for shared in (False, True)
    ]


@pytest.mark.nightly("verl/workers", "verl/distributed")
@pytest.mark.heavy
def test_turns_divided_by_ulysses_and_ring_are_the_padded_ones():
    tiny = load_tiny("qwen2_5_vl")

    for errors in run_distributed(errors_on_four_ranks, 4, tiny.folder):
        assert_small(*errors)


def test_the_log_probs_of_observed_tokens_are_not_computed_and_have_no_gradient():
    # another head for the tokens that only observations have changes neither log-probs nor gradients
    tiny = load_tiny("qwen2_5_vl")
    batch, held = batch_of(tiny, groups())
    keys = batch.batch
    observed = (keys["attention_mask"][:, -keys["responses"].shape[1] :] - keys["loss_mask"]).bool()
    assert observed.any()
    other = batch.merge(
        {"responses": torch.where(observed, keys["responses"] + 1, keys["responses"])}, replace=["responses"]
    )
    found = []
    for rows in (batch, other):  # as inputs the tokens are the same
        model = load_model(tiny, True)
        forward = PackedForward(model, held, share_prompt=True)
        log_probs = forward.log_probs(rows, TEMPERATURE).log_probs
        log_probs.sum().backward()
        found.append(
            (log_probs.detach(), [each.grad for each in model.parameters() if each.grad is not None])
        )

    (first, gradients), (second, others) = found
    assert torch.equal(first, second) and not first[observed].any()
    assert all(torch.equal(*pair) for pair in zip(gradients, others, strict=True))
