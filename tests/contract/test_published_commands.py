# SPDX-License-Identifier: Apache-2.0
"""The options that the published scripts of EasyR1 and Long-RL set pass a dry run, with their values.

Each kind of script is a line; scripts of diffusion models are answered in the page for Long-RL.
"""

import json

import pytest

from tests.helpers.training import ROOT
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, load_config
from verl.trainer.main import main

GEO = "data.train_files=hiyouga/geometry3k@train data.val_files=hiyouga/geometry3k@test"
MATH = "data.train_files=hiyouga/math12k@train data.val_files=hiyouga/math12k@test"
DAPO = """
    data.train_files=Saigyouji-Yuyuko1000/dapo17k@train data.val_files=Saigyouji-Yuyuko1000/dapo17k@test
"""
VIDEO = """
    data.train_files=LongVideo-Reason/longvideo-reason@train data.video_dir=.
    data.val_files=LongVideo-Reason/longvideo-reason@validation trainer.val_before_train=false
    trainer.val_freq=-1 data.format_prompt=./examples/format_prompt/r1v.jinja
    worker.reward.reward_type=sequential
    worker.reward.reward_function=./examples/reward_function/r1v.py:compute_score
    worker.rollout.trust_remote_code=true
"""
SCRIPTS = {
    "geometry": GEO
    + """
        worker.actor.model.model_path=Qwen/Qwen2.5-VL-3B-Instruct trainer.n_gpus_per_node=2
        trainer.total_epochs=10
    """,
    "geometry with 32B": GEO
    + """
        worker.actor.model.model_path=Qwen/Qwen2.5-VL-32B-Instruct worker.actor.fsdp.torch_dtype=bf16
        trainer.n_gpus_per_node=8 worker.actor.optim.strategy=adamw_bf16
        worker.rollout.tensor_parallel_size=8 worker.actor.micro_batch_size_per_device_for_update=1
        worker.actor.micro_batch_size_per_device_for_experience=8
    """,
    "cispo": GEO
    + """
        worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct worker.actor.loss_type=cispo
        worker.actor.clip_ratio_low=0 worker.actor.clip_ratio_high=4 algorithm.disable_kl=True
        data.max_response_length=4096
    """,
    "gspo": GEO
    + """
        worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct worker.actor.loss_type=gspo_token
        worker.actor.loss_avg_mode=seq worker.actor.clip_ratio_low=3e-4
        worker.actor.clip_ratio_high=4e-4 algorithm.disable_kl=True
    """,
    "sapo": GEO
    + """
        worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct worker.actor.loss_type=sapo
        algorithm.disable_kl=True
    """,
    "geometry with dapo": GEO
    + """
        worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct worker.actor.clip_ratio_low=0.2
        worker.actor.clip_ratio_high=0.28 data.mini_rollout_batch_size=256 algorithm.disable_kl=True
        algorithm.online_filtering=True
    """,
    "reinforce": GEO
    + """
        worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct
        algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_loss=false algorithm.kl_penalty=kl
        algorithm.kl_coef=1.0e-3
    """,
    "swanlab": GEO
    + """
        worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct trainer.logger=[console,swanlab]
    """,
    "several images": GEO
    + """
        worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct worker.rollout.limit_images=2
    """,
    "dapo17k": DAPO
    + """
        worker.actor.model.model_path=Qwen/Qwen3-14B data.max_response_length=20480
        data.mini_rollout_batch_size=256 data.rollout_batch_size=512 algorithm.disable_kl=True
        algorithm.online_filtering=True algorithm.filter_key=accuracy_normalized
        algorithm.filter_low=0.01 algorithm.filter_high=0.99 worker.actor.ulysses_size=4
        worker.actor.global_batch_size=32 worker.actor.optim.weight_decay=0.1
        worker.actor.optim.lr_warmup_steps=10 worker.rollout.n=16 worker.actor.clip_ratio_dual=10.0
        worker.rollout.tensor_parallel_size=4 trainer.max_try_make_batch=10
        worker.rollout.max_num_batched_tokens=22528
        worker.rollout.val_override_config={"n":16,"temperature":1.0,"top_p":0.7}
        data.format_prompt=./examples/format_prompt/dapo.jinja worker.rollout.gpu_memory_utilization=0.8
        worker.reward.reward_function=./examples/reward_function/dapo.py:compute_score
        worker.reward.reward_function_kwargs={"max_response_length":20480,"overlong_buffer_length":4096,"overlong_penalty_factor":1.0}
    """,
    "math with LoRA": MATH
    + """
        worker.actor.model.model_path=Qwen/Qwen3-4B worker.actor.model.lora.rank=64
        worker.actor.model.lora.alpha=64 worker.actor.optim.lr=1e-5 trainer.n_gpus_per_node=1
        worker.rollout.tensor_parallel_size=1
    """,
    "graphical interface": GEO
    + """
        worker.actor.model.model_path=Qwen/Qwen2.5-VL-3B-Instruct data.filter_overlong_prompts=false
        data.seed=42 trainer.nnodes=1 data.val_batch_size=32 worker.actor.max_grad_norm=0.1
        worker.actor.optim.lr_scheduler_type=constant worker.actor.optim.lr_warmup_ratio=0.05
        worker.actor.model.trust_remote_code=true worker.rollout.temperature=0.9
        worker.rollout.top_p=0.95 trainer.val_generations_to_log=10
    """,
    "counting": """
        data.train_files=BUAADreamer/clevr_count_70k@train
        data.val_files=BUAADreamer/clevr_count_70k@test
        worker.actor.model.model_path=Qwen/Qwen2.5-VL-3B-Instruct
        data.format_prompt=./examples/format_prompt/r1v.jinja worker.reward.reward_type=sequential
        worker.reward.reward_function=./examples/reward_function/r1v.py:compute_score
    """,
    "videos": VIDEO
    + """
        worker.actor.model.model_path=Qwen/Qwen2.5-VL-3B-Instruct worker.actor.ulysses_size=4
        worker.rollout.num_video_frames=256 worker.rollout.tokens_per_frame=60
        worker.rollout.max_num_batched_tokens=73984
    """,
    "an hour of video": VIDEO
    + """
        worker.actor.model.model_path=Qwen/Qwen2.5-VL-3B-Instruct data.num_workers=1
        data.rollout_batch_size=8 trainer.total_epochs=1 worker.actor.padding_free=true
        worker.actor.ulysses_size=8 worker.actor.global_batch_size=8
        worker.rollout.num_video_frames=3600 worker.rollout.tokens_per_frame=60
        worker.rollout.num_chunk_seq=60 worker.rollout.max_num_batched_tokens=256000
        worker.rollout.gpu_memory_utilization=0.4 trainer.experiment_name=hour
        trainer.load_checkpoint_path=checkpoints/easy_r1/hour
    """,
    "counting with VILA": """
        data.train_files=BUAADreamer/clevr_count_70k@train
        data.val_files=BUAADreamer/clevr_count_70k@test
        data.format_prompt=./examples/format_prompt/r1v.jinja data.vila_model=true
        worker.reward.reward_function=./examples/reward_function/r1v.py:compute_score
        worker.reward.reward_type=sequential worker.vila_model=true
        worker.actor.model.trust_remote_code=true worker.rollout.trust_remote_code=true
        worker.actor.model.model_path=Efficient-Large-Model/NVILA-Lite-2B trainer.n_gpus_per_node=8
    """,
    "256 frames with VILA": VIDEO
    + """
        data.vila_model=true worker.vila_model=true worker.actor.model.trust_remote_code=true
        worker.rollout.num_video_frames=256 worker.rollout.tokens_per_frame=257
        worker.rollout.max_num_batched_tokens=73984 worker.actor.ulysses_size=4
        worker.actor.model.model_path=Efficient-Large-Model/LongVILA-R1-7B trainer.n_gpus_per_node=8
    """,
    "sound": VIDEO
    + """
        data.is_omni=true worker.is_omni=true data.audio_max_length=10000
        worker.actor.model.model_path=Qwen/Qwen2.5-Omni-3B worker.actor.padding_free=false
        worker.actor.ulysses_size=1 worker.rollout.max_model_len=20000 data.max_response_length=64
    """,
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_options_of_every_published_script_pass_a_dry_run(kind, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)

    assert main(["config=examples/config.yaml", *SCRIPTS[kind].split(), "--dry-run"]) == 0, (
        capsys.readouterr().err
    )


def load(*arguments):
    rows = [
        "data.train_files=owner/rows",
        "data.val_files=owner/rows",
        "worker.actor.model.model_path=owner/m",
    ]
    return load_config(PPOConfig, ["config=examples/config.yaml", *rows, *arguments]).trainer


def test_the_folder_of_a_run_stands_for_its_last_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for step in (2, 4):
        (tmp_path / f"global_step_{step}").mkdir()
    (tmp_path / "checkpoint_tracker.json").write_text(json.dumps({"last_global_step": 4}))

    assert load(f"trainer.load_checkpoint_path={tmp_path}").load_checkpoint_path == str(
        tmp_path / "global_step_4"
    )


def test_the_runs_own_folder_is_resumed_if_it_has_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    own = f"trainer.save_checkpoint_path={tmp_path}/new"

    trainer = load(own, f"trainer.load_checkpoint_path={tmp_path}/new", "trainer.find_last_checkpoint=false")

    assert trainer.load_checkpoint_path is None and trainer.find_last_checkpoint
    with pytest.raises(ConfigError, match=r"`trainer.load_checkpoint_path`: no folder .*other"):
        load(own, f"trainer.load_checkpoint_path={tmp_path}/other")
    (tmp_path / "other" / "global_step_3").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"or be the folder of a run, got .*; it contains \['global_step_3'\]"
    ):
        load(own, f"trainer.load_checkpoint_path={tmp_path}/other")


def test_a_package_that_a_reward_file_lacks_is_named_with_the_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (tmp_path / "mine.py").write_text("from no_such_grader.grader import grade\n\ndef main(rows): ...\n")
    arguments = [*SCRIPTS["geometry"].split(), f"worker.reward.reward_function={tmp_path / 'mine.py'}"]

    assert main(["config=examples/config.yaml", *arguments, "--dry-run"]) == 2

    assert "for example by `pip install no_such_grader`." in capsys.readouterr().err


def test_an_option_with_dashes_is_answered_without_them(capsys):
    assert main(["--worker.rollout.num_chunk_seq=8"]) == 2

    told = capsys.readouterr().err.splitlines()[0]
    assert told.endswith("is not a switch: options have no dashes: worker.rollout.num_chunk_seq=8")
