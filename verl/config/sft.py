# SPDX-License-Identifier: Apache-2.0
"""Options of a supervised fine-tuning run; keys are those of `ppo.py` where they mean the same."""

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.data import RowsConfig
from verl.config.distillation import TEACHERS, DistillationConfig
from verl.config.model import MicroBatchSize, PolicyConfig, micro_batch_option
from verl.config.schema import option
from verl.config.trainer import RunConfig, RunTree


@dataclass(frozen=True)
class SFTDataConfig(RowsConfig):
    """Conversations and the tokens to train on."""

    messages_key: str = option("messages", "Column of chat messages, including the assistant's turns.")
    response_key: str = option("response", "Column of the response to `prompt_key`, if not in messages.")
    tools_key: str = option(
        "tools", "Column of the schemas of the tools of a conversation, a list or its JSON; optional."
    )
    train_turns: str = option("all", "Assistant turns to train on.", choices=("all", "last"))
    max_length: int = option(1024, "Maximum length of a conversation in tokens.", minimum=2, example=4096)
    filter_overlong_prompts: bool = option(True, "Drop overlong rows; otherwise they are an error.")
    num_video_frames: int | None = option(
        None, "Frames per video, evenly spaced; null samples at `video_fps`.", minimum=2
    )
    tokens_per_frame: int | None = option(
        None, "Maximum tokens per video frame; null is limited by `max_pixels` only.", minimum=1
    )


@dataclass(frozen=True)
class SFTActorConfig(PolicyConfig):
    """The fine-tuned model and its update."""

    global_batch_size: int = option(64, "Rows per training step, which is one update.", minimum=1)
    micro_batch_size_per_device_for_experience: MicroBatchSize = micro_batch_option(8, "validation")
    dynamic_batching: bool = option(
        True, "Fill micro batches by tokens, up to their size x `data.max_length`, not by sequences."
    )


@dataclass(frozen=True)
class SFTWorkerConfig:
    """Worker processes."""

    actor: SFTActorConfig = option(
        SFTActorConfig,
        "The fine-tuned model and its update.",
        example={
            "micro_batch_size_per_device_for_update": 1,
            "micro_batch_size_per_device_for_experience": 2,
            "optim": {"lr": 1e-5, "lr_scheduler_type": "cosine", "lr_warmup_ratio": 0.03},
        },
    )


@dataclass(frozen=True)
class SFTRunConfig(RunConfig):
    """The options of `RunConfig` with other defaults."""

    total_epochs: int = option(3, "Epochs over the training data.", minimum=1)
    project_name: str = option("sft", "Project name in loggers and paths.")
    experiment_name: str = option("demo", "Run name in loggers and paths.", example="qwen2_5_7b_sft")


@dataclass(frozen=True)
class SFTConfig(RunTree):
    """A supervised fine-tuning run."""

    data: SFTDataConfig = option(
        SFTDataConfig,
        "Conversations and the tokens to train on.",
        example={
            "train_files": "HuggingFaceH4/ultrachat_200k@train_sft",
            "val_files": "HuggingFaceH4/ultrachat_200k@test_sft[:1000]",
            "prompt_key": "prompt",
            "format_prompt": None,
        },
    )
    worker: SFTWorkerConfig = option(SFTWorkerConfig, "Worker processes.")
    trainer: SFTRunConfig = option(SFTRunConfig, "Duration, devices, logging and checkpoints.")
    distillation: DistillationConfig = option(DistillationConfig, "Teachers of the model.")

    def problems(self, path: str) -> Iterator[str]:
        actor, loss = self.worker.actor, self.distillation.distillation_loss
        if self.distillation.reads_teacher_log_probs:
            yield (
                f"`distillation.distillation_loss.loss_mode` must compare distributions in fine-tuning, got"
                f" {loss.loss_mode!r}, an estimator on tokens that the model sampled itself: set it to"
                " forward_kl or reverse_kl, or to one of their `topk` modes"
            )
        for name, teacher in self.distillation.teachers.items():
            if teacher.num_video_frames is not None:
                yield (
                    f"`{TEACHERS}.{name}.num_video_frames` must be null in fine-tuning: set"
                    " `data.num_video_frames`, which holds for model and teacher"
                )
            if teacher.server is not None:
                yield f"`{TEACHERS}.{name}.server` must be null in fine-tuning: set `model_path`"
        yield from self.input_problems()
        yield from self.kernel_problems()
        yield from self.rank_problems({"worker.actor": actor.fsdp} | self.distillation.sharding)
        yield from self.dp_problems("`worker.actor.global_batch_size`", actor.global_batch_size)
