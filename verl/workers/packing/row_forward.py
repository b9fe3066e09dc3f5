# SPDX-License-Identifier: Apache-2.0
"""Interface of a forward pass to an update, whatever the rows are: packed tokens, or steps of a sampler."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.fused_log_probs import TokenLogProbs
from verl.models.mixture.routing import Routes, Routing
from verl.protocol import DataProto
from verl.workers.packing.row_routes import RouteUse, RowRoutes
from verl.workers.packing.sp_strategy import StrategyPlanner


class RowForward(ABC):
    """Runs micro batches of rows through a model, and computes log-probs of what was sampled.

    Attributes:
        keys: Columns of tensors that it reads, with `attention_mask` and `loss_mask`.
        object_keys: Columns of objects that it reads.
        shares_prompts: True if it runs a prompt once for all of its rows.
        records_routes: True if passes with gradient leave their routes in `routes`.
        keeps_router_logits: True if these have the gates' gradients.
    """

    keys: ClassVar[Sequence[str]]
    object_keys: ClassVar[Sequence[str]]
    shares_prompts = records_routes = keeps_router_logits = False
    _choices: list[Tensor] | None = None  # collected while it is a list
    _observed: RowRoutes | None = None

    def __init__(self, model: nn.Module, device: torch.device | str, sp: SequenceParallel) -> None:
        self.model, self.device, self.sp = model, device, sp
        self.routes: list[Routes] = []

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

    def parts(self, micro: DataProto) -> Sequence[DataProto]:
        """Divide a micro batch into passes with a gradient of their own; every rank has as many."""
        return [micro]

    def media_tokens(self, batch: DataProto) -> list[int]:
        """(B,) media tokens of each row that the model itself encodes."""
        return [0] * len(batch)

    @property
    def routing(self) -> Routing | None:
        """None for a dense model."""
        return None

    @cached_property
    def planner(self) -> StrategyPlanner:
        return StrategyPlanner(self.sp.size)

    def expert_choices(self, micro: DataProto) -> Tensor:
        """(B, E) float32: how often the tokens of each sequence choose each expert, over all layers."""
        raise NotImplementedError(f"{type(self).__name__} runs no mixture of experts")

    @property
    def num_routers(self) -> int:
        """Layers that choose experts."""
        return 0 if self.routing is None else len(self.routing.routers)

    @contextmanager
    def observing_routes(self, use: RouteUse | None, *, records: bool = False) -> Iterator[RowRoutes]:
        """Compare or replay the rows' routes in the passes of the block, or record the used ones."""
        self._observed = RowRoutes(use, records)
        try:
            yield self._observed
        finally:
            self._observed = None

    @contextmanager
    def counting_choices(self) -> Iterator[list[Tensor]]:
        """Collect the `expert_choices` of the passes without gradients in the block."""
        self._choices = []
        try:
            yield self._choices
        finally:
            self._choices = None
