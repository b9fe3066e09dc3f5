# SPDX-License-Identifier: Apache-2.0
"""Linear attention layers on two ranks, with FSDP and with Ulysses, against one process, in float32."""

import itertools

import pytest
import torch
from transformers import AutoConfig

from tests.equivalence.test_packed_forward import as_batch, load, reference, text_rows
from tests.equivalence.test_packed_forward_fsdp import sharded
from tests.equivalence.test_sequence_parallel import assert_small, relative_difference, run_cases
from tests.equivalence.test_shared_prompts import text_batch
from tests.helpers.distributed import run_distributed
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.registry import check_model, check_sequence_parallel
from verl.models.tiny import save_tiny_model
from verl.workers.packing.forward import PackedForward

pytestmark = [pytest.mark.heavy, pytest.mark.nightly("verl/workers/packing", "verl/distributed")]

FAMILIES = ["qwen3_next", "qwen3_5_text"]
CASES = [(family, *rest) for family, *rest in itertools.product(FAMILIES, (False, True), (False, True))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: str(save_tiny_model(root / family, family)) for family in FAMILIES}


def on_fsdp_ranks(rank, world_size, folder):
    """Errors of log-probs and gradients when each rank has rows of its own, packed and shared."""
    errors = []
    parts = {False: [[[0, 3], [1]], [[2], []]], True: [[[0, 1, 4], [2]], [[3, 5, 6, 7], []]]}
    for shared, batch in ((False, as_batch(text_rows())), (True, text_batch())):
        plain, model = load(folder, False), sharded(folder)
        weights = torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))
        expected, _ = reference(plain, batch, 0.8)
        (expected * weights).sum().backward()
        forward = PackedForward(model, share_prompt=shared)
        difference = 0.0
        for rows in parts[shared][rank]:
            found = forward.log_probs(batch[rows], 0.8).log_probs
            difference = max(difference, (found - expected[rows]).abs().max().item() if rows else 0.0)
            ((found * weights[rows]).sum() * world_size).backward()
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.full_tensor() / world_size
        errors.append((shared, difference, relative_difference(model, plain)))
    return errors, check_model(sharded(folder))


def on_two_ranks(rank, world_size, folders):
    return {
        "ulysses": run_cases(rank, world_size, [(2, 1)], CASES, folders),
        "fsdp": {family: on_fsdp_ranks(rank, world_size, folder) for family, folder in folders.items()},
    }


@pytest.fixture(scope="module")
def two_ranks(folders):
    return run_distributed(on_two_ranks, 2, folders)


def test_ulysses_ranks_equal_one_packed_and_shared_checkpointed_or_not(two_ranks):
    for found in two_ranks:
        assert len(found["ulysses"]) == len(CASES)
        assert_small(found["ulysses"])


def test_fsdp_ranks_sum_to_one_process_packed_and_shared(two_ranks):
    for found in two_ranks:
        for errors, checked in found["fsdp"].values():
            assert_small(errors)
            assert checked < 1e-5


@pytest.mark.parametrize(
    ("sp", "message"),
    [
        (SequenceParallel(ulysses_size=3), "4 attention heads"),
        (SequenceParallel(ring_size=2), r"`ring_size` \(2\) must be 1 for qwen3_5_text.* use `ulysses_size`"),
    ],
)
def test_divisions_that_linear_layers_cannot_follow_are_refused(folders, sp, message):
    config = AutoConfig.from_pretrained(folders["qwen3_5_text"])

    with pytest.raises(ValueError, match=message):
        check_sequence_parallel(config, sp)


def test_ulysses_must_divide_the_heads_of_linear_layers(folders):
    config = AutoConfig.from_pretrained(folders["qwen3_5_text"])
    config.linear_num_value_heads = 6

    with pytest.raises(ValueError, match="must divide the 6 heads of the linear attention layers of"):
        check_sequence_parallel(config, SequenceParallel(ulysses_size=4))
