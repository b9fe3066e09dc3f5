# SPDX-License-Identifier: Apache-2.0
"""Options of EasyR1 and Long-RL that load, but do nothing here; `RunTree` applies these tables.

Keys are an option's name in any section, or its dotted key. When a feature is built, its entries are deleted.
"""

REFUSED = {  # accept only the default; completes "this version has no ..."
    "kl_reward": (
        "weight of that name for the KL in rewards; set `algorithm.use_kl_loss=false` and `algorithm.kl_coef`"
    ),
    "max_frames_vllm": (
        "frames of the engine's own, whose log-probs would not be those of training; set"
        " `worker.rollout.num_video_frames` for both"
    ),
}
_ONE_DIVISION = "the actor's `ulysses_size` and `ring_size` apply to every model"
_BY_TRAINER = "`trainer.diffusion` says so for all"
INERT = {  # accept every value; completes "no effect: ..."
    "vila_model": "the files of a model say whether it is a VILA",
    "group_frames": "the frames of long videos are encoded in parts of bounded size",
    "is_omni": "the files of a model say whether it takes audio",
    "audio_max_length": "audio is not padded, and `data.max_prompt_length` counts its tokens",
    "enable_rank0_init": "rank 0 always reads the weights and sends them to the others",
    "use_orig_params": "FSDP2 always keeps the model's own parameters",
    "padding_free": "sequences are always packed, with the same result",
    "use_torch_compile": (
        "log-probs come from a fused function; set `worker.actor.model.compile_blocks` to compile the model"
    ),
    "worker.critic.ulysses_size": _ONE_DIVISION,
    "worker.ref.ulysses_size": _ONE_DIVISION,
    "worker.ref.cached_embeds_dir": "`worker.actor.cached_embeds_dir` serves every model",
    "worker.rollout.use_cached_embeds": "the engine always reads `worker.actor.cached_embeds_dir`",
    "worker.rollout.trust_remote_code": "`worker.actor.model.trust_remote_code` applies to the engine, too",
    "worker.rollout.bs_vllm": "the engine forms its own batches, of at most `max_num_batched_tokens`",
    **dict.fromkeys(
        ("data.diffusion", *(f"worker.{one}.diffusion" for one in ("actor", "ref", "rollout", "reward"))),
        _BY_TRAINER,
    ),
    "worker.actor.guidance_scale": "`worker.rollout.guidance_scale` applies to training too",
    "worker.ref.guidance_scale": "`worker.rollout.guidance_scale` applies to training too",
    "scheduler": "the model's own scheduler gives the steps",
    "worker.actor.kl_penalty": "`algorithm.kl_penalty` selects it",
}
