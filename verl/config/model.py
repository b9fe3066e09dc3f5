# SPDX-License-Identifier: Apache-2.0
"""Options of one model in any role: files, adapters, optimizer, sharding, offloading, batch sizes.

Roles inherit `TrainedModelConfig`. A role with another default or help declares the option again.
"""

import importlib.util
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from verl.config.files.model_files import folder_problem, pipeline_folder, tokenizer_of
from verl.config.files.paths import existing_folder, model_source, writable_folder
from verl.config.schema import option

DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32",
    "bf16": "bf16", "fp16": "fp16", "fp32": "fp32",
}  # fmt: skip
TINY = 1e-6  # smallest value of an option that must be positive
AUTO = "auto"  # what the plan of memory chooses; the trainer replaces it by the choice
MicroBatchSize = int | Literal["auto"]
Switch = bool | Literal["auto"]


def dtype_option(default: str | None, help: str) -> Any:
    """Declare an option for a floating-point type, whose value becomes `bf16`, `fp16` or `fp32`."""
    return option(default, help, choices=tuple(DTYPES), resolve=DTYPES.__getitem__)


def micro_batch_option(default: int, use: str) -> Any:
    """Declare an option for the number of sequences that a device processes at once; `use` ends its help."""
    help = f"Sequences per device in a micro batch for {use}; `auto` is as many as fit."
    return option(default, help, minimum=1, also=(AUTO,))


def as_number(size: MicroBatchSize) -> int:
    """Return a micro batch size that is a number by now."""
    assert size != AUTO, "the trainer replaces `auto` before workers start"
    return int(size)


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters."""

    rank: int = option(0, "Rank; 0 trains the full weights, or uses the rank of `path`.", minimum=0)
    alpha: int = option(64, "Scale, which is divided by the rank.", minimum=1)
    target_modules: str | None = option(
        "all-linear",
        "Modules with adapters: `all-linear`, comma-separated names, or a regular expression; null: none.",
    )
    exclude_modules: str | None = option(None, "Modules without adapters: names or a regular expression.")
    use_rslora: bool = option(False, "Divide alpha by the square root of the rank (rsLoRA).")
    use_dora: bool = option(False, "Learn magnitude and direction of weight rows separately (DoRA).")
    path: str | None = option(
        None, "Initial PEFT adapter folder; its config overrides this section.", resolve=existing_folder
    )
    target_parameters: list[str] = option(
        list, "Tensors with adapters outside of linear modules, by endings of names: `experts.down_proj`."
    )

    @property
    def is_used(self) -> bool:
        return self.rank > 0 or self.path is not None

    def problems(self, path: str) -> Iterator[str]:
        if self.target_parameters and self.use_dora:
            yield f"`{path}.use_dora` is not possible with `target_parameters`: DoRA is for modules only"
        if self.is_used and self.target_modules is None and not (self.target_parameters or self.path):
            yield f"`{path}.target_modules` may be null only if `target_parameters` names tensors to adapt"


@dataclass(frozen=True)
class ModelConfig:
    """Model and trainable parameters."""

    model_path: str | None = option(None, "Folder or hub name; required for the actor.", resolve=model_source)
    tokenizer_path: str | None = option(
        None, "Folder or hub name of the tokenizer and processor; null is `model_path`.", resolve=model_source
    )
    override_config: dict[str, Any] = option(dict, "Fields of the model config to override.")
    enable_gradient_checkpointing: bool | float | Literal["auto"] = option(
        AUTO, "Recompute activations of all or some blocks; `auto`: of few.", minimum=0.0, maximum=1.0
    )
    compile_blocks: Switch = option(
        AUTO, "Compile the language model's blocks, for faster steps; `auto`: on GPUs, types that are tested."
    )
    trust_remote_code: bool = option(False, "Allow Python code that comes with the model; off for security.")
    freeze_vision_tower: bool = option(False, "Do not train the vision tower and its projector.")
    freeze_audio_tower: bool = option(False, "Do not train the encoder of audio.")
    train_modules: list[str] = option(
        list, "Regular expressions for the names of parameters: train only these; with `lora`, also these."
    )
    freeze_modules: list[str] = option(
        list, "Regular expressions for the names of parameters to freeze; overrides `train_modules`."
    )
    lora: LoraConfig = option(LoraConfig, "Low-rank adapters.")
    family: str | None = option(
        None, "Model family of a file, `FILE.py:NAME`, for another type of model.", extension="model family"
    )
    router_aux_loss_coef: float = option(
        0.0, "Weight of the loss that balances experts over the tokens of an update.", minimum=0.0
    )
    freeze_router: bool = option(False, "Freeze a mixture's routers; with `lora` they have no adapters.")

    def __post_init__(self) -> None:
        if self.tokenizer_path is None:
            object.__setattr__(self, "tokenizer_path", tokenizer_of(self.model_path))

    @property
    def is_pipeline(self) -> bool:
        """True for a diffusion model, with the other parts of its pipeline."""
        return pipeline_folder(self.model_path) is not None

    @property
    def recomputed(self) -> float:
        """Share of the blocks whose activations are recomputed: all, where nothing chose for `auto`."""
        return 1.0 if (share := self.enable_gradient_checkpointing) == AUTO else float(share)

    def runs_tiles(self, *, is_trained: bool) -> bool:
        """Return whether MLPs run in tiles: not where states are kept, nor in blocks known to be compiled."""
        return self.compile_blocks is not True and (not is_trained or self.recomputed == 1)

    def problems(self, path: str) -> Iterator[str]:
        if self.model_path and (problem := folder_problem(self.model_path, path)):
            yield f"`{path}.model_path` {problem}"


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning rate schedule."""

    lr: float = option(1e-6, "Peak learning rate.", minimum=0.0)
    lr_factors: dict[str, float] = option(
        dict, "Factors of `lr` by regular expressions for the names of parameters; the first match applies."
    )
    betas: tuple[float, float] = option((0.9, 0.999), "AdamW betas, in [0, 1).")
    weight_decay: float = option(1e-2, "Decoupled weight decay.", minimum=0.0)
    strategy: str = option(
        "adamw",
        "Optimizer: `adamw`; for bf16 weights `adamw_bf16` (Kahan summation) or `adamw_bf16_sr`"
        " (stochastic rounding); `adamw_8bit` with 8-bit moments; `muon` for matrices.",
        choices=("adamw", "adamw_bf16", "adamw_bf16_sr", "adamw_8bit", "muon"),
        extension="optimizer",
    )
    lr_warmup_ratio: float = option(0.0, "Warm-up as a fraction of training steps.", minimum=0.0, maximum=1.0)
    lr_warmup_steps: int | None = option(None, "Warm-up steps; overrides `lr_warmup_ratio`.", minimum=0)
    min_lr_ratio: float | None = option(None, "Final fraction of `lr`; null is 0.", minimum=0.0, maximum=1.0)
    lr_scheduler_type: str = option(
        "constant",
        "Schedule after warm-up; `wsd` is constant, then decays in the last steps. Alias: `warmup_style`.",
        choices=("constant", "linear", "cosine", "wsd"),
        extension="learning-rate schedule",
        alias="warmup_style",
    )
    lr_decay_ratio: float = option(0.2, "Fraction of steps in the `wsd` decay.", minimum=TINY, maximum=1.0)
    lr_decay_shape: str = option(
        "sqrt", "Decay of `wsd`; `sqrt` is 1 - sqrt(progress).", choices=("linear", "cosine", "sqrt")
    )

    def problems(self, path: str) -> Iterator[str]:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            yield f"`{path}.betas` must be in [0, 1), got {list(self.betas)}"
        for pattern, factor in self.lr_factors.items():
            name = f"`{path}.lr_factors` ({pattern})"
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                yield f"{name} must be a regular expression: {error}"
            is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
            if not is_number or not 0.0 < factor < math.inf:
                yield f"{name} must be a number above 0, got {factor!r}: `freeze_modules` freezes parameters"
        if self.strategy == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
            yield f"`{path}.strategy` (adamw_8bit) needs torchao: pip install 'easy-verl[torchao]'"


@dataclass(frozen=True)
class FSDPConfig:
    """Sharding and number types."""

    enable_full_shard: bool = option(True, "Reshard weights after forward instead of after backward.")
    enable_cpu_offload: bool = option(False, "Keep the shards in CPU memory and copy them on use.")
    enable_rank0_init: bool = option(True, "Read the weights on rank 0 and broadcast them.")
    use_orig_params: bool = option(False, "Keep the model's own parameters.")
    torch_dtype: str | None = dtype_option(None, "Type of stored weights; null is fp32 to train, else bf16.")
    fsdp_size: int = option(
        -1, "Ranks per copy of the weights; -1 is all, fewer is hybrid sharding.", minimum=1, also=(-1,)
    )
    expert_parallel_size: int = option(
        1, "Ranks that share a layer's experts; must divide the ranks per copy and the experts.", minimum=1
    )
    tensor_parallel_size: int = option(1, "Ranks that share each layer, in a node.", minimum=1)
    mp_param_dtype: str = dtype_option("bf16", "Data type of weights and activations in computation.")
    mp_reduce_dtype: str = dtype_option("fp32", "Data type of the gradient reduction.")
    mp_buffer_dtype: str = dtype_option("fp32", "Data type of buffers such as rotary frequencies.")

    def shards(self, world_size: int) -> int:
        """Return the ranks that share one copy of the weights."""
        return self.fsdp_size if 0 < self.fsdp_size < world_size else world_size

    def reduces_once(self, world_size: int) -> bool:
        """Return whether gradients, summed on the device, cross copies in the last micro batch only."""
        can_wait = self.mp_reduce_dtype == "fp32" and not self.enable_cpu_offload
        return can_wait and self.shards(world_size) < world_size


@dataclass(frozen=True)
class OffloadConfig:
    """Offloading between uses."""

    offload_params: Switch = option(False, "Move weights to CPU memory between uses; `auto`: if needed.")
    offload_optimizer: Switch = option(False, "Move the optimizer state to CPU memory between updates.")


@dataclass(frozen=True)
class TrainedModelConfig:
    """A trained model and its update."""

    global_batch_size: int = option(256, "Prompts per mini batch, which is one optimizer step.", minimum=1)
    micro_batch_size_per_device_for_update: MicroBatchSize = micro_batch_option(4, "forward and backward")
    micro_batch_size_per_device_for_experience: MicroBatchSize = micro_batch_option(16, "log-probs")
    max_grad_norm: float = option(1.0, "Maximum gradient norm; gradients are clipped to it.", minimum=TINY)
    dynamic_batching: bool = option(
        True, "Fill micro batches by tokens, up to their size x the longest sequence, not by sequences."
    )
    model: ModelConfig = option(ModelConfig, "Model and trainable parameters.")
    optim: OptimConfig = option(OptimConfig, "Optimizer and learning rate schedule.")
    fsdp: FSDPConfig = option(FSDPConfig, "Sharding and number types.")
    offload: OffloadConfig = option(OffloadConfig, "Offloading between uses.")


@dataclass(frozen=True)
class PolicyConfig(TrainedModelConfig):
    """A trained policy, with sequence parallelism and cached features of a frozen vision tower."""

    ulysses_size: int = option(1, "Ranks that share a sequence by heads; must divide their count.", minimum=1)
    ring_size: int = option(1, "Groups of `ulysses_size` ranks that share a sequence in a ring.", minimum=1)
    divide_short_sequences: bool = option(False, "Divide sequences even if estimated to be faster undivided.")
    attention_kernel: str = option(
        "auto",
        "Attention of all models on GPUs: `torch`, its own kernel; `flash`, an installed FlashAttention 2, 3"
        " or 4; `auto`, FlashAttention 3 where it is installed and supports the GPU, otherwise `torch`.",
        choices=("auto", "torch", "flash"),
    )
    cached_embeds_dir: str | None = option(
        None,
        "Folder that caches features of a frozen vision tower between runs; null disables the cache.",
        resolve=writable_folder,
    )
    model: ModelConfig = option(
        ModelConfig,
        "Model and trainable parameters.",
        example={"model_path": "Qwen/Qwen2.5-7B-Instruct", "lora": {"exclude_modules": ".*visual.*"}},
    )

    @property
    def sp_size(self) -> int:
        return self.ulysses_size * self.ring_size

    def problems(self, path: str) -> Iterator[str]:
        if self.cached_embeds_dir is not None and not self.model.freeze_vision_tower:
            yield (
                f"`{path}.cached_embeds_dir` ({self.cached_embeds_dir}) needs"
                f" `{path}.model.freeze_vision_tower=true`: features of a trained tower change"
            )
