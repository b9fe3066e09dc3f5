# SPDX-License-Identifier: Apache-2.0
"""Options of one model, whichever role it has: its files, its optimizer, its sharding, where it waits."""

import importlib.util
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.paths import existing_folder, model_source
from verl.config.schema import option

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
        0, help="Rank of the adapters; 0 trains the full weights, or takes the rank of `path`.", minimum=0
    )
    alpha: int = option(64, help="Scale of the adapters, divided by the rank.", minimum=1)
    target_modules: str = option(
        "all-linear",
        help="Modules with an adapter: `all-linear`, names and commas, or a regular expression.",
    )
    exclude_modules: str | None = option(
        None, help="Modules without an adapter: names and commas, or a regular expression."
    )
    use_rslora: bool = option(False, help="Divide alpha by the root of the rank, not by the rank.")
    use_dora: bool = option(False, help="DoRA: learn the size of a weight's rows apart from their direction.")
    path: str | None = option(
        None,
        help="Folder of an adapter in peft's format to start from; its config replaces the options above.",
        resolve=existing_folder,
    )

    @property
    def is_used(self) -> bool:
        """Whether adapters are trained in place of the weights."""
        return self.rank > 0 or self.path is not None


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
    train_modules: list[str] = option(
        list,
        help="Regular expressions found in names of parameters: train these alone, with `lora` these beside.",
    )
    freeze_modules: list[str] = option(
        list, help="Regular expressions found in names of parameters that are not trained; they win."
    )
    lora: LoraConfig = option(LoraConfig, help="Low-rank adapters.")

    def __post_init__(self) -> None:
        """Take the tokenizer from the model unless it is named."""
        if self.tokenizer_path is None:
            object.__setattr__(self, "tokenizer_path", self.model_path)


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning rate."""

    lr: float = option(1e-6, help="Peak learning rate.", minimum=0.0)
    lr_factors: dict[str, float] = option(
        dict,
        help="Factor of `lr` by a regular expression found in names of parameters; the first found decides.",
    )
    betas: tuple[float, float] = option((0.9, 0.999), help="Decay rates of AdamW's two moments, in [0, 1).")
    weight_decay: float = option(1e-2, help="Decoupled weight decay.", minimum=0.0)
    strategy: str = option(
        "adamw",
        help="`adamw`; for weights in bf16 `adamw_bf16` with Kahan summation or `adamw_bf16_sr` with"
        " stochastic rounding; `adamw_8bit` with 8-bit moments; `muon` for matrices.",
        choices=("adamw", "adamw_bf16", "adamw_bf16_sr", "adamw_8bit", "muon"),
    )
    lr_warmup_ratio: float = option(
        0.0, help="Share of the training steps in which the rate rises from 0.", minimum=0.0, maximum=1.0
    )
    lr_warmup_steps: int | None = option(
        None, help="Training steps in which the rate rises from 0; wins over the ratio.", minimum=0
    )
    min_lr_ratio: float | None = option(
        None, help="Final rate of a falling schedule as a share of `lr`; null is 0.", minimum=0.0, maximum=1.0
    )
    lr_scheduler_type: str = option(
        "constant",
        help="Rate after warm-up; `wsd` is constant, then falls in the last steps.",
        choices=("constant", "linear", "cosine", "wsd"),
    )
    lr_decay_ratio: float = option(
        0.2, help="Share of the training steps in which `wsd` falls.", minimum=TINY, maximum=1.0
    )
    lr_decay_shape: str = option(
        "sqrt",
        help="How `wsd` falls: by a line, half a cosine, or 1 - sqrt(progress).",
        choices=("linear", "cosine", "sqrt"),
    )

    def problems(self, path: str) -> Iterator[str]:
        """Yield what is wrong with the moments, the groups and what the strategy needs."""
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            yield f"`{path}.betas` must be in [0, 1), got {list(self.betas)}"
        for pattern, factor in self.lr_factors.items():
            yield from self._factor_problems(f"`{path}.lr_factors` ({pattern})", pattern, factor)
        if self.strategy == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
            yield (
                f"`{path}.strategy` (adamw_8bit) needs the package torchao, which is not installed:"
                " pip install 'verl[torchao]'"
            )

    @staticmethod
    def _factor_problems(name: str, pattern: Any, factor: Any) -> Iterator[str]:
        """Yield what is wrong with one pattern and its factor, whose types nobody has checked."""
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            yield f"{name} must be a regular expression: {error}"
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not is_number or not 0.0 < factor < math.inf:
            yield (
                f"{name} must be a number above 0, got {factor!r}:"
                " what is not to be trained is named in `freeze_modules` of the model"
            )


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
