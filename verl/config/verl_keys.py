# SPDX-License-Identifier: Apache-2.0
"""verl's options (its FSDP trainer, releases 0.3 to 0.9) by the names that they have here.

Only keys that are unknown here are listed: `data.train_files` and `trainer.nnodes` are the same in both. The
page docs/migration/verl.md shows the tables, and beside them the keys that have one name and two meanings.
"""

from verl.config.renamed_keys import RenamedKey, RenamedKeys, absent
from verl.config.verl_worker_keys import COUNTS_AS_TOKENS, WORKER_KEYS, under

JUDGES = "a model that writes its judgement is asked by `examples/reward_function/llm_judge.py`"
SANDBOX = "programs run in the project's own sandbox: `examples/reward_function/code.py`"

_DATA = under(
    "data",
    {
        "train_batch_size": RenamedKey("data.rollout_batch_size", "prompts in both"),
        "gen_batch_size": RenamedKey("data.mini_rollout_batch_size", "prompts in both"),
        "dataloader_num_workers": RenamedKey("data.num_workers"),
        "tokenizer": RenamedKey("worker.actor.model.tokenizer_path"),
        "trust_remote_code": RenamedKey("worker.actor.model.trust_remote_code"),
        "reward_fn_key": absent("the reward function gets every column: read `data_source` in it"),
        "train_max_samples": absent("name a slice: `data.train_files=train.parquet@train[:1000]`"),
        "val_max_samples": absent("name a slice: `data.val_files=test.parquet@train[:100]`"),
        "truncation": absent(
            "a longer prompt is left out with `data.filter_overlong_prompts`, else an error"
        ),
        "validation_shuffle": absent("validation rows keep their order"),
        "apply_chat_template_kwargs": absent("write them into a template: `data.override_chat_template`"),
        "mm_processor_kwargs": absent(
            "`data.min_pixels`, `data.max_pixels` and `data.video_fps` shape media"
        ),
        "image_patch_size": absent("it is read from the model's processor"),
        "audio_key": absent("models that hear are not built"),
        "custom_cls": absent("rows are read by `verl/data/files.py`; a new format is one function there"),
        "sampler": absent("rows come in random or file order: `data.shuffle`"),
        "datagen": absent("rows are fixed for a run"),
        "tool_config_path": absent("tools are not built"),
        "function_tool_path": absent("tools are not built"),
        "use_shm": absent("tables are mapped from disk"),
        "return_raw_input_ids": absent("nothing reads it"),
        "return_raw_chat": absent("nothing reads it"),
        "return_full_prompt": absent("the reward function gets the prompt anyway"),
        "return_multi_modal_inputs": absent("media travel as paths, workers read them"),
    },
)
_REWARD_MODEL = {
    "model.path": RenamedKey("worker.reward_model.model.model_path", "a path switches it on"),
    "model.trust_remote_code": RenamedKey("worker.reward_model.model.trust_remote_code"),
    "model.fsdp_config.param_offload": RenamedKey("worker.reward_model.offload.offload_params"),
    "model.fsdp_config.fsdp_size": RenamedKey("worker.reward_model.fsdp.fsdp_size"),
    "model.fsdp_config.reshard_after_forward": RenamedKey("worker.reward_model.fsdp.enable_full_shard"),
    "model": absent("the other options of `worker.reward_model.model` are those of any model"),
    "micro_batch_size_per_gpu": RenamedKey("worker.reward_model.micro_batch_size_per_device"),
    "micro_batch_size": RenamedKey("worker.reward_model.micro_batch_size_per_device", "for each device"),
    "enable": absent("a reward model is used where `worker.reward_model.model.model_path` is set"),
    "strategy": absent("a reward model is sharded by FSDP2"),
    "max_length": absent("a reward model reads whole conversations"),
    "use_dynamic_bsz": absent("a reward model's micro batches are filled by tokens"),
    "forward_max_token_len_per_gpu": RenamedKey(
        "worker.reward_model.micro_batch_size_per_device",
        COUNTS_AS_TOKENS,
    ),
    "ulysses_sequence_parallel_size": RenamedKey("worker.actor.ulysses_size", "one size for all models"),
    "reward_manager": RenamedKey(
        "worker.reward.reward_type",
        "naive and prime are `sequential`, batch is `batch`, dapo the overlong penalty",
    ),
    "launch_reward_fn_async": absent("rewards are always computed beside the passes of the models"),
    "num_workers": RenamedKey("worker.reward.num_cpus", "processes in both"),
    "reward_kwargs.max_resp_len": RenamedKey("data.max_response_length"),
    "enable_resource_pool": absent("a reward model shares the training devices"),
    "n_gpus_per_node": absent("a reward model shares the training devices"),
    "nnodes": absent("a reward model shares the training devices"),
    "rollout": absent(JUDGES),
    "reward_loop_source": absent("a reward is a function in a file"),
    "reward_loop_module_path": absent("a reward is a function in a file"),
    "reward_loop_class_name": absent("a reward is a function in a file"),
    "profiler": absent("name steps in `trainer.profile_steps`"),
    "sandbox_fusion": absent(SANDBOX),
}
_OVERLONG = {
    "enable": absent("a buffer of 0 tokens is no penalty"),
    "len": RenamedKey("worker.reward.overlong_buffer_length", "tokens in both"),
    "penalty_factor": RenamedKey("worker.reward.overlong_penalty_factor"),
    "log": absent("`reward/overlong_penalty` is logged where there is a penalty"),
}
_FUNCTION = {
    "path": RenamedKey(
        "worker.reward.reward_function", "`path.py:name` in one; see the page for the function's arguments"
    ),
    "name": RenamedKey("worker.reward.reward_function", "`path.py:name` in one"),
    "reward_kwargs": RenamedKey("worker.reward.reward_function_kwargs"),
}
_REWARD = (
    under("custom_reward_function", _FUNCTION)
    | under("reward.custom_reward_function", _FUNCTION)
    | under("reward_model", _REWARD_MODEL)
    | under("reward_model.overlong_buffer", _OVERLONG)
    | under("reward_model.reward_kwargs.overlong_buffer_cfg", _OVERLONG)
    | under("reward.reward_kwargs.overlong_buffer_cfg", _OVERLONG)
    | {
        "reward.num_workers": RenamedKey("worker.reward.num_cpus", "processes in both"),
        "reward.reward_manager.name": _REWARD_MODEL["reward_manager"],
        "reward.reward_manager": absent("a reward is a function in a file"),
        "reward.reward_kwargs.max_resp_len": RenamedKey("data.max_response_length"),
        "reward.reward_model.model_path": _REWARD_MODEL["model.path"],
        "reward.reward_model": absent(f"a reward model shares the training devices; {JUDGES}"),
        "reward.sandbox_fusion": absent(SANDBOX),
        "sandbox_fusion": absent(SANDBOX),
    }
)
_ALGORITHM = under(
    "algorithm",
    {
        "norm_adv_by_std_in_grpo": RenamedKey("algorithm.norm_adv_by_std"),
        "use_kl_in_reward": RenamedKey(
            "algorithm.use_kl_loss",
            "false puts the KL into the rewards; no KL is `algorithm.disable_kl=true`",
        ),
        "kl_ctrl.type": RenamedKey("algorithm.kl_type"),
        "kl_ctrl.kl_coef": RenamedKey("algorithm.kl_coef"),
        "kl_ctrl.horizon": RenamedKey("algorithm.kl_horizon"),
        "kl_ctrl.target_kl": RenamedKey("algorithm.kl_target"),
        "filter_groups.enable": RenamedKey("algorithm.online_filtering"),
        "filter_groups.metric": RenamedKey(
            "algorithm.filter_key",
            "a value of the reward function: `overall` for verl's `score` and `seq_reward`",
        ),
        "filter_groups.max_num_gen_batches": RenamedKey("trainer.max_try_make_batch"),
        "filter_groups.max_inflight_gen_batches": absent("the engine samples one batch at a time"),
        "rollout_is": RenamedKey("algorithm.rollout_correction.rollout_is", "token, sequence or null"),
        "rollout_is_level": RenamedKey("algorithm.rollout_correction.rollout_is"),
        "rollout_is_threshold": RenamedKey("algorithm.rollout_correction.rollout_is_threshold"),
    },
)
_TRAINER = under(
    "trainer",
    {
        "total_training_steps": RenamedKey("trainer.max_steps"),
        "test_freq": RenamedKey("trainer.val_freq"),
        "log_val_generations": RenamedKey("trainer.val_generations_to_log"),
        "default_local_dir": RenamedKey("trainer.save_checkpoint_path"),
        "resume_from_path": RenamedKey("trainer.load_checkpoint_path", "checkpoints of this program only"),
        "resume_mode": RenamedKey(
            "trainer.find_last_checkpoint",
            "auto is true, disable is false, a path is `trainer.load_checkpoint_path`",
        ),
        "max_actor_ckpt_to_keep": RenamedKey("trainer.save_limit", "-1, not null, keeps all"),
        "max_critic_ckpt_to_keep": RenamedKey("trainer.save_limit", "one limit for whole checkpoints"),
        "rollout_data_dir": RenamedKey(
            "trainer.rollouts_to_keep", "how many prompts; they lie beside the checkpoints"
        ),
        "validation_data_dir": absent("the logger `file` writes responses of validations: `trainer.logger`"),
        "balance_batch": absent("ranks always get equal work"),
        "default_hdfs_dir": absent("checkpoints go to a folder"),
        "del_local_ckpt_after_load": absent("`trainer.save_limit` removes old checkpoints"),
        "esi_redundant_time": absent("SIGTERM lets the step end and saves"),
        "ray_wait_register_center_timeout": absent("workers that do not start end the run"),
        "use_legacy_worker_impl": absent("there is one implementation"),
        "use_v1": absent("there is one loop, which samples and trains in turn"),
        "v1": absent("there is one loop, which samples and trains in turn"),
    },
)
_REST = {
    "global_profiler.steps": RenamedKey("trainer.profile_steps"),
    "global_profiler": absent("torch's profiler writes traces of the steps in `trainer.profile_steps`"),
    "ray_kwargs.timeline_json_file": RenamedKey("trainer.ray_timeline"),
    "ray_kwargs": absent("a run joins the cluster of `RAY_ADDRESS`, or starts its own"),
    "ray_init": absent("a run joins the cluster of `RAY_ADDRESS`, or starts its own"),
    "distillation": absent("learning from a teacher is not built"),
    "transfer_queue": absent("batches go through the controller"),
    "skip": absent("`scripts/reward_check.py` scores without sampling"),
    "hydra": absent("files are named by `config=FILE`, without Hydra"),
    "*._target_": absent("sections are dataclasses, named by nobody"),
}
VERL_KEYS = RenamedKeys(
    program="verl",
    page="docs/migration/verl.md",
    keys=_DATA | WORKER_KEYS | _REWARD | _ALGORITHM | _TRAINER | _REST,
)
