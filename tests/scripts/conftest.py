# SPDX-License-Identifier: Apache-2.0
"""The quickstart's data and a tiny model, made once."""

import sys

import pytest

from tests.helpers.training import QUICKSTART
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))

from moving import write_video_questions
from shapes import write_questions


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """`train.jsonl` and `val.jsonl` with 8 questions about images, `videos.jsonl` with 2; the model `vl`."""
    folder = tmp_path_factory.mktemp("quickstart")
    write_questions(folder, "train", 8, 1, with_images=True)
    write_questions(folder, "val", 8, 2, with_images=True)
    write_video_questions(folder, "videos", 2, 3)
    save_tiny_model(folder / "vl", "qwen2_5_vl")
    for weights in folder.glob("*/*.safetensors"):  # no command needs them
        weights.unlink()
    return folder


@pytest.fixture
def run(folder, tmp_path):
    """The arguments of a run on those questions; overrides and switches follow."""
    return [
        f"config={QUICKSTART / 'demo.yaml'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'val.jsonl'}",
        f"data.image_dir={folder / 'images'}",
        f"data.video_dir={folder / 'videos'}",
        "data.rollout_batch_size=4",
        "worker.actor.global_batch_size=4",
        "worker.actor.micro_batch_size_per_device_for_update=32",
        "worker.actor.micro_batch_size_per_device_for_experience=32",
        "data.num_workers=0",
        "worker.rollout.num_video_frames=4",
        f"worker.actor.model.model_path={folder / 'vl'}",
        f"worker.reward.reward_function={QUICKSTART / 'reward.py'}:compute_score",
        f"trainer.save_checkpoint_path={tmp_path / 'checkpoints'}",
    ]
