# SPDX-License-Identifier: Apache-2.0
"""The video demo learns the same on one process and on four, however those share its videos."""

import random
import sys
import tempfile

import pytest
from ray.cluster_utils import Cluster

from tests.helpers.training import QUICKSTART, learned, quickstart_arguments, train
from verl.data.media.video import VideoInfo, VideoOptions, choose_frames
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))
from demo import KINDS
from moving import IMAGE_SIZE, NUM_FRAMES, NUM_SAMPLED, find_corners

STEPS = 3
DIVIDED = "worker.actor.divide_short_sequences=true"
DEMO = KINDS["video"]
# Of how many ranks there are, and what each of them holds.
LAYOUT_AREAS = ("global_seqlen/", "rollout/", "rollout_corr/")


def test_no_frame_that_is_taken_tells_alone_which_square_moves():
    info = VideoInfo(NUM_FRAMES, 4.0, IMAGE_SIZE, IMAGE_SIZE)
    taken = choose_frames(info, VideoOptions(1, 1, factor=28, num_frames=NUM_SAMPLED))

    moving, standing = (
        [find_corners(random.Random(seed), 23, speed, lane=0) for seed in range(1000)] for speed in (1, 0)
    )

    assert all(corners[taken[0]] != corners[taken[1]] for corners in moving)
    assert all(len(set(corners)) == 1 for corners in standing)
    for number in taken:
        assert {corners[number] for corners in moving} == {corners[number] for corners in standing}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("video")
    save_tiny_model(folder / "model", DEMO.family)
    DEMO.write(folder, "train", 24, 1)
    DEMO.write(folder, "val", 5, 2)
    return folder


@pytest.fixture(scope="module")
def cluster():
    """The address of a node that lends four processes a core each, whatever the machine has."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)  # in its usual folder Ray would lead other runs to this cluster
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
        yield {"RAY_ADDRESS": cluster.address}
        cluster.shutdown()


def run(folder, cluster, processes, *options):
    """One engine over all processes: it draws from one stream of random numbers, whatever their number."""
    arguments = [
        *DEMO.options,
        f"data.image_dir={folder / DEMO.media}",
        "data.rollout_batch_size=8",
        "worker.actor.global_batch_size=4",
        f"worker.rollout.tensor_parallel_size={processes}",
        f"trainer.n_gpus_per_node={processes}",
        f"trainer.max_steps={STEPS}",
        "trainer.val_before_train=false",
        f"trainer.val_freq={STEPS}",
        *options,
    ]
    output = folder / f"run {processes} {' '.join(options)}".replace("=", "")
    metrics = train(output, *quickstart_arguments(folder, folder / "model", *arguments), env=cluster)
    return {step: learned(metrics[step]) for step in range(1, STEPS + 1)}


@pytest.fixture(scope="module")
def alone(folder, cluster):
    """On one process."""
    return run(folder, cluster, 1)


@pytest.mark.parametrize(
    "options",
    [
        ["worker.actor.ulysses_size=2", DIVIDED],
        pytest.param(
            ["worker.actor.ulysses_size=2", "worker.actor.ring_size=2", DIVIDED], marks=pytest.mark.slow
        ),  # minutes
    ],
    ids=["two pairs of ulysses", "ulysses and ring"],
)
@pytest.mark.slow
def test_four_processes_that_share_videos_learn_what_one_learns(folder, cluster, alone, options):
    metrics = run(folder, cluster, 4, *options)

    for step, expected in alone.items():
        compared = {key: value for key, value in expected.items() if not key.startswith(LAYOUT_AREAS)}
        assert compared["actor/grad_norm"] > 0
        assert {key: metrics[step].get(key) for key in compared} == pytest.approx(
            compared, rel=1e-3, abs=1e-5
        ), f"step {step}"
