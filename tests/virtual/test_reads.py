# SPDX-License-Identifier: Apache-2.0
"""A micro batch reads nothing back from the device, and reaches it in a few copies."""

import pytest

from tests.virtual.shapes import Setup

IMAGES = {"images": (1, 2), "image_size": (112, 112)}
SHARDED = {"ulysses": 2, "ring": 2}
# Copies of a micro batch in a pass without and with an update: the packed sequence and its indices, and the
# boundaries of its layout; for the loss a float32 and an int64 one. Images add pixels, what the tower derives
# from the grids (one copy), and the boundaries of images and of windows.
SETUPS = {
    "text": ("tiny", {"share_prompt": False}, 2, 4),
    "shared prompts": ("tiny", {}, 2, 4),
    "mixture of experts": ("tiny-moe", {}, 2, 4),
    "ulysses x ring": ("tiny", SHARDED, 2, 4),
    "images": ("tiny-vl", IMAGES, 6, 8),
    "images, ulysses x ring": ("tiny-vl", IMAGES | SHARDED, 6, 8),
    "LoRA, without checkpointing": ("tiny", {"lora_rank": 8, "checkpointing": False}, 2, 4),
}
QUICK = ("ulysses x ring",)  # the others are slow


def assert_no_reads(phases):
    assert not {name: phase.most_reads() for name, phase in phases.items() if phase.most_reads()}


@pytest.mark.nightly("verl/workers", "verl/models", "verl/distributed")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SETUPS]
)
def test_a_micro_batch_of_the_policy_reads_nothing_back(cluster, name):
    shape, options, copies_of_a_pass, copies_of_an_update = SETUPS[name]

    phases = cluster.measure(shape, Setup(reference=True, **options), ranks=4)

    assert_no_reads(phases)
    for phase in ("old", "ref"):
        assert phases[phase].most_copies().total() == copies_of_a_pass, phases[phase].most_copies()
    update = phases["update_actor"].most_copies()
    assert len(phases["update_actor"].micro_copies) >= 2
    assert update.total() == copies_of_an_update, update


@pytest.mark.slow
def test_a_micro_batch_of_the_critic_reads_nothing_back(cluster):
    phases = cluster.measure("tiny", Setup(critic=True), ranks=4)

    assert_no_reads(phases)
    assert phases["values"].most_copies().total() == 2
    assert phases["update_critic"].most_copies().total() == 4


@pytest.mark.slow
def test_a_micro_batch_of_fine_tuning_reads_nothing_back(cluster):
    phases = cluster.measure("tiny", Setup(fine_tuning=True), ranks=4)

    assert_no_reads(phases)
    assert phases["validation"].most_copies().total() == 2
    assert phases["update_actor"].most_copies().total() == 3  # its loss reads a mask


@pytest.mark.slow
def test_a_micro_batch_of_reward_models_reads_nothing_back(cluster):
    phases = cluster.measure("tiny", Setup(prime=True, reward_model=True), ranks=4)

    assert_no_reads(phases)
    for phase in ("reward_model", "prime_ref", "process_rewards"):
        assert phases[phase].most_copies().total() == 2
    assert phases["update_prime"].most_copies().total() == 4
