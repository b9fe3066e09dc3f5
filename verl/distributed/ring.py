# SPDX-License-Identifier: Apache-2.0
"""Tensors that travel around the ring while the ranks compute.

`pass_on` starts sending to the next ring rank and receiving from the one before; `Passing.wait` ends it.
Every ring rank passes tensors of the same shapes in the same order.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl.distributed.sequence_parallel import SequenceParallel


class Passing:
    """Tensors under way; holds what is sent until it has left."""

    def __init__(self, works: list[dist.Work], sent: list[Tensor], received: list[Tensor]) -> None:
        """See `pass_on`."""
        self._works, self._sent, self._received = works, sent, received

    def wait(self) -> list[Tensor]:
        """What the ring rank before has passed on."""
        for work in self._works:
            work.wait()
        self._sent = []
        return self._received


def pass_on(tensors: Sequence[Tensor], sp: SequenceParallel) -> Passing:
    """Start passing tensors to the next ring rank; they must not change until `wait` returns.

    Args:
        tensors: One or more, not empty ones.
        sp: This rank's place in a ring of two or more.
    """
    sent = [tensor.contiguous() for tensor in tensors]
    received = [torch.empty_like(tensor) for tensor in sent]
    ahead, behind = (sp.ring_index + 1) % sp.ring_size, (sp.ring_index - 1) % sp.ring_size
    pairs = zip(sent, received, strict=True)
    works = dist.batch_isend_irecv(
        [
            operation
            for out, into in pairs
            for operation in (
                dist.P2POp(dist.isend, out, group=sp.ring_group, group_peer=ahead),
                dist.P2POp(dist.irecv, into, group=sp.ring_group, group_peer=behind),
            )
        ]
    )
    return Passing(works, sent, received)
