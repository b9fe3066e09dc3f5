# SPDX-License-Identifier: Apache-2.0
"""Section `trainer`, and the base of the config trees of every kind of run."""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from verl.config.data import RowsConfig
from verl.config.files import paths
from verl.config.model import FSDPConfig
from verl.config.schema import option

PARTIAL, STREAM, ONE_STEP_OFF = "partial", "stream", "one_step_off"  # of `trainer.async_training.mode`
NEVER = (-1, 0)  # values of `*_freq` and of limits that turn them off
FLASH_MODULES = ("flash_attn", "flash_attn_interface")  # of FlashAttention 2 and 4, and of 3
WORLD = "`trainer.nnodes` x `trainer.n_gpus_per_node`"
DEVICES = ("auto", "cpu", "cuda", "npu", "xpu")  # as in `verl.distributed.backends`

LIMITS = yaml.safe_load((Path(__file__).parent / "hints" / "limits.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class RunConfig:
    """Duration, devices, logging and checkpoints."""

    total_epochs: int = option(15, "Epochs over the training data.", minimum=1)
    max_steps: int | None = option(None, "Training steps; overrides `total_epochs`.", minimum=1)
    project_name: str = option("easy_r1", "Project name in loggers and paths.")
    experiment_name: str = option("demo", "Run name in loggers and paths.", example="qwen2_5_7b_math_grpo")
    logger: tuple[str, ...] = option(
        ("console", "wandb"),
        "Loggers for metrics.",
        choices=("console", "file", "mlflow", "swanlab", "tensorboard", "wandb"),
        extension="logger",
        example=("file", "wandb"),
    )
    console: str = option(
        "compact",
        "Output on the console: a line per step, all metrics by area, or JSON Lines.",
        choices=("compact", "full", "json"),
        example="full",
    )
    nnodes: int = option(1, "Number of nodes.", minimum=1)
    n_gpus_per_node: int = option(8, "GPUs per node; on CPU, worker processes per node.", minimum=1)
    device: str = option("auto", "Device; `auto` is the first kind of GPU here.", choices=DEVICES)
    val_freq: int = option(-1, "Steps per validation; -1 is the last step.", minimum=1, also=NEVER, example=5)
    val_before_train: bool = option(True, "Validate before the first step.")
    val_only: bool = option(False, "Validate once and do not train.")
    save_freq: int = option(-1, "Steps between saves; -1 is the last step.", minimum=1, also=NEVER, example=5)
    save_limit: int = option(
        -1, "Latest checkpoints to keep, plus the best one; -1 is all.", minimum=1, also=NEVER, example=3
    )
    async_save: bool = option(True, "Write checkpoints in the background from a copy in host memory.")
    save_model_only: bool = option(False, "Save only weights; a resumed run starts with a fresh optimizer.")
    save_checkpoint_path: str | None = option(
        None, "Folder for checkpoints and log files; null is checkpoints/PROJECT/EXPERIMENT."
    )
    load_checkpoint_path: str | None = option(
        None,
        "Checkpoint to resume from: a folder named `global_step_N`, or that of a run for its last one; the"
        " run's own may have none yet.",
        resolve=paths.checkpoint_or_run_folder,
    )
    find_last_checkpoint: bool = option(True, "Resume from the last checkpoint in `save_checkpoint_path`.")
    allow_changed_inputs: bool = option(
        False, "Resume although the training rows or the model's files differ from the checkpoint's."
    )
    worker_timeout_s: float | None = option(
        3600.0, "Seconds without progress on any rank that count as a hang; null means no limit.", minimum=1.0
    )
    max_restarts: int = option(0, "Restarts from the last checkpoint if processes are lost.", minimum=0)
    restart_wait_s: float = option(120.0, "Seconds that a restart waits for missing nodes.", minimum=0.0)
    elastic: bool = option(False, "Run on fewer devices if some are missing, as batch sizes allow.")
    profile_steps: tuple[int, ...] = option((), "Steps to profile: traces and a report go into `profile/`.")
    ray_timeline: str | None = option(None, "Output file for the Ray timeline.", resolve=paths.writable_file)

    def __post_init__(self) -> None:
        folder = self.save_checkpoint_path or os.path.join(
            "checkpoints", self.project_name, self.experiment_name
        )
        object.__setattr__(self, "save_checkpoint_path", os.path.abspath(os.path.expanduser(folder)))
        if self.load_checkpoint_path == self.save_checkpoint_path:  # as scripts of Long-RL name it
            object.__setattr__(self, "load_checkpoint_path", None)
            object.__setattr__(self, "find_last_checkpoint", True)

    @property
    def checkpoint_folder(self) -> str:
        assert self.save_checkpoint_path is not None, "__post_init__ names the folder"
        return self.save_checkpoint_path

    @property
    def world_size(self) -> int:
        return self.nnodes * self.n_gpus_per_node

    @property
    def num_processes(self) -> int:
        """Number of devices that train or sample."""
        return self.world_size

    def core_problem(self, num_serving: int = 0) -> str | None:
        """Say that on CPU the run, with its processes that serve, would exceed the cores of this machine."""
        cores = os.cpu_count() or 1  # as Ray counts them, whatever this process may use
        total = self.num_processes + num_serving
        if self.nnodes > 1 or self.elastic or total <= cores:
            return None
        sizes = {
            "trainer.n_gpus_per_node": self.n_gpus_per_node,
            "trainer.n_gpus_for_rollout": self.num_processes - self.world_size,
            "reward_servers.NAME.n_gpus": num_serving,
        }
        named = " and ".join(f"`{key}` ({size})" for key, size in sizes.items() if size)
        are, remedy = "are numbers", f"lower them to {cores} in total"
        if total == self.world_size:
            are, remedy = "is the number", f"set `trainer.n_gpus_per_node={cores}`"
        has = "1 core" if cores == 1 else f"{cores} cores"
        return f"{named} {are} of processes on CPU, and this machine has {has}: {remedy}"

    def problems(self, path: str) -> Iterator[str]:
        for name in ("project_name", "experiment_name"):
            if (value := getattr(self, name)) in ("", ".", "..") or "/" in value or "\0" in value:
                yield f"`{path}.{name}` must be the name of one folder, got {value!r}"
        try:
            paths.writable_folder(self.checkpoint_folder)
        except ValueError as error:
            yield f"`{path}.save_checkpoint_path` {error}"
        if self.load_checkpoint_path is not None:
            yield from paths.checkpoint_problems(f"`{path}.load_checkpoint_path`", self.load_checkpoint_path)


@dataclass(frozen=True)
class AsyncConfig:
    """Sampling next to training, with `worker.hybrid_engine=false`, or in turn with partial rollouts."""

    mode: str = option(
        "off",
        "off: sampling and training take turns; partial: they do, but a step ends sampling once it has its"
        " prompts, and unfinished responses continue in the next (`worker.hybrid_engine=true`); one_step_off:"
        " each step trains on what was sampled during the one before, with weights that are one step old;"
        " stream: sampling never stops, and each step trains on the oldest groups that are finished.",
        choices=("off", PARTIAL, ONE_STEP_OFF, STREAM),
    )
    staleness_threshold: int = option(
        1,
        "With mode=partial and stream: the largest number of updates between the weights that begin a"
        " prompt's responses and those of the start of its step; sampling waits rather than exceed it. 0"
        " samples each step with its own weights.",
        minimum=0,
    )
    max_inflight_prompts: int | None = option(
        None,
        "With mode=partial and stream: prompts that an engine samples at once, as far as their responses fit"
        " `worker.rollout.max_num_seqs`; null shares `data.rollout_batch_size` x (`staleness_threshold` + 1)"
        " evenly.",
        minimum=1,
    )
    max_engine_restarts: int = option(
        3,
        "With `worker.hybrid_engine=false`: rollout engines that are started again in a run where others were"
        " lost; after these the run continues with the engines that are left, and ends with the last one.",
        minimum=0,
    )
    max_gpus_for_rollout: int | None = option(
        None,
        "With mode=stream: GPUs that may sample at most; while the run continues, engines are started on GPUs"
        " that are free. null is `trainer.n_gpus_for_rollout`, the number at the start.",
        minimum=1,
    )
    deterministic: bool = option(
        False,
        "With mode=partial and stream: change weights at points that do not depend on time, each engine with"
        " its own share of every step, so that runs repeat and resume exactly. Slower; for tests.",
    )

    @property
    def continues_responses(self) -> bool:
        """True if a response may take several steps."""
        return self.mode in (PARTIAL, STREAM)

    @property
    def samples_ahead(self) -> bool:
        """True if sampling and training run at the same time."""
        return self.mode in (ONE_STEP_OFF, STREAM)


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    """The options of `RunConfig` and those of reinforcement learning."""

    max_try_make_batch: int = option(20, "Maximum rollouts per step to fill a batch; 0 or less is unlimited.")
    rejection_sample: bool = option(
        False, "Drop prompts whose responses all score the same, and keep surplus ones (Skywork-OR1)."
    )
    rejection_sample_multiplier: int = option(
        1, "Prompts sampled per prompt that a step still needs, with `rejection_sample`.", minimum=1
    )
    critic_warmup: int = option(0, "First step to update the policy; before it, only the critic.", minimum=0)
    val_generations_to_log: int = option(0, "Number of validation responses to log.", minimum=0, example=3)
    rollouts_to_keep: int = option(
        8, "Prompts per step, and per validation, whose responses are saved; 0 is none.", minimum=0
    )
    keep_whole_images: bool = option(
        False, "Save images that have no file, as those of tools, in full, to fine-tune on kept rollouts."
    )
    viewer_port: int | None = option(
        None, "Local port of the rollout viewer; 0 is any, null disables it.", minimum=0, maximum=65535
    )
    debug: bool = option(False, "Check every key of the batch after each stage.")
    diffusion: bool = option(False, "Train a model that generates images or videos.")
    n_gpus_for_rollout: int = option(
        0,
        "GPUs that only sample, in the whole cluster, with `worker.hybrid_engine=false`; on CPU, processes.",
        minimum=0,
    )
    async_training: AsyncConfig = option(AsyncConfig, "Sampling next to training.", alias="async")

    @property
    def num_processes(self) -> int:
        return super().num_processes + self.n_gpus_for_rollout

    @property
    def max_gpus_for_rollout(self) -> int:
        """Number of devices that may sample in the course of the run."""
        return self.async_training.max_gpus_for_rollout or self.n_gpus_for_rollout


class RunTree:
    """Base of the config trees of all kinds of runs, which are dataclasses with these sections."""

    REFUSED: ClassVar[dict[str, str]] = LIMITS["refused"]
    INERT: ClassVar[dict[str, str]] = LIMITS["inert"]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    data: RowsConfig
    worker: Any  # has a section `actor`
    trainer: RunConfig

    @property
    def world_size(self) -> int:
        return self.trainer.world_size

    @property
    def engine(self) -> str:
        """Name of the engine that samples, whose packages must be installed; `hf` needs no other package."""
        return "hf"

    @property
    def num_serving(self) -> int:
        """Number of devices of models that only the reward function asks."""
        return 0

    @property
    def num_devices(self) -> int:
        """Number of devices of the run."""
        return self.trainer.num_processes + self.num_serving

    @property
    def dp_size(self) -> int:
        """Number of groups of ranks that share rows; each group trains on sequences of its own."""
        actor = self.worker.actor
        return self.world_size // (actor.sp_size * actor.fsdp.tensor_parallel_size)

    def input_problems(self) -> Iterator[str]:
        """Yield a sentence for each missing input that every kind of run needs."""
        if self.worker.actor.model.model_path is None:
            yield "`worker.actor.model.model_path` must be set: a model folder or a hub name"
        if not self.data.train_files and not self.trainer.val_only:
            yield "`data.train_files` must be set: a file, a folder or a hub name"
        if not self.data.val_files and self.trainer.val_only:
            yield "`data.val_files` must be set with `trainer.val_only=true`"
        elif not self.data.val_files and (self.trainer.val_before_train or self.trainer.val_freq > 0):
            yield (
                "`data.val_files` must be set; without validation set"
                " `trainer.val_before_train=false` and `trainer.val_freq=-1`"
            )

    def kernel_problems(self) -> Iterator[str]:
        """Yield a sentence if FlashAttention is required where it cannot run."""
        name = "`worker.actor.attention_kernel`"
        if self.worker.actor.attention_kernel != "flash":
            return
        if self.trainer.device == "cpu":
            yield f"{name} (flash) needs a GPU: set it to auto, or `trainer.device` to cuda"
        elif not any(map(importlib.util.find_spec, FLASH_MODULES)):
            yield (
                f"{name} (flash) needs a FlashAttention package:"
                " pip install flash-attn --no-build-isolation, or set it to auto"
            )

    def rank_problems(self, sharding: dict[str, FSDPConfig]) -> Iterator[str]:
        """Yield a sentence for each size that the ranks cannot be divided into.

        `sharding` has the section `fsdp` of each loaded model, by the section that it is in.
        """
        shared = "`worker.actor.ulysses_size` x `worker.actor.ring_size`"
        yield from divisible(WORLD, self.world_size, shared, self.worker.actor.sp_size)
        for section, fsdp in sharding.items():
            ranks, name = (WORLD, self.world_size), f"`{section}.fsdp.fsdp_size`"
            if fsdp.fsdp_size > 0:
                yield from divisible(*ranks, name, fsdp.fsdp_size)
            if 0 < fsdp.fsdp_size < self.world_size:
                ranks = (name, fsdp.fsdp_size)
            yield from divisible(*ranks, f"`{section}.fsdp.expert_parallel_size`", fsdp.expert_parallel_size)
        if any(fsdp.tensor_parallel_size > 1 for fsdp in sharding.values()):
            from verl.config.rules.tensor_parallel_rules import tensor_parallel_problems  # noqa: PLC0415 - rare

            yield from tensor_parallel_problems(self, sharding, divisible)

    def dp_problems(self, name: str, sequences: int) -> Iterator[str]:
        """Yield a sentence unless each data parallel rank gets the same number of sequences."""
        ranks = f"the number of data parallel ranks, {WORLD} / sequence parallelism"
        if self.dp_size:  # otherwise `rank_problems` has the cause
            yield from divisible(name, sequences, ranks, self.dp_size)


class WorldProblem(str):
    """A problem with the number of processes, of which there may be too many for the machine."""


def divisible(name: str, number: int, divisor_name: str, divisor: int) -> Iterator[str]:
    """Yield a problem with the nearest values that fit, unless `number` is a multiple of `divisor`."""
    if number % divisor == 0:
        return
    largest = max(size for size in range(1, min(number + 1, divisor)) if number % size == 0)
    below = number - number % divisor
    multiples = [multiple for multiple in (below, below + divisor) if multiple]
    kind = WorldProblem if WORLD in f"{name} {divisor_name}" else str
    yield kind(
        f"{name} ({number}) must be divisible by {divisor_name} ({divisor}):"
        f" {_setting(divisor_name, [largest])}, or {_setting(name, multiples)}"
    )


def _setting(name: str, values: Sequence[int]) -> str:
    key = name.strip("`")
    if "`" not in key:
        return "set " + " or ".join(f"`{key}={value}`" for value in values)
    return f"make {name.partition(',')[0]} {' or '.join(map(str, values))}"
