# SPDX-License-Identifier: Apache-2.0
"""Options of the processes that fine-tune a model; their keys are the policy's in `config.py`."""

from collections.abc import Iterator
from dataclasses import dataclass

from verl.utils.config import option
from verl.utils.config_paths import writable_folder
from verl.workers.model_config import TINY, FSDPConfig, ModelConfig, OffloadConfig, OptimConfig


@dataclass(frozen=True)
class SFTActorConfig:
    """The model that is fine-tuned, and its update."""

    global_batch_size: int = option(64, help="Rows in a step: one update.", minimum=1)
    micro_batch_size_per_device_for_update: int = option(
        4, help="Sequences a device runs forward and backward at once.", minimum=1, example=1
    )
    micro_batch_size_per_device_for_experience: int = option(
        8, help="Sequences a device runs forward at once in validation.", minimum=1, example=2
    )
    max_grad_norm: float = option(1.0, help="Gradients are scaled down to this norm.", minimum=TINY)
    dynamic_batching: bool = option(
        True, help="Fill a micro batch up to the tokens of its size x `data.max_length`, not by sequences."
    )
    ulysses_size: int = option(
        1, help="Ranks that share one sequence by attention heads; must divide the heads.", minimum=1
    )
    ring_size: int = option(
        1, help="Groups of `ulysses_size` ranks that pass keys and values of one sequence around.", minimum=1
    )
    divide_short_sequences: bool = option(
        False, help="Divide sequences over ranks even where whole ones fit and are estimated to be faster."
    )
    cached_embeds_dir: str | None = option(
        None,
        help="Folder that keeps what a frozen vision tower computes, from run to run; null keeps none.",
        resolve=writable_folder,
    )
    model: ModelConfig = option(
        ModelConfig,
        help="Which model, and how it is loaded.",
        example={"model_path": "Qwen/Qwen2.5-7B-Instruct", "lora": {"exclude_modules": ".*visual.*"}},
    )
    optim: OptimConfig = option(
        OptimConfig,
        help="Optimizer and learning rate.",
        example={"lr": 1e-5, "lr_scheduler_type": "cosine", "lr_warmup_ratio": 0.03},
    )
    fsdp: FSDPConfig = option(FSDPConfig, help="Sharding and number types.")
    offload: OffloadConfig = option(OffloadConfig, help="What leaves the GPU while it is not used.")

    def problems(self, path: str) -> Iterator[str]:
        """Yield what is wrong with the folder of vision features."""
        if self.cached_embeds_dir is not None and not self.model.freeze_vision_tower:
            yield (
                f"`{path}.cached_embeds_dir` ({self.cached_embeds_dir}) needs"
                f" `{path}.model.freeze_vision_tower=true`: the features of a tower that learns change"
            )


@dataclass(frozen=True)
class SFTWorkerConfig:
    """The processes that hold the model."""

    actor: SFTActorConfig = option(SFTActorConfig, help="The model that is fine-tuned, and its update.")
