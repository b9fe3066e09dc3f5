# SPDX-License-Identifier: Apache-2.0
"""Options of every run, of reinforcement learning and of supervised fine-tuning."""

import os
from collections.abc import Iterator
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol

from verl.config.paths import checkpoint_folder, writable_file, writable_folder
from verl.config.schema import option

NEVER = (-1, 0)  # values of `*_freq` and of limits that switch them off


@dataclass(frozen=True)
class RunConfig:
    """How long, on what, and what is logged and saved."""

    total_epochs: int = option(15, help="Passes over the training rows.", minimum=1)
    max_steps: int | None = option(None, help="Training steps; wins over `total_epochs`.", minimum=1)
    project_name: str = option("easy_r1", help="Project in the loggers and in the checkpoint folder.")
    experiment_name: str = option(
        "demo", help="Run in the loggers and in the checkpoint folder.", example="qwen2_5_7b_math_grpo"
    )
    logger: tuple[str, ...] = option(
        ("console", "wandb"),
        help="Where metrics go.",
        choices=("console", "file", "mlflow", "swanlab", "tensorboard", "wandb"),
        example=("file", "wandb"),
    )
    nnodes: int = option(1, help="Machines.", minimum=1)
    n_gpus_per_node: int = option(8, help="GPUs on each machine; on CPU, worker processes.", minimum=1)
    device: str = option(
        "auto",
        help="Where the models run; `auto` is cuda where there is a GPU.",
        choices=("auto", "cuda", "cpu"),
    )
    val_freq: int = option(
        -1, help="Steps between validations; -1 is the last step only.", minimum=1, also=NEVER, example=5
    )
    val_before_train: bool = option(True, help="Validate before the first step.")
    val_only: bool = option(False, help="Validate once and do not train.")
    save_freq: int = option(
        -1, help="Steps between checkpoints; -1 is the last step only.", minimum=1, also=NEVER, example=5
    )
    save_limit: int = option(
        -1, help="Newest checkpoints to keep, beside the best; -1 is all.", minimum=1, also=NEVER, example=3
    )
    async_save: bool = option(
        True, help="Write checkpoints behind the training, from a copy in host memory; false waits."
    )
    save_model_only: bool = option(
        False, help="Save weights without optimizer: a run that goes on from them starts its moments anew."
    )
    save_checkpoint_path: str | None = option(
        None, help="Folder of checkpoints and log files; null is checkpoints/PROJECT/EXPERIMENT."
    )
    load_checkpoint_path: str | None = option(
        None, help="Checkpoint to go on from: a folder named `global_step_N`.", resolve=checkpoint_folder
    )
    find_last_checkpoint: bool = option(
        True, help="Go on from the last checkpoint in `save_checkpoint_path` if there is one."
    )
    worker_timeout_s: float | None = option(
        3600.0, help="Seconds without progress of any rank after which workers hang; null waits.", minimum=1.0
    )
    max_restarts: int = option(
        0,
        help="Times that a run that lost workers, machines or its controller goes on from its checkpoint.",
        minimum=0,
    )
    restart_wait_s: float = option(
        120.0, help="Seconds that such a restart waits for machines that are missing.", minimum=0.0
    )
    elastic: bool = option(
        False, help="Run on fewer devices where some are missing, as many as the batch sizes allow."
    )
    profile_steps: tuple[int, ...] = option(
        (), help="Steps of which traces of every rank and a report are written below `profile/`."
    )
    ray_timeline: str | None = option(None, help="File for Ray's timeline of the run.", resolve=writable_file)

    def __post_init__(self) -> None:
        """Name the checkpoint folder after project and experiment unless it is set, and make it absolute."""
        folder = self.save_checkpoint_path or os.path.join(
            "checkpoints", self.project_name, self.experiment_name
        )
        object.__setattr__(self, "save_checkpoint_path", os.path.abspath(os.path.expanduser(folder)))

    @property
    def checkpoint_folder(self) -> str:
        """The folder of checkpoints and log files: `save_checkpoint_path`, which is named by now."""
        assert self.save_checkpoint_path is not None, "__post_init__ names the folder"
        return self.save_checkpoint_path

    @property
    def world_size(self) -> int:
        """Worker processes of the run: one for each device."""
        return self.nnodes * self.n_gpus_per_node

    def problems(self, path: str) -> Iterator[str]:
        """Yield what is wrong with the checkpoint folder."""
        try:
            writable_folder(self.checkpoint_folder)
        except ValueError as error:
            yield f"`{path}.save_checkpoint_path` {error}"


class RunTree(Protocol):
    """What the config trees of all kinds of runs have: dataclasses with the options of a run."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def trainer(self) -> RunConfig: ...
