# SPDX-License-Identifier: Apache-2.0
"""Options of every model that is trained, whatever it learns: policy, value model, process reward model.

A section that says more of an option, or starts from another default, declares it again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from verl.config.model import TINY, FSDPConfig, ModelConfig, OffloadConfig, OptimConfig
from verl.config.paths import writable_folder
from verl.config.schema import option

AUTO = "auto"  # the largest micro batch whose planned memory fits; the trainer puts a number in its place
MicroBatchSize = int | Literal["auto"]


def as_number(size: MicroBatchSize) -> int:
    """The size, which is a number wherever a worker reads it."""
    assert size != AUTO, "the trainer puts numbers in the place of `auto` before workers start"
    return int(size)


def micro_batch_option(default: int, doing: str) -> Any:
    """Declare how many sequences a device runs at once.

    Args:
        default: Sequences.
        doing: Completes "Sequences a device ...".
    """
    return option(
        default, help=f"Sequences a device {doing}; `auto` is as many as fit.", minimum=1, also=(AUTO,)
    )


@dataclass(frozen=True)
class TrainedModelConfig:
    """A model that is trained, and its update."""

    global_batch_size: int = option(256, help="Prompts in a mini batch: one optimizer step.", minimum=1)
    micro_batch_size_per_device_for_update: MicroBatchSize = micro_batch_option(
        4, "runs forward and backward at once"
    )
    micro_batch_size_per_device_for_experience: MicroBatchSize = micro_batch_option(
        16, "runs forward at once for log-probs"
    )
    max_grad_norm: float = option(1.0, help="Gradients are scaled down to this norm.", minimum=TINY)
    dynamic_batching: bool = option(
        True,
        help="Fill a micro batch up to the tokens of its size x the longest sequence, not by sequences.",
    )
    model: ModelConfig = option(ModelConfig, help="Which model, and how it is loaded.")
    optim: OptimConfig = option(OptimConfig, help="Optimizer and learning rate.")
    fsdp: FSDPConfig = option(FSDPConfig, help="Sharding and number types.")
    offload: OffloadConfig = option(OffloadConfig, help="What leaves the GPU while it is not used.")


@dataclass(frozen=True)
class PolicyConfig(TrainedModelConfig):
    """A policy: its ranks may share sequences, and a vision tower that is frozen is computed once."""

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

    @property
    def sp_size(self) -> int:
        """Ranks that share one sequence."""
        return self.ulysses_size * self.ring_size

    def problems(self, path: str) -> Iterator[str]:
        """Yield what is wrong with the folder of vision features."""
        if self.cached_embeds_dir is not None and not self.model.freeze_vision_tower:
            yield (
                f"`{path}.cached_embeds_dir` ({self.cached_embeds_dir}) needs"
                f" `{path}.model.freeze_vision_tower=true`: the features of a tower that learns change"
            )
