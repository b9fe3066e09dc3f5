# SPDX-License-Identifier: Apache-2.0
"""Values of `fsdp.expert_parallel_size` that the mixtures of a run could have."""

import math
from collections.abc import Iterator

from verl.planning.memory_plan import ReadShape, shape_of
from verl.planning.planned_model import PlannedModel
from verl.planning.planned_run import PlannedRun


def expert_sizes(
    run: PlannedRun, read_shape: ReadShape, at_most: int | None = None
) -> Iterator[dict[str, int]]:
    """Yield options by which all mixtures that can have a size have the same one, the smallest first."""
    allowed = [(model, _sizes(model, run.trainer.world_size, read_shape)) for model in run.models]
    for size in sorted(set().union(*(sizes for _, sizes in allowed))):
        changes = {
            f"{model.section}.fsdp.expert_parallel_size": size
            for model, sizes in allowed
            if size in sizes and size != model.fsdp.expert_parallel_size
        }
        if changes and (at_most is None or size <= at_most):
            yield changes


def _sizes(model: PlannedModel, world_size: int, read_shape: ReadShape) -> list[int]:
    """Return all sizes of a mixture, 1 included; none for a model whose experts stay whole."""
    shape = shape_of(model, read_shape)
    if model.optim is not None and model.optim.strategy == "muon" and shape.has_expert_biases:
        return []
    largest = math.gcd(shape.divisible_experts, model.fsdp.shards(world_size))
    sizes = range(1, largest + 1) if shape.divisible_experts else ()
    return [size for size in sizes if largest % size == 0]
