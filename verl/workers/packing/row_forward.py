# SPDX-License-Identifier: Apache-2.0
"""Interface between an update and its forward pass, over packed tokens or steps of a sampler."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.fused_log_probs import TokenLogProbs
from verl.models.mixture.routing import Router
from verl.protocol import DataProto
from verl.workers.packing.observers import Columns, ForwardObserver
from verl.workers.packing.sp_strategy import Strategy


class RowForward(ABC):
    """Runs micro batches of rows through a model, and computes log-probs of what was sampled."""

    keys: ClassVar[Sequence[str]]  # columns of tensors that it reads, with `attention_mask` and `loss_mask`
    object_keys: ClassVar[Sequence[str]]  # columns of objects that it reads
    shares_prompts = False  # runs a prompt once for all of its rows
    strategies: Collection[Strategy] = tuple(Strategy)  # ways in which ranks may share rows

    def __init__(self, model: nn.Module, device: torch.device | str, sp: SequenceParallel) -> None:
        self.model, self.device, self.sp = model, device, sp
        self.observers: list[ForwardObserver] = []  # they watch every pass
        self.logged: set[Strategy] = set()  # strategies, each when it is first chosen
        self._columns: Columns = {}

    @abstractmethod
    def log_probs(
        self,
        micro: DataProto,
        temperature: float,
        with_entropy: bool = False,
        with_sum_squares: bool = False,
        reference: Any = None,
        divergence: Any = None,
    ) -> TokenLogProbs:
        """Compute log-probs where `loss_mask` is one, (B, R) float32, and what is requested."""

    def run(self, micro: DataProto) -> None:
        """Run the model without gradients, for its observers only."""
        raise NotImplementedError(f"{type(self).__name__} has no observers")

    def parts(self, micro: DataProto) -> Sequence[DataProto]:
        """Divide a micro batch into passes with a gradient of their own; every rank has as many."""
        return [micro]

    def media_tokens(self, batch: DataProto) -> list[int]:
        """(B,) media tokens of each row that the model itself encodes."""
        return [0] * len(batch)

    def routers(self) -> list[Router]:
        """Return the modules that choose experts; none for a dense model."""
        return []

    @contextmanager
    def observed_by(self, observers: Iterable[ForwardObserver]) -> Iterator[Columns]:
        """Have more observers watch the pass in the block; yield the columns that it leaves."""
        before = self.observers, self._columns
        self.observers, self._columns = [*self.observers, *observers], {}
        try:
            yield self._columns
        finally:
            self.observers, self._columns = before
