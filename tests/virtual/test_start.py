# SPDX-License-Identifier: Apache-2.0
"""A large mixture on virtual ranks, from its files to its first checkpoint, next to what is planned."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import AutoConfig

from tests.virtual.checks import different_order
from tests.virtual.cluster import FP8, write_model
from tests.virtual.measure import PhaseReport
from tests.virtual.planned import CASES, Case, Planned, planned
from verl.distributed.weights.gathering import SLICE_BYTES, ExpertSlice
from verl.models.hub_names import HubNames

TOLERANCE = 0.1
TINY = Case("tiny-latent", 8, {"expert_parallel": 4}, layers=2)
LARGE = {case.shape: case for case in CASES if case.options == {"expert_parallel": 8}}
STARTS = {
    "tiny in FP8": (TINY, FP8),
    "235B in bf16": (LARGE["235b-a22b"], "bf16"),
    "671B in bf16": (LARGE["671b"], "bf16"),
    "671B in FP8": (LARGE["671b"], FP8),
}
QUICK = ("tiny in FP8",)  # the others are slow


@dataclass(frozen=True)
class Start:
    """What the first, a middle and the last rank did, and the plan."""

    case: Case
    files: str
    ranks: tuple[dict[str, PhaseReport], ...]
    plan: Planned


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.heavy if name in QUICK else pytest.mark.slow) for name in STARTS
    ],
)
def start(request, cluster) -> Start:
    case, files = STARTS[request.param]
    setup = replace(case.setup(), files=files, updates=1)
    chosen = (0, case.ranks // 2, case.ranks - 1)
    ranks = (cluster.measure(case.shape, replace(setup, rank=rank), case.ranks) for rank in chosen)
    return Start(case, files, tuple(ranks), planned(case))


@pytest.fixture
def names(start, tmp_path) -> HubNames:
    write_model(tmp_path, start.case.shape, start.case.setup().override)
    return HubNames(AutoConfig.from_pretrained(tmp_path))


def test_only_the_first_rank_holds_values_of_the_files_and_no_more_than_planned(start):
    first, *others = (rank["load"] for rank in start.ranks)

    # FP8 is read as float32, for which all is planned; an expert in bf16 and its parts take half.
    held = start.plan.host["load"] if start.files == FP8 else start.plan.policy.shape.largest_row
    assert first.host_peak - first.host_start == pytest.approx(held, rel=TOLERANCE)
    assert held <= start.plan.host["load"]
    assert [each.host_peak for each in others] == [each.host_start for each in others]


def test_an_engine_gets_each_weight_of_the_hub_once(start, names):
    first, *others = (rank["sync_weights"].given for rank in start.ranks)
    joint = {hub_name: name for name, hub_name in names.stacks.items()}
    slices, shapes = [], []
    for name, size in first:
        if (part := ExpertSlice.of(name)) is None:
            shapes.append((name, names.hub_shapes[name]))
            assert size / math.prod(names.hub_shapes[name]) in (2, 4)  # float32 are buffers
        else:
            shape = part.stop - part.start, *names.memory_shapes[joint[part.weight]][1:]
            slices.append((name, torch.empty(shape, dtype=torch.bfloat16, device="meta")))
            assert size == slices[-1][1].nbytes
    shapes += [(name, tensor.shape) for name, tensor in names.separate(slices)]

    assert slices and sorted(shapes) == sorted(names.hub_shapes.items())
    assert others == [first, first]


def test_what_is_gathered_for_an_engine_is_a_whole_weight_or_a_gibibyte_of_experts(start, names):
    gathered = [(name, size) for name, *_, size in start.ranks[0]["sync_weights"].collectives]
    of_slices = [size for name, size in gathered if name == "broadcast_"]
    stacks = {hub_name for name in names.stacks for hub_name in names.of(name)}
    largest = max(2 * math.prod(shape) for name, shape in names.hub_shapes.items() if name not in stacks)

    assert max(of_slices, default=0) <= SLICE_BYTES
    assert max(size for _, size in gathered) <= max(SLICE_BYTES, largest)


def test_each_rank_writes_its_part_of_a_checkpoint_from_the_copy_that_is_planned(start):
    saved = [rank["save_checkpoint"] for rank in start.ranks]

    held = start.plan.policy.weights + start.plan.policy.state
    assert [each.written for each in saved] == pytest.approx([held] * 3, rel=TOLERANCE)
    copies = [each.host_peak - each.host_start for each in saved]
    assert copies == pytest.approx([start.plan.host["save_checkpoint"]] * 3, rel=TOLERANCE)


def test_all_ranks_issue_the_same_collectives(start):
    first, *others = start.ranks

    # Each group of ranks that hold some experts of a slice sends those alone.
    assert [different_order(first, other, by_group=["sync_weights"]) for other in others] == [None] * 2
