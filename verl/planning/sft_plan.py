# SPDX-License-Identifier: Apache-2.0
"""What one step of supervised fine-tuning does, in numbers: `--dry-run`. Nothing here needs torch."""

from verl.config.model import AUTO, as_number
from verl.config.sft import SFTConfig
from verl.planning.step_plan import PlanLine, at_most, micro_batches_of, plan_table


def count_sft_steps(config: SFTConfig, dataset_size: int | None) -> int | None:
    """Return the training steps of the run, or None if they depend on a number of rows that is not known.

    An epoch takes whole steps; the rows that are left over are dropped.

    Raises:
        ValueError: There are too few rows for a step.
    """
    rows = config.worker.actor.global_batch_size
    if dataset_size is not None and dataset_size < rows and not config.trainer.val_only:
        raise ValueError(
            f"`data.train_files` must have at least `worker.actor.global_batch_size` ({rows}) usable rows,"
            f" has {dataset_size}"
        )
    if config.trainer.max_steps is not None:
        return config.trainer.max_steps
    return None if dataset_size is None else dataset_size // rows * config.trainer.total_epochs


def sft_plan_text(config: SFTConfig, dataset_size: int | None = None) -> str:
    """Return the plan of a step as a table; `dataset_size` is the number of usable training rows."""
    actor, size = config.worker.actor, config.worker.actor.micro_batch_size_per_device_for_update
    rows = actor.global_batch_size // config.dp_size
    has_budget = actor.dynamic_batching and size != AUTO
    budget = f", at most {as_number(size) * config.data.max_length} tokens" if has_budget else ""
    steps = count_sft_steps(config, dataset_size)
    remark = f"{config.trainer.total_epochs} epochs x (training rows / {actor.global_batch_size})"
    where = f"{config.trainer.nnodes} nodes, {config.trainer.device}"
    lines = [
        PlanLine("", "step", "per rank"),
        PlanLine("processes", str(config.world_size), "1", where),
        PlanLine(
            "rows", str(actor.global_batch_size), str(rows), f"{config.data.max_length} tokens at most each"
        ),
        PlanLine("ranks that share a row", str(config.sp_size)),
        PlanLine(
            "micro batches",
            "",
            at_most(micro_batches_of(rows, size), dynamic=actor.dynamic_batching),
            f"{size} sequences each{budget}",
        ),
        PlanLine("optimizer steps", "1"),
        PlanLine("training steps", "?" if steps is None else str(steps), "", "" if steps else remark),
    ]
    return plan_table(lines)
