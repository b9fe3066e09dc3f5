# SPDX-License-Identifier: Apache-2.0
"""Mistakes that a CPU does not show are found on a virtual GPU, and named."""

import re

import pytest

from tests.virtual.checks import different_order, problems
from tests.virtual.measure import VirtualClusterError
from tests.virtual.shapes import Setup

STEP = Setup(updates=1, prompts=1)


@pytest.mark.nightly("verl/workers", "verl/algorithms")
def test_a_tensor_of_the_host_in_the_loss_is_named(cluster):
    with pytest.raises(VirtualClusterError, match=r"(?s)^[^\n]*two [^\n]*vgpu:0\W[^\n]*cpu.*policy_loss"):
        cluster.measure("tiny", STEP, 8, mistake="host_tensor_in_loss")


@pytest.mark.slow
def test_moments_on_another_device_than_their_weights_are_named(cluster):
    setup = Setup(prompts=1, cpu_offload=True)

    with pytest.raises(
        VirtualClusterError, match=r"(?s)^\w+: Tensors .* must be on the same device.*/optim/"
    ):
        cluster.measure("tiny", setup, 8, mistake="moments_on_device")


@pytest.mark.nightly("verl/workers", "verl/algorithms")
@pytest.mark.parametrize(
    ("mistake", "place"),
    [("number_of_loss", "DataParallelPPOActor.update"), ("mask_as_index", "PackedForward.log_probs")],
)
def test_a_read_in_a_micro_batch_is_named_with_its_place(cluster, mistake, place):
    found = problems(cluster.measure("tiny", STEP, 8, mistake=mistake))

    assert any("update_actor: in a micro batch the host waits" in text and place in text for text in found)


@pytest.mark.slow
def test_more_copies_to_the_device_in_a_micro_batch_are_named(cluster):
    found = problems(cluster.measure("tiny", STEP, 8, mistake="lengths_sent_singly"))

    assert any("update_actor: in a micro batch the host sends" in text for text in found)


@pytest.mark.slow
def test_a_collective_that_only_some_ranks_issue_is_named(cluster):
    with_images = Setup(updates=1, prompts=1, images=(1,), image_size=(56, 56))
    without = Setup(updates=1, prompts=1, rank=5)

    first, second = (
        cluster.measure("tiny-vl", setup, 8, mistake="tower_only_where_media_are")
        for setup in (with_images, without)
    )

    assert re.match(r"old: (collective|one rank issues 6 collectives)", different_order(first, second) or "")


@pytest.mark.nightly("verl/workers", "verl/models")
def test_heads_that_do_not_divide_are_named(cluster):
    with pytest.raises(VirtualClusterError, match=r"`ulysses_size` \(3\) must divide the 4 attention heads"):
        cluster.measure("tiny", Setup(ulysses=3), 9)


@pytest.mark.nightly("verl/workers")
def test_ranks_that_do_not_divide_into_shards_are_named(cluster):
    with pytest.raises(
        VirtualClusterError, match=r"`fsdp.fsdp_size` \(3\) must divide the number of processes"
    ):
        cluster.measure("tiny", Setup(fsdp_size=3), 8)
