# SPDX-License-Identifier: Apache-2.0
"""The rows that `verl-longvideo-reason` writes are prompts and conversations of a run."""

import pytest

from tests.helpers.training import ROOT
from verl.cli.data_check import main
from verl.config.data import DataConfig
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.readers import load_processor, load_tokenizer
from verl.data.rl_dataset import RLHFDataset
from verl.models.tiny import save_tiny_model
from verl.rewards.function import load_reward_function

TEMPLATE = ROOT / "examples/format_prompt/r1v_video.jinja"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.nightly("examples/verl_longvideo")
def test_a_question_is_a_prompt_with_its_video_whose_response_gets_the_full_score(whole, videos, model):
    config = DataConfig(
        prompt_key="problem", format_prompt=str(TEMPLATE), video_dir=str(videos), max_prompt_length=4096,
        filter_overlong_prompts_workers=1, min_pixels=784, max_pixels=3136,
    )  # fmt: skip
    processor = load_processor(model)
    media = MediaLoader(processor, MediaOptions.from_data(config))
    file = str(whole[0] / "train.parquet")
    rows = RLHFDataset(file, load_tokenizer(model), processor, config, media=media)
    reward = load_reward_function("examples/reward_function/choice.py:compute_score", {})

    prompts = [rows[index] for index in range(len(rows))]

    assert len(prompts) == 4
    assert prompts[0]["multi_modal_data"]["videos"][0].startswith(str(videos))
    scores = reward.score([{**prompt, "response_length": 9} for prompt in prompts])
    assert [score["overall"] for score in scores] == [1.0] * 4


@pytest.mark.nightly("examples/verl_longvideo", "verl/data")
def test_the_check_of_the_data_uses_every_row(whole, videos, model, tmp_path, capsys):
    shared = [
        f"data.video_dir={videos}", f"worker.actor.model.model_path={model}", "--rows", "1",
        "--out", str(tmp_path / "sheets"), f"trainer.save_checkpoint_path={tmp_path / 'checkpoints'}",
        "data.min_pixels=784", "data.max_pixels=3136", "data.num_workers=0", "trainer.n_gpus_per_node=1",
    ]  # fmt: skip
    conversations = [
        "--sft", f"data.train_files={whole[0] / 'sft_train.parquet'}", "data.max_length=1024",
        f"data.val_files={whole[0] / 'sft_val.parquet'}", "worker.actor.global_batch_size=4",
    ]  # fmt: skip
    prompts = [
        f"data.train_files={whole[0] / 'train.parquet'}", f"data.val_files={whole[0] / 'val.parquet'}",
        "data.prompt_key=problem", f"data.format_prompt={TEMPLATE}", "data.max_prompt_length=1024",
        "data.category_keys=[subject]", "data.rollout_batch_size=4", "worker.actor.global_batch_size=4",
        "worker.rollout.n=2", "worker.rollout.tensor_parallel_size=1",
        "worker.reward.reward_function=examples/reward_function/choice.py:compute_score",
    ]  # fmt: skip

    for own in (conversations, prompts):
        assert main([*own, *shared]) == 0, capsys.readouterr()

    told = capsys.readouterr().out
    assert told.count("4 rows, 4 used") == 4, told
