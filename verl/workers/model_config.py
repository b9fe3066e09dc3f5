# SPDX-License-Identifier: Apache-2.0
"""Options of one model, whichever role it has: its files, its optimizer, its sharding, where it waits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.utils.config import option
from verl.utils.config_paths import model_source

DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
}
TINY = 1e-6  # the smallest value of an option that must be above zero


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
