# SPDX-License-Identifier: Apache-2.0
"""The keys and defaults that EasyR1's and Long-RL's users know."""

import pytest

from verl.algorithms.advantages import ADV_ESTIMATORS
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.config.algorithm import ADV_ESTIMATOR_ALIASES
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, config_notes, list_options, load_config
from verl.logger.tracker import LOGGERS
from verl.workers.rollout.engines import ROLLOUT_ENGINES

MODEL = {
    "model_path": None,
    "tokenizer_path": None,
    "override_config": {},
    "enable_gradient_checkpointing": "auto",  # EasyR1's is true; the loss does not depend on it
    "trust_remote_code": False,  # EasyR1's own default is true; its example file says false
    "freeze_vision_tower": False,
    "lora.rank": 0,
    "lora.alpha": 64,
    "lora.target_modules": "all-linear",
    "lora.exclude_modules": None,
}
OPTIM = {
    "lr": 1e-6,
    "betas": (0.9, 0.999),
    "weight_decay": 1e-2,
    "strategy": "adamw",
    "lr_warmup_ratio": 0.0,
    "lr_warmup_steps": None,
    "min_lr_ratio": None,
    "lr_scheduler_type": "constant",
}
FSDP = {
    "enable_full_shard": True,
    "enable_cpu_offload": False,
    "enable_rank0_init": True,
    "use_orig_params": False,
    "torch_dtype": None,
    "fsdp_size": -1,
    "mp_param_dtype": "bf16",
    "mp_reduce_dtype": "fp32",
    "mp_buffer_dtype": "fp32",
}
OFFLOAD = {"offload_params": False, "offload_optimizer": False}
UPDATE = {
    "strategy": "fsdp",
    "global_batch_size": 256,
    "micro_batch_size_per_device_for_update": 4,
    "micro_batch_size_per_device_for_experience": 16,
    "max_grad_norm": 1.0,
    "loss_avg_mode": "token",
    "ppo_epochs": 1,
    "dynamic_batching": True,
    "ulysses_size": 1,
}
DIFFUSION_MODEL = {"vila_model": False, "diffusion": False, "guidance_scale": 4.5, "scheduler": ""}
SECTIONS = {
    "data": {
        "train_files": "",
        "val_files": "",
        "prompt_key": "prompt",
        "answer_key": "answer",
        "image_key": "images",
        "video_key": "videos",
        "image_dir": None,
        "video_fps": 2.0,
        "max_prompt_length": 512,
        "max_response_length": 512,
        "rollout_batch_size": 512,
        "mini_rollout_batch_size": None,
        "val_batch_size": -1,
        "format_prompt": None,
        "override_chat_template": None,
        "shuffle": True,
        "seed": 1,
        "min_pixels": 262144,
        "max_pixels": 4194304,
        "filter_overlong_prompts": True,
        "filter_overlong_prompts_workers": 16,
        "video_dir": None,
        "cache_dir": None,
        "vila_model": False,
        "diffusion": False,
        "is_omni": False,
        "audio_max_length": 10000,
        "num_workers": 8,
    },
    "algorithm": {
        "gamma": 1.0,
        "lam": 1.0,
        "adv_estimator": "grpo",
        "disable_kl": False,
        "use_kl_loss": False,
        "kl_penalty": "kl",
        "kl_coef": 1e-3,
        "kl_type": "fixed",
        "kl_horizon": 1e4,
        "kl_target": 0.1,
        "online_filtering": False,
        "filter_key": "overall",
        "filter_low": 0.01,
        "filter_high": 0.99,
    },
    "trainer": {
        "total_epochs": 15,
        "max_steps": None,
        "project_name": "easy_r1",
        "experiment_name": "demo",
        "logger": ("console", "wandb"),
        "nnodes": 1,
        "n_gpus_per_node": 8,
        "max_try_make_batch": 20,
        "critic_warmup": 0,
        "val_freq": -1,
        "val_before_train": True,
        "val_only": False,
        "val_generations_to_log": 0,
        "save_freq": -1,
        "save_limit": -1,
        "save_model_only": False,
        "save_checkpoint_path": None,
        "load_checkpoint_path": None,
        "ray_timeline": None,
        "find_last_checkpoint": True,
        "diffusion": False,
    },
    "worker": {"hybrid_engine": True, "vila_model": False, "is_omni": False},
    "worker.actor": UPDATE
    | DIFFUSION_MODEL
    | {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.3,
        "clip_ratio_dual": 3.0,
        "loss_type": "default",
        "padding_free": True,
        "use_torch_compile": True,
        "tau_positive": 1.0,
        "tau_negative": 1.05,
        "cached_embeds_dir": None,
    },
    "worker.actor.model": MODEL,
    "worker.actor.optim": OPTIM,
    "worker.actor.fsdp": FSDP,
    "worker.actor.offload": OFFLOAD,
    "worker.critic": UPDATE | {"cliprange_value": 0.5, "padding_free": False},
    "worker.critic.model": MODEL,
    "worker.critic.optim": OPTIM,
    "worker.critic.fsdp": FSDP,
    "worker.critic.offload": OFFLOAD,
    "worker.ref": {"strategy": "fsdp"} | DIFFUSION_MODEL,
    "worker.ref.fsdp": FSDP,
    "worker.ref.offload": OFFLOAD,
    "worker.rollout": {
        "name": "vllm",
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "seed": 1,
        "limit_images": 0,
        "dtype": "bf16",
        "gpu_memory_utilization": 0.6,
        "ignore_eos": False,
        "enforce_eager": False,
        "enable_chunked_prefill": True,  # EasyR1: false, which vLLM does not support officially
        "tensor_parallel_size": 2,
        "max_model_len": None,
        "max_num_batched_tokens": 8192,
        "disable_log_stats": True,
        "disable_tqdm": False,
        "val_override_config": {},
        "num_video_frames": None,  # Long-RL: 8; here the default is `data.video_fps`
        "tokens_per_frame": None,  # Long-RL: 256
        "group_frames": 64,
        "max_frames_vllm": -1,
        "num_chunk_seq": -1,
        "audio_max_length": 10000,
        "open_ended_reward": False,
        "guidance_scale": 4.5,
        "resolution": 768,
        "num_steps": 10,
        "kl_reward": 0.0,
        "num_frames": 81,
        "height": 480,
        "width": 832,
    },
    "worker.reward": {
        "reward_function": None,
        "reward_function_kwargs": {},
        "skip_special_tokens": True,
        "num_cpus": 1,
        "reward_type": "batch",
        "diffusion": False,
    },
}
EASYR1_EXAMPLE = {
    "data.prompt_key": "problem",
    "data.max_prompt_length": 2048,
    "data.max_response_length": 2048,
    "data.val_batch_size": 1024,
    "algorithm.use_kl_loss": True,
    "algorithm.kl_penalty": "low_var_kl",
    "algorithm.kl_coef": 1e-2,
    "trainer.logger": ("file", "wandb"),
    "trainer.val_freq": 5,
    "trainer.val_generations_to_log": 3,
    "trainer.save_freq": 5,
    "trainer.save_limit": 3,
    "worker.actor.global_batch_size": 128,
    "worker.actor.micro_batch_size_per_device_for_update": 1,
    "worker.actor.micro_batch_size_per_device_for_experience": 2,
    "worker.actor.model.lora.exclude_modules": ".*visual.*",
    # EasyR1's file says true, and for the reference `fsdp.enable_cpu_offload`; losses do not depend on it.
    "worker.actor.offload.offload_params": "auto",
    "worker.actor.offload.offload_optimizer": "auto",
    "worker.ref.offload.offload_params": "auto",
    "worker.rollout.n": 5,
    "worker.rollout.val_override_config": {"temperature": 0.6, "top_p": 0.95, "n": 1},
}
# EasyR1's file as its users have it: the keys it writes out, often with other values than the code's.
EASYR1_YAML = """
data:
  train_files: hiyouga/math12k@train
  val_files: hiyouga/math12k@test
  prompt_key: problem
  max_prompt_length: 2048
  max_response_length: 2048
  format_prompt: ./examples/format_prompt/math.jinja
algorithm:
  adv_estimator: grpo
  use_kl_loss: true
  kl_penalty: low_var_kl
  kl_coef: 1.0e-2
worker:
  actor:
    global_batch_size: 128
    padding_free: true
    ulysses_size: 1
    model:
      model_path: Qwen/Qwen2.5-7B-Instruct
      lora: {rank: 0, alpha: 64, target_modules: all-linear, exclude_modules: ".*visual.*"}
    optim: {lr: 1.0e-6, strategy: adamw}
    fsdp: {enable_full_shard: true, enable_cpu_offload: false, enable_rank0_init: true}
  rollout:
    n: 5
    val_override_config: {temperature: 0.6, top_p: 0.95, n: 1}
  ref:
    fsdp: {enable_full_shard: true, enable_cpu_offload: true, enable_rank0_init: true}
  reward:
    reward_function: ./examples/reward_function/math.py:compute_score
trainer:
  logger: ["file", "wandb"]
  n_gpus_per_node: 8
  save_checkpoint_path: null
"""


# Options of Long-RL's scripts for long videos beyond EasyR1's, in its later state.
LONG_RL_OVERRIDES = [
    "worker.rollout.num_video_frames=512",
    "worker.rollout.tokens_per_frame=60",
    "worker.rollout.num_chunk_seq=60",
    "worker.rollout.max_num_batched_tokens=256000",
    "worker.rollout.bs_vllm=8",
    "worker.rollout.use_cached_embeds=true",
    "worker.rollout.trust_remote_code=true",
    "worker.actor.model.trust_remote_code=true",
    "worker.actor.model.freeze_vision_tower=true",
    "worker.actor.cached_embeds_dir=cached",
    "worker.ref.cached_embeds_dir=cached",
    "worker.actor.ulysses_size=8",
    "worker.ref.ulysses_size=8",
    "worker.actor.kl_penalty=low_var_kl",
    "worker.actor.optim.warmup_style=cosine",
    "worker.reward.reward_type=sequential",
    "data.cache_dir=",
    "data.num_workers=1",
]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_known_key_has_its_known_default(section):
    defaults = {entry.key: entry.default for entry in list_options(PPOConfig)}

    for name, value in SECTIONS[section].items():
        assert f"{section}.{name}" in defaults
        assert defaults[f"{section}.{name}"] == value, f"{section}.{name}"


def test_the_example_values_are_those_of_easyr1():
    examples = {entry.key: entry.info.example for entry in list_options(PPOConfig)}

    assert {key: examples[key] for key in EASYR1_EXAMPLE} == EASYR1_EXAMPLE


def test_an_easyr1_file_loads(tmp_path):
    file = tmp_path / "easyr1.yaml"
    file.write_text(EASYR1_YAML)

    config = load_config(PPOConfig, [f"config={file}", "trainer.logger=['console','swanlab']"])

    assert config.trainer.logger == ("console", "swanlab")
    assert config.worker.rollout.n == 5


def test_a_long_rl_command_loads_and_says_which_options_have_no_effect(tmp_path, monkeypatch):
    file = tmp_path / "easyr1.yaml"
    file.write_text(EASYR1_YAML)

    config = load_config(PPOConfig, [f"config={file}", *LONG_RL_OVERRIDES])

    assert config.worker.actor.optim.lr_scheduler_type == "cosine"
    assert config.worker.actor.cached_embeds_dir.endswith("/cached") and config.data.cache_dir is None
    assert {note.split("`")[1] for note in config_notes(config)} == {
        "worker.actor.kl_penalty",
        "worker.ref.cached_embeds_dir",
        "worker.ref.ulysses_size",
        "worker.rollout.bs_vllm",
        "worker.rollout.trust_remote_code",
        "worker.rollout.use_cached_embeds",
    }


def test_the_older_name_of_the_schedule_is_overridden_as_the_newer_one_is(tmp_path):
    file = tmp_path / "easyr1.yaml"
    file.write_text(EASYR1_YAML.replace("strategy: adamw}", "strategy: adamw, warmup_style: cosine}"))

    def schedule(*arguments):
        return load_config(PPOConfig, [f"config={file}", *arguments]).worker.actor.optim.lr_scheduler_type

    assert schedule() == "cosine"
    assert schedule("worker.actor.optim.lr_scheduler_type=linear") == "linear"
    assert (
        schedule("worker.actor.optim.lr_scheduler_type=linear", "worker.actor.optim.warmup_style=wsd")
        == "wsd"
    )
    with pytest.raises(ConfigError, match=r"`worker.actor.optim.lr_scheduler_type` must be one of"):
        schedule("worker.actor.optim.warmup_style=cosines")


def test_the_choices_of_an_option_are_the_registered_names():
    known = {entry.key: entry.info for entry in list_options(PPOConfig)}

    for key, registry, aliases in (
        ("algorithm.adv_estimator", ADV_ESTIMATORS, ADV_ESTIMATOR_ALIASES),
        ("algorithm.kl_penalty", KL_ESTIMATORS, ()),
        ("worker.actor.loss_type", POLICY_LOSSES, ()),
        ("worker.rollout.name", ROLLOUT_ENGINES, ()),
        ("trainer.logger", LOGGERS, ()),
    ):
        choices = set(known[key].choices) - set(aliases)
        assert set(registry.names()) == choices, key
