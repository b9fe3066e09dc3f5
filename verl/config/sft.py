# SPDX-License-Identifier: Apache-2.0
"""Options of supervised fine-tuning: one tree, one YAML file, keys as in `ppo.py` where they are shared.

What the model is and how it is updated is in `sft_options.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.data import RowsConfig
from verl.config.ppo import RANKS, WORLD, divisible
from verl.config.schema import option
from verl.config.sft_options import SFTWorkerConfig
from verl.config.trainer import RunConfig


@dataclass(frozen=True)
class SFTDataConfig(RowsConfig):
    """Conversations: where they come from, and which of their tokens are learned."""

    messages_key: str = option("messages", help="Column of chat messages, the assistant's turns included.")
    response_key: str = option(
        "response", help="Column of the response to `prompt_key`, in rows without messages."
    )
    train_turns: str = option(
        "all",
        help="Turns of the assistant that are learned; the others are context.",
        choices=("all", "last"),
    )
    max_length: int = option(1024, help="Tokens of a conversation at most.", minimum=2, example=4096)
    filter_overlong_prompts: bool = option(
        True, help="Leave out rows longer than `max_length`; false makes such a row an error."
    )
    num_video_frames: int | None = option(
        None, help="Frames of a video, spread evenly; null takes `video_fps` a second.", minimum=2
    )
    tokens_per_frame: int | None = option(
        None, help="Tokens of a video frame at most; null is without limit but `max_pixels`.", minimum=1
    )


@dataclass(frozen=True)
class SFTRunConfig(RunConfig):
    """How long, on what, and what is logged and saved."""

    total_epochs: int = option(3, help="Passes over the training rows.", minimum=1)
    project_name: str = option("sft", help="Project in the loggers and in the checkpoint folder.")
    experiment_name: str = option(
        "demo", help="Run in the loggers and in the checkpoint folder.", example="qwen2_5_7b_sft"
    )


@dataclass(frozen=True)
class SFTConfig:
    """A whole run of supervised fine-tuning."""

    data: SFTDataConfig = option(
        SFTDataConfig,
        help="Conversations: where they come from, and which of their tokens are learned.",
        example={
            "train_files": "HuggingFaceH4/ultrachat_200k@train_sft",
            "val_files": "HuggingFaceH4/ultrachat_200k@test_sft[:1000]",
            "prompt_key": "prompt",
            "format_prompt": None,
        },
    )
    worker: SFTWorkerConfig = option(SFTWorkerConfig, help="The processes that hold the model.")
    trainer: SFTRunConfig = option(SFTRunConfig, help="How long, on what, and what is logged and saved.")

    @property
    def world_size(self) -> int:
        """Worker processes of the run: one for each device."""
        return self.trainer.world_size

    @property
    def sp_size(self) -> int:
        """Ranks that share one sequence."""
        return self.worker.actor.sp_size

    @property
    def dp_size(self) -> int:
        """Ranks, or groups of ranks that share sequences, that train on different sequences."""
        return self.world_size // self.sp_size

    @property
    def has_validation(self) -> bool:
        """Whether there are validation rows."""
        return bool(self.data.val_files)

    def problems(self, path: str) -> Iterator[str]:
        """Yield every broken rule between the sections."""
        trainer, actor = self.trainer, self.worker.actor
        if actor.model.model_path is None:
            yield "`worker.actor.model.model_path` must be set: a model folder or a hub name"
        if not self.data.train_files and not trainer.val_only:
            yield "`data.train_files` must be set: a file, a folder or a hub name"
        if not self.has_validation and trainer.val_only:
            yield "`data.val_files` must be set with `trainer.val_only=true`"
        elif not self.has_validation and (trainer.val_before_train or trainer.val_freq > 0):
            yield (
                "`data.val_files` must be set; without validation set"
                " `trainer.val_before_train=false` and `trainer.val_freq=-1`"
            )
        shared = "`worker.actor.ulysses_size` x `worker.actor.ring_size`"
        yield from divisible(WORLD, self.world_size, shared, self.sp_size)
        if actor.fsdp.fsdp_size > 0:
            name = "`worker.actor.fsdp.fsdp_size`"
            yield from divisible(WORLD, self.world_size, name, actor.fsdp.fsdp_size)
        if self.dp_size:
            name = "`worker.actor.global_batch_size`"
            yield from divisible(name, actor.global_batch_size, RANKS, self.dp_size)
