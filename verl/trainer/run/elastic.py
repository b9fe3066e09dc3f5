# SPDX-License-Identifier: Apache-2.0
"""Going on with fewer devices (`trainer.elastic`): as many as there are and as the batch sizes allow.

The loss does not depend on how a batch is cut over ranks, so a smaller run computes the same numbers, slower.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from verl.config.schema import ConfigError, check_config
from verl.config.trainer import RunTree

C = TypeVar("C", bound=RunTree)


def largest_run(config: C, capacities: Sequence[int]) -> C | None:
    """The same run on the most devices that can be had; None if its options allow none of the sizes.

    Args:
        config: As the user wrote it: neither `trainer.nnodes` nor `trainer.n_gpus_per_node` is exceeded.
        capacities: How many processes each node of the cluster can hold.
    """
    for nnodes, per_node in _sizes(config, capacities):
        smaller = replace(config, trainer=replace(config.trainer, nnodes=nnodes, n_gpus_per_node=per_node))
        try:
            check_config(smaller)
        except ConfigError:
            continue
        return smaller
    return None


def _sizes(config: RunTree, capacities: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Nodes and processes on each that the cluster can hold, most processes first, then fewest nodes."""
    trainer, ranked = config.trainer, sorted(capacities, reverse=True)
    sizes = [
        (nnodes, per_node)
        for nnodes in range(1, min(trainer.nnodes, len(ranked)) + 1)
        for per_node in range(1, min(trainer.n_gpus_per_node, ranked[nnodes - 1]) + 1)
    ]
    yield from sorted(sizes, key=lambda size: (-size[0] * size[1], size[0]))
