# SPDX-License-Identifier: Apache-2.0
"""verl's options of policy, reference, critic and rollout engine by the names that they have here.

`WORKER_KEYS` is a part of `VERL_KEYS` in `verl_keys.py`, which says more.
"""

from collections.abc import Mapping

from verl.config.renamed_keys import RenamedKey, absent

PACKED = "sequences are always packed"
COUNTS_AS_TOKENS = "tokens / the longest sequence: with `dynamic_batching` it counts those"
NO_LOGITS = "log-probs and entropy always come from hidden states, in chunks that fit"
NO_REPLAY = "replay of an expert model's routing is not built"
NO_TOOLS = "conversations with tools are not built"
NO_EFFECT = "without effect"
ONLY_FSDP = "fsdp, which is FSDP2, is the only one"
ONE_SIZE = "one size for all models"
FOR_EACH = "for each device, not for all together"
TRUE_BY_DEFAULT = "true here unless it is set"
OWN_PROFILER = "name steps in `trainer.profile_steps`"
ONE_PASS = "one size for old and reference log-probs"


def under(section: str, keys: Mapping[str, RenamedKey]) -> dict[str, RenamedKey]:
    """The keys of a section by their dotted names."""
    return {f"{section}.{name}": key for name, key in keys.items()}


def _model(ours: str) -> dict[str, RenamedKey]:
    return {
        "path": RenamedKey(f"{ours}.model_path"),
        "tokenizer_path": RenamedKey(f"{ours}.tokenizer_path"),
        "override_config": RenamedKey(f"{ours}.override_config", "without verl's inner `model_config`"),
        "enable_gradient_checkpointing": RenamedKey(f"{ours}.enable_gradient_checkpointing"),
        "trust_remote_code": RenamedKey(f"{ours}.trust_remote_code"),
        "lora_rank": RenamedKey(f"{ours}.lora.rank"),
        "lora_alpha": RenamedKey(f"{ours}.lora.alpha"),
        "lora.rank": RenamedKey(f"{ours}.lora.rank"),
        "lora.alpha": RenamedKey(f"{ours}.lora.alpha"),
        "lora": absent(
            "options of Megatron's adapters; those of transformers' models are in the section `lora`"
        ),
        "target_modules": RenamedKey(f"{ours}.lora.target_modules"),
        "exclude_modules": RenamedKey(f"{ours}.lora.exclude_modules"),
        "lora_adapter_path": RenamedKey(f"{ours}.lora.path"),
        "use_remove_padding": absent(PACKED),
        "use_fused_kernels": absent(NO_LOGITS),
        "fused_kernel_options": absent(NO_LOGITS),
        "use_liger": absent(
            "log-probs always come from hidden states in chunks; other kernels are the model's own"
        ),
        "enable_activation_offload": absent(
            "gradient checkpointing and sequence parallelism save activations"
        ),
        "tiled_mlp": absent("gradient checkpointing and sequence parallelism save activations"),
        "external_lib": absent(
            "models are those of transformers; code that comes with one needs `trust_remote_code`"
        ),
        "hf_config_path": absent(
            "the config is read from the model's folder; change fields by `override_config`"
        ),
        "use_shm": absent("the weights are read once, by rank 0"),
        "mtp": absent("multi-token prediction is not built"),
    }


def _optim(ours: str) -> dict[str, RenamedKey]:
    section = f"{ours}.optim"
    return {
        "lr": RenamedKey(f"{section}.lr"),
        "betas": RenamedKey(f"{section}.betas"),
        "weight_decay": RenamedKey(f"{section}.weight_decay"),
        "lr_warmup_steps_ratio": RenamedKey(f"{section}.lr_warmup_ratio"),
        "lr_warmup_steps": RenamedKey(f"{section}.lr_warmup_steps", "null, not -1, leaves it to the ratio"),
        "lr_scheduler_type": RenamedKey(f"{section}.lr_scheduler_type"),
        "warmup_style": RenamedKey(f"{section}.lr_scheduler_type"),
        "min_lr_ratio": RenamedKey(f"{section}.min_lr_ratio"),
        "clip_grad": RenamedKey(f"{ours}.max_grad_norm"),
        "optimizer": RenamedKey(
            f"{section}.strategy", "adamw, adamw_bf16, adamw_bf16_sr, adamw_8bit or muon"
        ),
        "optimizer_impl": RenamedKey(
            f"{section}.strategy", "adamw, adamw_bf16, adamw_bf16_sr, adamw_8bit or muon"
        ),
        "num_cycles": absent("the cosine falls once"),
        "total_training_steps": absent("the schedule is as long as the run: `trainer.max_steps`"),
        "zero_indexed_step": absent("the rate rises linearly from 0, by the training step"),
        "override_optimizer_config": absent("the optimizer's options are those of the section `optim`"),
    }


def _fsdp(ours: str) -> dict[str, RenamedKey]:
    section = f"{ours}.fsdp"
    return {
        "param_offload": RenamedKey(f"{ours}.offload.offload_params"),
        "optimizer_offload": RenamedKey(f"{ours}.offload.offload_optimizer"),
        "offload_policy": RenamedKey(f"{section}.enable_cpu_offload"),
        "reshard_after_forward": RenamedKey(f"{section}.enable_full_shard", "true or false"),
        "fsdp_size": RenamedKey(f"{section}.fsdp_size"),
        "model_dtype": RenamedKey(f"{section}.torch_dtype"),
        "dtype": RenamedKey(f"{section}.mp_param_dtype"),
        "mixed_precision.param_dtype": RenamedKey(f"{section}.mp_param_dtype"),
        "mixed_precision.reduce_dtype": RenamedKey(f"{section}.mp_reduce_dtype"),
        "mixed_precision.buffer_dtype": RenamedKey(f"{section}.mp_buffer_dtype"),
        "use_orig_params": RenamedKey(f"{section}.use_orig_params", NO_EFFECT),
        "strategy": RenamedKey(f"{ours}.strategy", ONLY_FSDP),
        "ulysses_sequence_parallel_size": RenamedKey("worker.actor.ulysses_size", ONE_SIZE),
        "use_torch_compile": RenamedKey("worker.actor.use_torch_compile", NO_EFFECT),
        "wrap_policy": absent("each block of the model is wrapped"),
        "forward_prefetch": absent("FSDP2 prefetches by itself"),
        "use_no_sync_for_gradient_accumulation": absent("gradients are reduced with each micro batch"),
        "seed": absent("one seed for all: `data.seed`, and `worker.rollout.seed` for sampling"),
        "full_determinism": absent("on CPU runs repeat exactly; on GPUs kernels decide"),
        "entropy_from_logits_with_chunking": absent(NO_LOGITS),
        "entropy_from_logits_chunk_size": absent(NO_LOGITS),
        "entropy_checkpointing": absent(NO_LOGITS),
        "pad_to_length": absent(PACKED),
        "pad_to_length_bucket": absent(PACKED),
        "forward_only": absent("the section says which model it is"),
        "qat": absent("training with quantised weights is not built"),
        "turbo_config": absent("it belongs to another backend"),
    }


def _update(theirs: str, ours: str) -> dict[str, RenamedKey]:
    """What the sections of the policy and the critic share."""
    update = f"{ours}.micro_batch_size_per_device_for_update"
    return under(
        theirs,
        {
            "ppo_mini_batch_size": RenamedKey(f"{ours}.global_batch_size", "prompts in both"),
            "ppo_micro_batch_size_per_gpu": RenamedKey(update, "sequences in both"),
            "ppo_micro_batch_size": RenamedKey(update, FOR_EACH),
            "ppo_max_token_len_per_gpu": RenamedKey(update, COUNTS_AS_TOKENS),
            "use_dynamic_bsz": RenamedKey(f"{ours}.dynamic_batching", TRUE_BY_DEFAULT),
            "loss_agg_mode": RenamedKey(f"{ours}.loss_avg_mode", "verl's names are accepted"),
            "loss_scale_factor": absent("`seq_sum_norm` divides by `data.max_response_length`"),
            "ppo_epochs": RenamedKey(f"{ours}.ppo_epochs"),
            "grad_clip": RenamedKey(f"{ours}.max_grad_norm"),
            "rollout_n": RenamedKey("worker.rollout.n"),
            "strategy": RenamedKey(f"{ours}.strategy", ONLY_FSDP),
            "ulysses_sequence_parallel_size": RenamedKey("worker.actor.ulysses_size", ONE_SIZE),
            "shuffle": absent("mini batches follow the order of the rollout batch"),
            "data_loader_seed": absent("mini batches follow the order of the rollout batch"),
            "checkpoint.async_save": RenamedKey("trainer.async_save", TRUE_BY_DEFAULT),
            "checkpoint.save_contents": RenamedKey("trainer.save_model_only", "true for the weights alone"),
            "checkpoint.contents": RenamedKey("trainer.save_model_only", "true for the weights alone"),
            "checkpoint": absent("what a checkpoint holds is loaded; see docs/checkpoints.md"),
            "profiler": absent(OWN_PROFILER),
        },
    ) | under(f"{theirs}.optim", _optim(ours))  # fmt: skip


def _log_probs(theirs: str) -> dict[str, RenamedKey]:
    """The sizes of passes without update, which stand in two of verl's sections."""
    ours = "worker.actor.micro_batch_size_per_device_for_experience"
    return under(
        theirs,
        {
            "log_prob_micro_batch_size_per_gpu": RenamedKey(ours, ONE_PASS),
            "log_prob_micro_batch_size": RenamedKey(ours, FOR_EACH),
            "log_prob_max_token_len_per_gpu": RenamedKey(ours, COUNTS_AS_TOKENS),
            "log_prob_use_dynamic_bsz": RenamedKey("worker.actor.dynamic_batching", TRUE_BY_DEFAULT),
            "profiler": absent(OWN_PROFILER),
        },
    )


_SAME_IN_LOSS = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
_ACTOR = under(
    "actor_rollout_ref.actor",
    {
        "clip_ratio": RenamedKey(
            "worker.actor.clip_ratio_low", "set `worker.actor.clip_ratio_high` to it as well"
        ),
        "clip_ratio_low": RenamedKey("worker.actor.clip_ratio_low"),
        "clip_ratio_high": RenamedKey(
            "worker.actor.clip_ratio_high", "0.3 here unless it is set, 0.2 in verl"
        ),
        "clip_ratio_c": RenamedKey("worker.actor.clip_ratio_dual"),
        "tau_pos": RenamedKey("worker.actor.tau_positive"),
        "tau_neg": RenamedKey("worker.actor.tau_negative"),
        "policy_loss.loss_mode": RenamedKey("worker.actor.loss_type", "`vanilla` is `default`"),
        **{f"policy_loss.{name}": RenamedKey(f"worker.actor.{name}") for name in _SAME_IN_LOSS},
        "freeze_vision_tower": RenamedKey("worker.actor.model.freeze_vision_tower"),
        "entropy_coeff": RenamedKey("worker.actor.entropy_coef"),
        "calculate_entropy": absent("`actor/entropy` is always logged"),
        "calculate_sum_pi_squared": absent("it is computed for the estimators that read it"),
        "use_kl_loss": RenamedKey(
            "algorithm.use_kl_loss", "with false for both of verl's KLs: `algorithm.disable_kl=true`"
        ),
        "kl_loss_coef": RenamedKey("algorithm.kl_coef"),
        "kl_loss_type": RenamedKey(
            "algorithm.kl_penalty", "`k1` is `kl`, `k2` is `mse`, `k3` is `low_var_kl`"
        ),
        "use_prefix_grouper": RenamedKey("worker.actor.share_prompt", TRUE_BY_DEFAULT),
        "use_torch_compile": RenamedKey("worker.actor.use_torch_compile", NO_EFFECT),
        "use_remove_padding": absent(PACKED),
        "use_fused_kernels": absent(NO_LOGITS),
        "entropy_from_logits_with_chunking": absent(NO_LOGITS),
        "entropy_from_logits_chunk_size": absent(NO_LOGITS),
        "entropy_checkpointing": absent(NO_LOGITS),
        "pad_to_length": absent(PACKED),
        "tis_imp_ratio_cap": RenamedKey(
            "algorithm.rollout_correction.rollout_is_threshold",
            "with `algorithm.rollout_correction.rollout_is=token`",
        ),
        "router_replay": absent(NO_REPLAY),
        "qat": absent("training with quantised weights is not built"),
        "megatron": absent("the backend is FSDP2"),
    },
)
_REF = under(
    "actor_rollout_ref.ref",
    {
        "strategy": RenamedKey("worker.ref.strategy", ONLY_FSDP),
        "rollout_n": RenamedKey("worker.rollout.n"),
        "use_torch_compile": RenamedKey("worker.actor.use_torch_compile", NO_EFFECT),
        "ulysses_sequence_parallel_size": RenamedKey("worker.actor.ulysses_size", ONE_SIZE),
        "model": absent("the reference is the policy as it was at the start"),
        "entropy_from_logits_with_chunking": absent(NO_LOGITS),
        "entropy_from_logits_chunk_size": absent(NO_LOGITS),
        "entropy_checkpointing": absent(NO_LOGITS),
        "pad_to_length": absent(PACKED),
        "router_replay": absent(NO_REPLAY),
        "megatron": absent("the backend is FSDP2"),
    },
)
_SAME_IN_ROLLOUT = (
    *("temperature", "top_p", "top_k", "n", "dtype", "gpu_memory_utilization", "ignore_eos", "enforce_eager"),
    *("max_num_batched_tokens", "max_model_len", "disable_log_stats", "seed", "limit_images"),
)
_ROLLOUT = under(
    "actor_rollout_ref.rollout",
    {
        "name": RenamedKey("worker.rollout.name", "vllm or hf"),
        **{name: RenamedKey(f"worker.rollout.{name}") for name in _SAME_IN_ROLLOUT},
        "enable_chunked_prefill": RenamedKey(
            "worker.rollout.enable_chunked_prefill", "false here unless it is set"
        ),
        "tensor_model_parallel_size": RenamedKey("worker.rollout.tensor_parallel_size"),
        "prompt_length": RenamedKey("data.max_prompt_length"),
        "response_length": RenamedKey("data.max_response_length"),
        **{
            f"val_kwargs.{name}": RenamedKey(
                f"worker.rollout.val_override_config.{name}", "as in training unless it is set"
            )
            for name in ("temperature", "top_p", "top_k")
        },
        "val_kwargs.n": RenamedKey("worker.rollout.val_override_config.n"),
        "val_kwargs.do_sample": absent("a temperature of 0 is greedy"),
        "do_sample": absent("training samples; `adv_estimator=remax` adds greedy responses"),
        "mode": absent("the engine runs in the worker processes"),
        "calculate_log_probs": absent("the engine's log-probs are always compared with the trainer's"),
        "logprobs_mode": absent(
            "the engine reports what the trainer computes: with temperature, before top-p"
        ),
        "free_cache_engine": absent("on GPUs the engine always gives its memory back"),
        "max_num_seqs": absent("the engine's own limit holds"),
        "enable_prefix_caching": absent("it is always on"),
        "load_format": absent("weights always come from the trainer"),
        "layered_summon": absent("weights are handed over one parameter at a time"),
        "engine_kwargs": absent("what the engine is built with are the options of `worker.rollout`"),
        "cudagraph_capture_sizes": absent("the engine chooses; `worker.rollout.enforce_eager` captures none"),
        "multi_turn": absent(NO_TOOLS),
        "agent": absent(NO_TOOLS),
        "skip": absent("`scripts/reward_check.py` scores without sampling"),
        "skip_rollout": absent("`scripts/reward_check.py` scores without sampling"),
        "skip_dump_dir": absent("`scripts/reward_check.py` scores without sampling"),
        "trace": absent("kept rollouts and their page: `trainer.rollouts_to_keep`, `trainer.viewer_port`"),
        "prometheus": absent("throughput and memory are metrics of every step"),
        "checkpoint_engine": absent("weights are handed over inside each process"),
        "update_weights_bucket_megabytes": absent("weights are handed over inside each process"),
        **{
            name: absent("engines on devices of their own are not built")
            for name in ("nnodes", "n_gpus_per_node", "disaggregation", "over_sample_rate")
        },
        **{
            name: absent("an engine is divided by tensor parallelism only")
            for name in ("data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size")
        },
        **{
            name: absent("the engine's own behaviour holds")
            for name in ("multi_stage_wake_up", "scheduling_policy", "skip_tokenizer_init")
        },
        **{
            name: absent("the engine samples with the trained weights, unquantised")
            for name in ("quantization", "quantization_config_file", "qat", "mtp")
        },
        "full_determinism": absent("the engine's own behaviour holds"),
        "use_preprocessed_multimodal_input": absent(
            "prompts go to the engine as tokens, media as decoded once"
        ),
        "enable_rollout_routing_replay": absent(NO_REPLAY),
        "moe_load_balance_metrics_interval": absent("the routing of expert models is not measured"),
        "use_fire_sampling": absent("it is not built"),
        "chat_scheduler": absent(NO_TOOLS),
    },
)
_CRITIC = under(
    "critic",
    {
        "enable": absent("there is a critic with `algorithm.adv_estimator=gae`"),
        "forward_micro_batch_size_per_gpu": RenamedKey(
            "worker.critic.micro_batch_size_per_device_for_experience", "sequences in both"
        ),
        "forward_micro_batch_size": RenamedKey(
            "worker.critic.micro_batch_size_per_device_for_experience", FOR_EACH
        ),
        "forward_max_token_len_per_gpu": RenamedKey(
            "worker.critic.micro_batch_size_per_device_for_experience", COUNTS_AS_TOKENS
        ),
        "cliprange_value": RenamedKey("worker.critic.cliprange_value"),
        "megatron": absent("the backend is FSDP2"),
    },
)
WORKER_KEYS = (
    under("actor_rollout_ref.model", _model("worker.actor.model"))
    | {
        "actor_rollout_ref.model.custom_chat_template": RenamedKey(
            "data.override_chat_template", "a file, not its text"
        )
    }
    | _update("actor_rollout_ref.actor", "worker.actor")
    | _ACTOR
    | under("actor_rollout_ref.actor.fsdp_config", _fsdp("worker.actor"))
    | _log_probs("actor_rollout_ref.ref")
    | _REF
    | under("actor_rollout_ref.ref.fsdp_config", _fsdp("worker.ref"))
    | _log_probs("actor_rollout_ref.rollout")
    | _ROLLOUT
    | {
        "actor_rollout_ref.hybrid_engine": RenamedKey("worker.hybrid_engine", "true is the only one"),
        "actor_rollout_ref.nccl_timeout": RenamedKey(
            "trainer.worker_timeout_s", "seconds without progress of any rank"
        ),
    }
    | under("critic.model", _model("worker.critic.model"))
    | {
        "critic.model.custom_chat_template": absent(
            "prompts are rendered once: `data.override_chat_template`"
        )
    }
    | _update("critic", "worker.critic")
    | _CRITIC
    | under("critic.fsdp", _fsdp("worker.critic"))
    | under("critic.model.fsdp_config", _fsdp("worker.critic"))
)
