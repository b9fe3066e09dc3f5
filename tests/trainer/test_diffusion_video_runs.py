# SPDX-License-Identifier: Apache-2.0
"""A run of a tiny Wan whose two processes share the tokens of every video."""

import sys

import pyarrow.parquet as pq
import pytest

from examples.quickstart.tiny_pipelines import save_tiny_wan
from tests.helpers.training import QUICKSTART, learned, train
from verl.data.media.video import probe_video
from verl.viewer.rollout_store import FOLDER, MEDIA

sys.path.insert(0, str(QUICKSTART))
from paintings import write_prompts

pytestmark = [pytest.mark.heavy, pytest.mark.slow]  # tests/diffusion divides tokens in every suite
REWARD = """
REWARD_TYPE = "sequential"

def compute_score(reward_input):
    videos = reward_input["videos"]
    assert videos.shape == (5, 3, 16, 32) and 0 <= videos.min() < videos.max() <= 1, videos.shape
    return {"overall": float(videos[:, 0].mean()), "frames": float(len(videos))}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan")
    save_tiny_wan(folder / "model")
    write_prompts(folder, "train", 1)
    write_prompts(folder, "val", 2)
    (folder / "reward.py").write_text(REWARD)
    return folder


def run(folder, ulysses):
    return train(
        folder / f"ulysses{ulysses}", f"config={QUICKSTART / 'diffusion.yaml'}",
        f"data.train_files={folder / 'train.jsonl'}", f"data.val_files={folder / 'val.jsonl'}",
        "data.rollout_batch_size=2", "worker.rollout.n=4", "worker.actor.global_batch_size=2",
        "worker.actor.micro_batch_size_per_device_for_update=2",
        "worker.actor.micro_batch_size_per_device_for_experience=2",
        f"worker.actor.model.model_path={folder / 'model'}", f"worker.actor.ulysses_size={ulysses}",
        "worker.rollout.num_frames=5", "worker.rollout.height=16", "worker.rollout.width=32",
        f"worker.reward.reward_function={folder / 'reward.py'}:compute_score",
        "trainer.max_steps=2", "trainer.val_freq=2", "trainer.logger=[file]",
    )  # fmt: skip


@pytest.fixture(scope="module")
def shared(folder):
    return run(folder, 2)


def test_rewards_see_videos_and_the_first_ratio_is_1(shared):
    for step in (1, 2):
        assert shared[step]["reward/frames"] == 5 and shared[step]["actor/grad_norm"] > 0
    assert shared[1]["rollout/log_probs_diff_max"] == 0


def test_videos_are_kept_as_clips_with_their_frames_and_scores(shared, folder):
    kept = folder / "ulysses2" / FOLDER

    rows = pq.read_table(kept / "step_1.parquet").to_pylist()

    assert len(rows) == 2 * 4
    for row in rows:
        assert row["response"] == "video of 5 frames of 32 x 16 pixels"
        assert 0 < row["score"] < 1 and row["picture"]["kind"] == "video"
        clip = probe_video(str(kept / MEDIA / row["picture"]["whole"]))
        assert (clip.num_frames, clip.width, clip.height) == (5, 32, 16)


def test_two_processes_that_share_tokens_learn_what_two_with_different_videos_learn(shared, folder):
    apart = run(folder, 1)

    for step in (1, 2):
        expected = {
            key: value
            for key, value in learned(apart[step]).items()
            if not key.startswith(("global_seqlen/", "rollout/"))
        }
        assert {key: shared[step].get(key) for key in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)
