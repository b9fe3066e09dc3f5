# SPDX-License-Identifier: Apache-2.0
"""Non-blocking exchange of tensors with the neighboring ranks of a ring."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl.distributed.sequence_parallel import SequenceParallel


class RingTransfer:
    """A transfer in progress."""

    def __init__(self, works: list[dist.Work], sent: list[Tensor], received: list[Tensor]) -> None:
        self._works, self._sent, self._received = works, sent, received  # `sent` must outlive the transfer

    def wait(self) -> list[Tensor]:
        """Return the tensors of the previous ring rank."""
        for work in self._works:
            work.wait()
        self._sent = []
        return self._received


def start_transfer(tensors: Sequence[Tensor], sp: SequenceParallel) -> RingTransfer:
    """Start sending tensors to the next ring rank and receiving equal shapes from the previous one.

    The tensors must not be empty, and must not change until `wait` returns. All ring ranks send equal shapes.
    """
    sent = [tensor.contiguous() for tensor in tensors]
    received = [torch.empty_like(tensor) for tensor in sent]
    ahead, behind = (sp.ring_index + 1) % sp.ring_size, (sp.ring_index - 1) % sp.ring_size
    operations = []
    for out, into in zip(sent, received, strict=True):
        operations.append(dist.P2POp(dist.isend, out, group=sp.ring_group, group_peer=ahead))
        operations.append(dist.P2POp(dist.irecv, into, group=sp.ring_group, group_peer=behind))
    return RingTransfer(dist.batch_isend_irecv(operations), sent, received)
