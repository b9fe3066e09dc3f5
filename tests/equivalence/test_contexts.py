# SPDX-License-Identifier: Apache-2.0
"""Rows of several contexts, which an agent's calls make: each context is computed as if it were alone."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.distributed import run_distributed
from tests.helpers.families import expanded, load_tiny, media_shape_of, open_tiny, random_image
from tests.helpers.family_training import (
    TEMPERATURE,
    HeldMedia,
    Row,
    as_batch,
    assert_small,
    load_model,
    own_forward,
    relative_difference,
    response_of,
)
from verl.distributed.sequence_parallel import SequenceParallel
from verl.protocol import DataProto, objects
from verl.workers.packing.forward import PackedForward


class Context(NamedTuple):
    """The tokens and media of a context."""

    prompt: Tensor
    response: Tensor
    is_sampled: Tensor
    positions: Tensor
    parts: list  # of the prompt
    observed: list


def conversations():
    """Two prompts with two rows each: contexts of prompt and steps."""
    rng = np.random.default_rng(5)
    wide, small, other = (random_image(rng, *size) for size in ((56, 112), (56, 56), (84, 56)))
    first, second = ["What colour?\n", wide], ["How many?"]
    return [
        [(first, [3, ["look:\n", small], 2]), (["shorter, ", other], [4]), (["again"], [2, ["so"], 1])],
        [(first, [5])],
        [(second, [2]), (["How many?"], [3])],  # a call that was repeated
        [(second, [4, ["more"], 1])],
    ]


def contexts_of(tiny, conversation, generator):
    found = []
    for parts, steps in conversation:
        prompt = expanded(tiny, parts)
        tokens, is_sampled = response_of(tiny, steps, generator)
        observed = [part for step in steps if not isinstance(step, int) for part in step]
        whole = torch.cat([prompt, tokens])
        positions = tiny.family.positions(tiny.config, whole, media_shape_of(tiny, [*parts, *observed]))
        positions = torch.arange(len(whole)) if positions is None else positions
        found.append(Context(prompt, tokens, is_sampled, positions, parts, observed))
    return found


def alone(contexts, held):
    """A row for each context."""
    rows = [
        Row(
            number,
            one.prompt,
            one.response,
            one.positions,
            one.is_sampled,
            (held.hold(one.parts), held.hold(one.observed)),
        )
        for number, one in enumerate(contexts)
    ]
    return as_batch(rows)


def joined(conversations, held):
    """A row for each conversation: further contexts follow in its response, their prompts not sampled."""
    rows, starts = [], []
    for number, (first, *others) in enumerate(conversations):
        tokens, is_sampled, positions = [first.response], [first.is_sampled], [first.positions]
        begins, media = [], list(first.observed)
        for one in others:
            begins.append(sum(map(len, tokens)))
            tokens += [one.prompt, one.response]
            is_sampled += [torch.zeros_like(one.prompt), one.is_sampled]
            positions.append(one.positions)
            media += [*one.parts, *one.observed]
        row = Row(
            number // 2, first.prompt, torch.cat(tokens), torch.cat(positions, -1), torch.cat(is_sampled),
            (held.hold(first.parts), held.hold(media)),
        )  # fmt: skip
        rows.append(row)
        starts.append(tuple(begins))
    batch = as_batch(rows)
    first_media = {
        uid: batch.non_tensor_batch["multi_modal_data"][row]
        for row, uid in reversed(list(enumerate(batch.non_tensor_batch["uid"])))
    }
    shared = objects([first_media[uid] for uid in batch.non_tensor_batch["uid"]])
    return batch.merge(
        {"context_starts": objects(starts), "multi_modal_data": shared}, replace=["multi_modal_data"]
    )


def loss(log_probs: Tensor, entropy: Tensor, weights: Tensor) -> Tensor:
    return (log_probs * weights + 0.1 * entropy * weights.abs()).sum()


def in_rows(values: Tensor, batch: DataProto, other: DataProto) -> Tensor:
    """Put values of the loss tokens of one batch in the places of another's, in the same order."""
    result = torch.zeros(other.batch["loss_mask"].shape)
    result[other.batch["loss_mask"].bool()] = values[batch.batch["loss_mask"].bool()]
    return result


def errors(tiny, *, share_prompt, sp=None, parts=None):
    generator, held = torch.Generator().manual_seed(0), HeldMedia(tiny)
    found = [contexts_of(tiny, conversation, generator) for conversation in conversations()]
    single = alone([one for contexts in found for one in contexts], held)
    batch = joined(found, held)
    plain, packed = load_model(tiny, False), load_model(tiny, True)
    weights = torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))
    expected = [in_rows(each, single, batch) for each in own_forward(tiny, plain, single, held)]
    loss(*expected, weights).backward()
    forward = PackedForward(packed, held, share_prompt=share_prompt, sp=sp)
    error = 0.0
    for rows in parts or [list(range(len(batch)))]:
        result = forward.log_probs(batch[rows], TEMPERATURE, with_entropy=True)
        loss(result.log_probs, result.entropy, weights[rows]).backward()
        pairs = zip((result.log_probs, result.entropy), expected, strict=True)
        error = max([error, *((own - other[rows]).abs().max().item() for own, other in pairs)])
    return error, relative_difference(packed, plain, summed=sp is not None)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3_vl", "internvl", "qwen3_5"])
def test_each_context_of_a_row_is_computed_as_if_it_were_alone(kind):
    tiny = load_tiny(kind)

    for share_prompt in (False, True):
        assert_small(errors(tiny, share_prompt=share_prompt))
        assert_small(errors(tiny, share_prompt=share_prompt, parts=[[2, 0], [1, 3]]))


def test_contexts_that_are_not_divided_are_found_out():
    tiny = load_tiny("qwen2_5_vl")
    generator, held = torch.Generator().manual_seed(0), HeldMedia(tiny)
    found = [contexts_of(tiny, conversation, generator) for conversation in conversations()]
    batch = joined(found, held)
    whole = batch.merge({"context_starts": objects([()] * len(batch))}, replace=["context_starts"])
    model = load_model(tiny, True)
    forward = PackedForward(model, held)

    divided, joint = (forward.log_probs(each, TEMPERATURE).log_probs.detach() for each in (batch, whole))

    assert (divided - joint)[[0, 2]].abs().amax(-1).min() > 1e-3
    assert torch.allclose(divided[[1, 3]], joint[[1, 3]], atol=1e-6)


def errors_on_four_ranks(rank, world_size, folder):
    tiny = open_tiny(folder)
    groups = [SequenceParallel.build(*each) for each in ((4, 1), (2, 2), (1, 4))]
    return [errors(tiny, share_prompt=shared, sp=sp) for sp in groups for shared in (False, True)]


@pytest.mark.slow  # four processes; test_conversations.py divides turns in every suite
@pytest.mark.heavy
def test_contexts_are_divided_by_ulysses_and_ring():
    tiny = load_tiny("qwen2_5_vl")

    for found in run_distributed(errors_on_four_ranks, 4, tiny.folder):
        assert_small(*found)
