# SPDX-License-Identifier: Apache-2.0
"""What the memory of supervised fine-tuning follows from: one model, its rows, its two passes."""

from verl.config.sft import SFTConfig
from verl.planning.planned_run import PlannedModel, PlannedRun, RowLengths, experience_pass, update_pass

ROLE = "actor"
BATCH_TENSORS = 5  # of int64 over a row: ids, mask, positions, responses and which of them are learned


def planned_sft(config: SFTConfig) -> PlannedRun:
    """The run that these options describe; every token of a row may be learned, and may stand for media."""
    actor, length = config.worker.actor, config.data.max_length
    rows = actor.global_batch_size // config.dp_size
    passes = [update_pass(actor, ROLE, rows)]
    if config.has_validation:  # in batches of as many rows
        passes.insert(0, experience_pass("validation", actor, ROLE, rows))
    model = PlannedModel(ROLE, actor.model, actor.fsdp, actor.offload, tuple(passes), actor.optim)
    return PlannedRun(
        config.trainer,
        RowLengths(prompt=0, response=length, media=length, ranks=config.sp_size),
        (model,),
        batch_bytes=8 * BATCH_TENSORS * actor.global_batch_size * length,
    )
