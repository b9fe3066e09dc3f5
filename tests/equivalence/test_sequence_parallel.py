# SPDX-License-Identifier: Apache-2.0
"""Packed sequences sharded over ranks against the model's own padded forward in one process, in float32."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from tests.equivalence.test_packed_forward import CLIP, IMAGE, WIDE, Features, load, reference
from tests.equivalence.test_packed_forward_fsdp import sharded
from tests.equivalence.test_scalar_forward import load_scalar
from tests.equivalence.test_shared_prompts import media_batch, text_batch
from tests.helpers.distributed import run_distributed
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.flops import FlopsCounter
from verl.models.registry import check_sequence_parallel
from verl.models.tiny import save_tiny_model
from verl.workers.packing.forward import PackedForward

pytestmark = pytest.mark.heavy

CONTENTS = {
    "text": ("qwen2", None),
    "image": ("qwen2_5_vl", [((WIDE, IMAGE), (5, 8, 3)), ((IMAGE,), (4, 1))]),
    "clip": ("qwen2_5_vl", [((CLIP,), (5, 2))]),
    "video": ("qwen3_vl", [((CLIP,), (5, 2))]),
    "mixed": ("qwen3_vl", [((IMAGE, CLIP), (3, 7)), ((), (2,)), ((WIDE,), (6,))]),
}
# Whose layers a ring cannot divide: see `test_hybrid_sharded`.
LINEAR = {family: (family, None) for family in ("qwen3_next", "qwen3_5_text")}
FAMILIES = sorted({family for family, _ in CONTENTS.values()})
CASES = [  # content, shared, checkpointed: each two of them in every combination
    (content, shared, shared == bool(index % 2))
    for index, content in enumerate(CONTENTS)
    for shared in (False, True)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: str(save_tiny_model(root / family, family)) for family in FAMILIES}


def batch_for(content, folders):
    family, groups = (CONTENTS | LINEAR)[content]
    return text_batch() if groups is None else media_batch(folders[family], groups)


def relative_difference(ours, theirs):
    """Relative error of all gradients; `ours` is summed over the sequence-parallel ranks."""
    gradients = dict(ours.named_parameters())
    difference = size = 0.0
    for name, parameter in theirs.named_parameters():
        own = gradients[name].grad
        total = torch.zeros_like(parameter) if own is None else own.clone()
        dist.all_reduce(total)
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        difference += (total - expected).double().square().sum().item()
        size += expected.double().square().sum().item()
    return (difference / size) ** 0.5


def errors_of_case(case, folders, sp):
    """The largest difference of a log-prob or entropy, and the relative one of all gradients."""
    content, shared, checkpointed = case
    folder, batch = folders[(CONTENTS | LINEAR)[content][0]], batch_for(content, folders)
    plain, packed = load(folder, False), load(folder, True)
    if checkpointed:
        packed.gradient_checkpointing_enable({"use_reentrant": False})
        packed.train()
    forward = PackedForward(packed, Features(), share_prompt=shared, sp=sp)
    weights = torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))
    expected = reference(plain, batch, 0.8)
    (expected[0] * weights + 0.1 * expected[1]).sum().backward()

    result = forward.log_probs(batch, 0.8, with_entropy=True)
    assert result.entropy is not None
    (result.log_probs * weights + 0.1 * result.entropy).sum().backward()

    error = max(
        (a - b).abs().max().item() for a, b in zip((result.log_probs, result.entropy), expected, strict=True)
    )
    return error, relative_difference(packed, plain)


def run_cases(rank, world_size, sizes, cases, folders):
    found = []
    for ulysses, ring in sizes:
        sp = SequenceParallel.build(ulysses, ring)
        found += [(ulysses, ring, *case, *errors_of_case(case, folders, sp)) for case in cases]
    return found


def everything_read(world_size, folders):
    """Results of two sequence-parallel ranks and of one rank: a group, a short row, and no row."""
    sp = SequenceParallel.build(1, 2)
    batch = text_batch(((9, (7, 1)), (1, (1,)))).select(non_tensor_batch_keys=["uid"])
    policy, other, critic = (build(folders["qwen2"], True) for build in (load, load, load_scalar))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    read = []
    for own in (sp, None):
        forward, frozen, scorer = (
            PackedForward(model, share_prompt=own is not None, sp=own) for model in (policy, other, critic)
        )
        result = forward.log_probs(batch, 0.7, with_entropy=True, with_sum_squares=True, reference=frozen)
        nothing = forward.log_probs(batch[[]], 0.7).log_probs
        assert nothing.shape == (0, batch.batch["responses"].shape[1])
        values = (*result, scorer.values(batch), scorer.last_values(batch))
        read.append([value.detach().numpy() for value in values if value is not None])
    return read


def patches_seen(world_size, folders):
    """Patches that this rank's vision tower sees: of two clips and an image, and of text alone."""
    sp = SequenceParallel.build(2, 1)
    model = load(folders["qwen3_vl"], True)
    seen = []
    model.model.visual.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(args[0] if args else kwargs["hidden_states"])),
        with_kwargs=True,
    )
    contents = [((CLIP,), (2, 3)), ((IMAGE, CLIP), (3, 1)), ((), (2,))]
    batch = media_batch(folders["qwen3_vl"], contents)
    forward = PackedForward(model, Features(), share_prompt=True, sp=sp)
    forward.log_probs(batch, 1.0)
    forward.log_probs(batch[(batch.non_tensor_batch["uid"] == "u2").nonzero()[0]], 1.0)
    return seen


def operations_of(folders, sp):
    model = load(folders["qwen2"], True)
    counter = FlopsCounter(model)
    PackedForward(model, share_prompt=True, sp=sp, flops=counter).log_probs(text_batch(), 1.0)
    return counter.done


def on_two_ranks(rank, world_size, folders):
    return {
        "cases": run_cases(rank, world_size, [(2, 1), (1, 2)], CASES, folders),
        "read": everything_read(world_size, folders),
        "patches": patches_seen(world_size, folders),
        "operations": [operations_of(folders, sp) for sp in (SequenceParallel.build(2, 1), None)],
    }


def sharded_over_all(rank, world_size, folder):
    """Gradients under FSDP over two sequence-parallel groups of two ranks; the second has fewer rows."""
    parts = [[[0, 1, 4], [2]], [[3, 5], []]]  # micro batches of each group
    sp = SequenceParallel.build(2, 1)
    batch = media_batch(folder, [((IMAGE, CLIP), (3, 7)), ((), (2, 4)), ((WIDE,), (6, 1))])
    weights = torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))
    plain, model = load(folder, False), sharded(folder)
    (reference(plain, batch, 0.8)[0] * weights).sum().backward()
    forward = PackedForward(model, Features(), share_prompt=True, sp=sp)
    for rows in parts[sp.dp_index]:
        log_probs = forward.log_probs(batch[rows], 0.8).log_probs
        ((log_probs * weights[rows]).sum() * world_size).backward()  # FSDP averages over all ranks
    for parameter in model.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad.full_tensor() / world_size
    return relative_difference(model, plain)


def on_four_ranks(rank, world_size, folders):
    cases = [("text", True, True), ("image", False, False), ("mixed", True, False)]
    return {
        "cases": run_cases(rank, world_size, [(2, 2)], cases, folders),
        "sharded": sharded_over_all(rank, world_size, folders["qwen3_vl"]),
    }


@pytest.fixture(scope="module")
def two_ranks(folders):
    return run_distributed(on_two_ranks, 2, folders)


@pytest.fixture(scope="module")
def four_ranks(folders):
    return run_distributed(on_four_ranks, 4, folders)


def assert_small(cases):
    wrong = [case for case in cases if not (case[-2] < 1e-5 and case[-1] < 1e-5)]
    assert not wrong, wrong


def test_two_ranks_equal_one_with_ulysses_and_with_a_ring(two_ranks):
    for found in two_ranks:
        assert len(found["cases"]) == 2 * len(CASES)
        assert_small(found["cases"])


def test_statistics_values_and_scores_are_returned_in_order(two_ranks):
    for found in two_ranks:
        sharded, whole = found["read"]
        assert len(sharded) == len(whole) == 6
        for ours, theirs in zip(sharded, whole, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def test_ranks_count_their_part_of_the_operations(two_ranks):
    for found in two_ranks:
        own, whole = found["operations"]
        assert own == whole / 2


def test_every_frame_is_encoded_on_one_rank(two_ranks):
    # Two clips of 2 frames of 4 x 4 patches and an image of one: ranks take 3 and 2 frames of them.
    # A row without media has a blank image of 4 patches, and every rank runs the tower.
    assert [found["patches"] for found in two_ranks] == [[48, 4], [32, 4]]


@pytest.mark.nightly("verl/distributed", "verl/workers")
def test_four_ranks_equal_one_with_ulysses_around_a_ring(four_ranks):
    for found in four_ranks:
        assert_small(found["cases"])


@pytest.mark.nightly("verl/distributed", "verl/workers")
def test_fsdp_over_two_sp_groups_of_two_ranks_has_the_gradient_of_one_process(four_ranks):
    assert max(found["sharded"] for found in four_ranks) < 1e-5


@pytest.mark.parametrize(
    ("family", "ulysses", "ring", "message"),
    [
        ("qwen2", 3, 1, "`ulysses_size` .3. must divide the 4 attention heads of qwen2"),
        ("gemma2", 1, 2, "`ring_size` .2. must be 1 for gemma2"),
        ("gemma3_vl", 1, 2, "must be 1 for gemma3: in a ring, tokens of an image cannot attend"),
    ],
)
def test_models_whose_attention_cannot_be_sharded_are_refused(tmp_path, family, ulysses, ring, message):
    config = AutoConfig.from_pretrained(save_tiny_model(tmp_path, family))

    with pytest.raises(ValueError, match=message):
        check_sequence_parallel(config, SequenceParallel(ulysses, ring))


@pytest.mark.slow
def test_four_ranks_equal_one_in_every_shape(folders):
    for found in run_distributed(run_cases, 4, [(2, 2), (4, 1), (1, 4)], CASES, folders):
        assert_small(found)
