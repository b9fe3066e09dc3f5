# SPDX-License-Identifier: Apache-2.0
"""Options of the processes that hold the models: actor, critic, reference, rollout engine, reward function.

An option whose feature is not built is declared all the same, with `unavailable="..."`: it is accepted at its
neutral value and refused by name otherwise. Whoever builds the feature deletes that argument.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.utils.config import option
from verl.utils.config_paths import function_in_file, model_source

DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
}
TINY = 1e-6  # the smallest value of an option that must be above zero
SAMPLING_PARAMETERS = (  # vLLM's; others are handed on to it, so this list only helps to find slips
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids"),
    *("stop", "stop_token_ids", "bad_words", "skip_special_tokens", "include_stop_str_in_output"),
)
VILA = "VILA models"
FIXED_FRAMES = "fixed number of frames (see `data.video_fps`)"
DIFFUSION = "diffusion models"


def short_dtype(name: str) -> str:
    """Return `bf16`, `fp16` or `fp32` for it or for torch's name of it."""
    return DTYPES[name]


def dtype_option(default: str | None, help: str) -> Any:
    """Declare an option that names a floating-point type."""
    return option(default, help=help, choices=tuple(DTYPES), resolve=short_dtype)


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters instead of full weights."""

    rank: int = option(
        0, help="Rank of the adapters; 0 trains the full weights.", minimum=0, unavailable="LoRA"
    )
    alpha: int = option(64, help="Scale of the adapters, divided by the rank.", minimum=1)
    target_modules: str = option(
        "all-linear", help="Modules with an adapter: `all-linear` or names and commas."
    )
    exclude_modules: str | None = option(None, help="Regular expression of modules without an adapter.")


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model_path: str | None = option(
        None,
        help="Model folder or hub name; required for the actor.",
        resolve=model_source,
    )
    tokenizer_path: str | None = option(
        None,
        help="Folder or hub name of tokenizer and processor; null is `model_path`.",
        resolve=model_source,
    )
    override_config: dict[str, Any] = option(dict, help="Fields of the model's own config to replace.")
    enable_gradient_checkpointing: bool = option(
        True, help="Recompute activations in backward to save memory."
    )
    trust_remote_code: bool = option(False, help="Run Python code that comes with the model; off for safety.")
    freeze_vision_tower: bool = option(False, help="Train the language model only.")
    lora: LoraConfig = option(LoraConfig, help="Low-rank adapters.")

    def __post_init__(self) -> None:
        """Take the tokenizer from the model unless it is named."""
        if self.tokenizer_path is None:
            object.__setattr__(self, "tokenizer_path", self.model_path)


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning rate."""

    lr: float = option(1e-6, help="Peak learning rate.", minimum=0.0)
    betas: tuple[float, float] = option((0.9, 0.999), help="Decay rates of AdamW's two moments, in [0, 1).")
    weight_decay: float = option(1e-2, help="Decoupled weight decay.", minimum=0.0)
    strategy: str = option(
        "adamw",
        help="`adamw`, or `adamw_bf16` with weights and moments in bf16 and Kahan summation.",
        choices=("adamw", "adamw_bf16"),
    )
    lr_warmup_ratio: float = option(
        0.0, help="Share of the training steps in which the rate rises from 0.", minimum=0.0, maximum=1.0
    )
    lr_warmup_steps: int | None = option(
        None, help="Training steps in which the rate rises from 0; wins over the ratio.", minimum=0
    )
    min_lr_ratio: float | None = option(
        None, help="Final rate of a cosine schedule as a share of `lr`; null is 0.", minimum=0.0, maximum=1.0
    )
    lr_scheduler_type: str = option("constant", help="Rate after warm-up.", choices=("constant", "cosine"))

    def problems(self, path: str) -> Iterator[str]:
        """Yield what is wrong with the moments."""
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            yield f"`{path}.betas` must be in [0, 1), got {list(self.betas)}"


@dataclass(frozen=True)
class FSDPConfig:
    """How weights are sharded over ranks, and in which type they compute."""

    enable_full_shard: bool = option(
        True, help="Shard weights again after forward; false keeps them until backward."
    )
    enable_cpu_offload: bool = option(
        False, help="Keep shards in CPU memory and copy them when they are used."
    )
    enable_rank0_init: bool = option(
        True,
        help="Read the weights on rank 0 and send them.",
        inert="rank 0 always reads, the others receive",
    )
    use_orig_params: bool = option(
        False, help="Keep the model's own parameters.", inert="FSDP2 always keeps the model's own parameters"
    )
    torch_dtype: str | None = dtype_option(
        None, "Type the weights are stored in; null is fp32 for training and bf16 for the reference."
    )
    fsdp_size: int = option(
        -1,
        help="Ranks that share one copy of the weights; -1 is all, fewer is hybrid sharding.",
        minimum=1,
        also=(-1,),
    )
    mp_param_dtype: str = dtype_option("bf16", "Type of weights and activations in forward and backward.")
    mp_reduce_dtype: str = dtype_option("fp32", "Type in which gradients are summed over ranks.")
    mp_buffer_dtype: str = dtype_option("fp32", "Type of buffers such as rotary frequencies.")


@dataclass(frozen=True)
class OffloadConfig:
    """What leaves the GPU while it is not used."""

    offload_params: bool = option(
        False, help="Move weights to CPU memory between uses: less GPU memory, more CPU memory."
    )
    offload_optimizer: bool = option(False, help="Move the optimizer's state to CPU memory between updates.")


@dataclass(frozen=True)
class ActorConfig:
    """The policy and its update."""

    strategy: str = option("fsdp", help="How the model is distributed.", choices=("fsdp",))
    global_batch_size: int = option(
        256, help="Prompts in a mini batch: one optimizer step.", minimum=1, example=128
    )
    micro_batch_size_per_device_for_update: int = option(
        4, help="Sequences a device runs forward and backward at once.", minimum=1, example=1
    )
    micro_batch_size_per_device_for_experience: int = option(
        16, help="Sequences a device runs forward at once for log-probs.", minimum=1, example=2
    )
    max_grad_norm: float = option(1.0, help="Gradients are scaled down to this norm.", minimum=TINY)
    clip_ratio_low: float = option(
        0.2, help="The ratio is clipped at 1 minus this.", minimum=0.0, maximum=1.0
    )
    clip_ratio_high: float = option(0.3, help="The ratio is clipped at 1 plus this.", minimum=0.0)
    clip_ratio_dual: float = option(
        3.0, help="For negative advantages the ratio counts at most this much (dual clip).", minimum=1.0
    )
    loss_avg_mode: str = option(
        "token",
        help="Mean of the loss over all tokens, or over sequences of each one's mean.",
        choices=("token", "seq"),
    )
    loss_type: str = option(
        "default",
        help="Policy loss.",
        choices=("default", "gspo", "gspo_token", "cispo", "sapo"),
        supported=("default",),
        unavailable="other policy loss",
    )
    entropy_coef: float = option(0.0, help="Weight of the entropy bonus.", minimum=0.0)
    ppo_epochs: int = option(1, help="Passes over a rollout batch.", minimum=1)
    padding_free: bool = option(
        True,
        help="Remove padding before the model.",
        inert="sequences are always packed, the result is the same",
    )
    dynamic_batching: bool = option(
        True,
        help="Fill a micro batch up to the tokens of its size x the longest sequence, not by sequences.",
    )
    ulysses_size: int = option(
        1, help="Ranks that share one sequence.", minimum=1, unavailable="sequence parallelism"
    )
    use_torch_compile: bool = option(
        True,
        help="Compile the log-prob function.",
        inert="log-probs come from a fused function without compilation",
    )
    tau_positive: float = option(
        1.0, help="Temperature for advantages >= 0 in the `sapo` loss.", minimum=TINY
    )
    tau_negative: float = option(
        1.05, help="Temperature for advantages < 0 in the `sapo` loss.", minimum=TINY
    )
    vila_model: bool = option(False, help="The model is of the VILA family.", unavailable=VILA)
    diffusion: bool = option(False, help="The model makes images or videos.", unavailable=DIFFUSION)
    guidance_scale: float = option(4.5, help="Classifier-free guidance of diffusion.", unavailable=DIFFUSION)
    scheduler: str = option("", help="Noise schedule of diffusion.", unavailable=DIFFUSION)
    cached_embeds_dir: str | None = option(
        None,
        help="Folder of vision embeddings computed before.",
        unavailable="cache of vision embeddings on disk",
    )
    model: ModelConfig = option(
        ModelConfig,
        help="Which model, and how it is loaded.",
        example={"model_path": "Qwen/Qwen2.5-7B-Instruct", "lora": {"exclude_modules": ".*visual.*"}},
    )
    optim: OptimConfig = option(OptimConfig, help="Optimizer and learning rate.")
    fsdp: FSDPConfig = option(FSDPConfig, help="Sharding and number types.")
    offload: OffloadConfig = option(
        OffloadConfig,
        help="What leaves the GPU while it is not used.",
        example={"offload_params": True, "offload_optimizer": True},
    )


@dataclass(frozen=True)
class CriticConfig:
    """The value model and its update."""

    strategy: str = option("fsdp", help="How the model is distributed.", choices=("fsdp",))
    global_batch_size: int = option(256, help="Prompts in a mini batch: one optimizer step.", minimum=1)
    micro_batch_size_per_device_for_update: int = option(
        4, help="Sequences a device runs forward and backward at once.", minimum=1
    )
    micro_batch_size_per_device_for_experience: int = option(
        16, help="Sequences a device runs forward at once for values.", minimum=1
    )
    max_grad_norm: float = option(1.0, help="Gradients are scaled down to this norm.", minimum=TINY)
    cliprange_value: float = option(0.5, help="Values move at most this far from the old ones.", minimum=0.0)
    loss_avg_mode: str = option(
        "token", help="Mean of the loss over tokens or sequences.", choices=("token", "seq")
    )
    ppo_epochs: int = option(1, help="Passes over a rollout batch.", minimum=1)
    padding_free: bool = option(False, help="Remove padding before the model.")
    dynamic_batching: bool = option(True, help="Fill micro batches up to a number of tokens.")
    ulysses_size: int = option(1, help="Ranks that share one sequence.", minimum=1)
    model: ModelConfig = option(ModelConfig, help="Which model, and how it is loaded.")
    optim: OptimConfig = option(OptimConfig, help="Optimizer and learning rate.")
    fsdp: FSDPConfig = option(FSDPConfig, help="Sharding and number types.")
    offload: OffloadConfig = option(OffloadConfig, help="What leaves the GPU while it is not used.")


@dataclass(frozen=True)
class RefConfig:
    """The frozen reference policy; model, micro batches and packing are the actor's."""

    strategy: str = option("fsdp", help="How the model is distributed.", choices=("fsdp",))
    vila_model: bool = option(False, help="The model is of the VILA family.", unavailable=VILA)
    diffusion: bool = option(False, help="The model makes images or videos.", unavailable=DIFFUSION)
    guidance_scale: float = option(4.5, help="Classifier-free guidance of diffusion.", unavailable=DIFFUSION)
    scheduler: str = option("", help="Noise schedule of diffusion.", unavailable=DIFFUSION)
    fsdp: FSDPConfig = option(
        FSDPConfig, help="Sharding and number types.", example={"enable_cpu_offload": True}
    )
    offload: OffloadConfig = option(OffloadConfig, help="What leaves the GPU while it is not used.")


@dataclass(frozen=True)
class RolloutConfig:
    """The engine that samples responses."""

    name: str = option(
        "vllm", help="Engine: vLLM, or transformers' own generation as reference.", choices=("vllm", "hf")
    )
    n: int = option(1, help="Responses to each prompt: one group.", minimum=1, example=5)
    temperature: float = option(1.0, help="Sampling temperature; log-probs use it too.", minimum=0.01)
    top_p: float = option(
        1.0, help="Sample from the smallest set with this probability.", minimum=TINY, maximum=1.0
    )
    top_k: int = option(-1, help="Sample from this many tokens; -1 is all.", minimum=1, also=(-1, 0))
    seed: int = option(1, help="Seed of sampling.", minimum=0)
    limit_images: int = option(0, help="Images in a prompt at most; 0 is the engine's own limit.", minimum=0)
    dtype: str = dtype_option("bf16", "Type of the engine's weights and activations.")
    gpu_memory_utilization: float = option(
        0.6, help="Share of GPU memory for the engine while it is awake.", minimum=0.01, maximum=1.0
    )
    ignore_eos: bool = option(False, help="Sample on after the end token; for measurements.")
    enforce_eager: bool = option(False, help="Do not capture CUDA graphs: starts faster, samples slower.")
    enable_chunked_prefill: bool = option(False, help="Let the engine split long prompts over its steps.")
    tensor_parallel_size: int = option(2, help="Ranks that hold one engine.", minimum=1)
    max_model_len: int | None = option(
        None, help="Tokens of a sequence at most; null is prompt and response length together.", minimum=1
    )
    max_num_batched_tokens: int = option(8192, help="Tokens the engine runs in one step at most.", minimum=1)
    disable_log_stats: bool = option(True, help="Keep the engine from logging its statistics.")
    disable_tqdm: bool = option(False, help="Show no progress bar while sampling.")
    val_override_config: dict[str, Any] = option(
        dict,
        help="Sampling parameters for validation, such as n, temperature, top_p, max_tokens.",
        example={"temperature": 0.6, "top_p": 0.95, "n": 1},
    )
    num_video_frames: int = option(8, help="Frames of a video.", unavailable=FIXED_FRAMES)
    tokens_per_frame: int = option(256, help="Tokens of a video frame.", unavailable=VILA)
    group_frames: int = option(64, help="Frames encoded at once.", unavailable=VILA)
    max_frames_vllm: int = option(-1, help="Frames the engine sees; -1 is all.", unavailable=VILA)
    num_chunk_seq: int = option(
        -1, help="Pieces in which videos are gathered.", unavailable="chunked gather of videos"
    )
    audio_max_length: int = option(10000, help="Audio samples at most.", unavailable="audio")
    open_ended_reward: bool = option(
        False, help="Score with a language model.", unavailable="built-in language judge"
    )
    diffusion: bool = option(False, help="Sample images or videos.", unavailable=DIFFUSION)
    guidance_scale: float = option(4.5, help="Classifier-free guidance of diffusion.", unavailable=DIFFUSION)
    resolution: int = option(768, help="Image side in pixels.", unavailable=DIFFUSION)
    num_steps: int = option(10, help="Denoising steps.", unavailable=DIFFUSION)
    kl_reward: float = option(0.0, help="Weight of the KL in the reward of diffusion.", unavailable=DIFFUSION)
    num_frames: int = option(81, help="Frames of a sampled video.", unavailable=DIFFUSION)
    height: int = option(480, help="Height of a sampled video in pixels.", unavailable=DIFFUSION)
    width: int = option(832, help="Width of a sampled video in pixels.", unavailable=DIFFUSION)

    def problems(self, path: str) -> Iterator[str]:
        """Yield what is wrong with the engine and with the parameters for validation."""
        if self.name == "hf" and self.tensor_parallel_size != 1:
            size = self.tensor_parallel_size
            yield f"`{path}.tensor_parallel_size` must be 1 with `{path}.name=hf`, got {size}"
        for name in self.val_override_config:
            nearest = difflib.get_close_matches(str(name), SAMPLING_PARAMETERS, n=1, cutoff=0.8)
            if nearest and name not in SAMPLING_PARAMETERS:
                key = f"{path}.val_override_config.{name}"
                yield f"`{key}` is not a sampling parameter; did you mean `{nearest[0]}`?"
        for name, minimum in (("n", 1), ("temperature", 0), ("max_tokens", 1)):
            value = self.val_override_config.get(name, minimum)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < minimum:
                yield f"`{path}.val_override_config.{name}` must be at least {minimum}, got {value!r}"


@dataclass(frozen=True)
class RewardConfig:
    """The function that scores responses."""

    reward_function: str | None = option(
        None,
        help="`file.py:function` that scores a response; the function is `main` if not named.",
        resolve=function_in_file,
        example="./examples/reward_function/math.py:compute_score",
    )
    reward_function_kwargs: dict[str, Any] = option(dict, help="Arguments passed to the function by name.")
    reward_type: str = option(
        "batch",
        help="Calling convention of a file that has no `REWARD_TYPE`.",
        choices=("batch", "sequential", "dataproto"),
    )
    skip_special_tokens: bool = option(True, help="Leave special tokens out of the response's text.")
    num_cpus: int = option(1, help="Processes that score at the same time.", minimum=1)
    timeout_s: float = option(300.0, help="Seconds one call of the function may take.", minimum=TINY)
    batch_size: int = option(
        -1,
        help="Responses in one call of a `batch` function; -1 is whole groups as they finish.",
        minimum=1,
        also=(-1,),
    )
    diffusion: bool = option(False, help="Score images or videos.", unavailable=DIFFUSION)


@dataclass(frozen=True)
class WorkerConfig:
    """Everything that runs in the processes of the devices."""

    hybrid_engine: bool = option(
        True, help="Train and sample in the same processes.", unavailable="separate processes for sampling"
    )
    vila_model: bool = option(False, help="The model is of the VILA family.", unavailable=VILA)
    is_omni: bool = option(False, help="The model hears audio.", unavailable="audio")
    actor: ActorConfig = option(ActorConfig, help="The policy and its update.")
    critic: CriticConfig = option(
        CriticConfig,
        help="The value model and its update.",
        unavailable="critic (`algorithm.adv_estimator=gae`)",
    )
    ref: RefConfig = option(RefConfig, help="The frozen reference policy.")
    rollout: RolloutConfig = option(RolloutConfig, help="The engine that samples responses.")
    reward: RewardConfig = option(RewardConfig, help="The function that scores responses.")
