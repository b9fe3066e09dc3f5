# SPDX-License-Identifier: Apache-2.0
"""A mixture's routers in the policy's passes: the loss that balances them, and the replay of their choices.

The balance loss of an optimizer step reads how often all its tokens choose each expert, which a micro batch
alone does not know. Choices are those under the weights from before the update's first step, like
`old_log_probs`: they come with the batch, or from a forward pass before the first step; an update of a single
micro batch counts its own. Hence the loss does not depend on the division into micro batches and ranks.

Replay (`worker.actor.router_replay`):

    off   every pass chooses experts itself
    r2    the update replays the choices of the pass that computes `old_log_probs`
    r3    both replay the choices of the rollout engine

The reference and the critic always choose for themselves, since their weights differ. So does a token whose
experts are unknown, such as the last one of a response, which no engine ever runs.

A row holds its routes as a tensor (tokens, L, k), of its prompt and response without padding.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl.batch_keys import ENGINE_ROUTES, OLD_ROUTES, ROUTE_MATCHES, BatchError
from verl.models.mixture.routes import unrouted
from verl.models.mixture.routing import ChoicePass, ExpertChoices, Routes, Routing, balance_loss
from verl.protocol import DataProto
from verl.utils.plain_data import objects
from verl.workers.packing.observers import Columns, ForwardObserver, PackedRows, PassTokens
from verl.workers.packing.row_forward import RowForward
from verl.workers.roles.metric_sums import MetricSums

CHOICES = "expert_choices"  # (B, E) of a batch
# By role; others have them under their own prefix.
LOAD = {"actor": "moe/load_max", "train": "moe/load_max"}
RANK_LOAD = {"actor": "moe/ep_load_max", "train": "moe/ep_load_max"}  # of divided experts
# Metrics: share of the experts in the given routes which a router chooses as well.
ROUTE_AGREEMENT = "moe/route_agreement"  # of the engine and the trainer, before the update
REPLAY_AGREEMENT = "moe/replay_agreement"  # of the replayed routes and the update


class ChoiceCounter(ForwardObserver):
    """Leaves `CHOICES` (b, E) float32: how often a row's tokens choose each expert, over all layers."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing

    @contextmanager
    def watching(self, tokens: PassTokens, inputs: None) -> Iterator[Columns]:
        columns: Columns = {}
        with self.routing.recording(tokens.weights, by_token=True) as routes:
            yield columns
        assert routes.by_token is not None, "requested"
        columns[CHOICES] = tokens.row_sums(routes.by_token)


class RouterBalance(ForwardObserver):
    """Adds the balance loss to the losses of micro batches; watches the passes with gradients."""

    def __init__(
        self,
        role: str,
        forward: RowForward,
        coef: float,
        ranks: int = 1,  # that the experts of a layer are divided over
    ) -> None:
        self.role, self.forward, self.coef, self.ranks = role, forward, coef, ranks
        self.routing = Routing.of(forward.model) if forward.routers() else None
        self.routes: list[Routes] = []  # of the passes of a micro batch
        assert self.routing is not None or not coef, "checked when the model was built"
        if self.routing is not None:
            forward.observers.append(self)
        self.choices: Tensor | None = None  # (E,) of the mini batch; None: of the next micro batch

    @contextmanager
    def watching(self, tokens: PassTokens, inputs: None) -> Iterator[Columns]:
        if self.routing is None or not torch.is_grad_enabled():
            yield {}
            return
        with self.routing.recording(tokens.weights, keeps_logits=self.coef > 0) as routes:
            yield {}
        self.routes.append(routes)

    def counters(self) -> list[ChoiceCounter]:
        """Return the observer of what the loss must know before an update; none without a loss."""
        return [ChoiceCounter(self.routing)] if self.routing is not None and self.coef else []

    def count_choices(self, micro: DataProto) -> Columns:
        """Run a micro batch for its `expert_choices` only."""
        with self.forward.observed_by(self.counters()) as columns:
            self.forward.run(micro)
        return columns

    def total(self, parts: Sequence[DataProto]) -> list[Tensor]:
        """Sum `expert_choices` (B, E) of each mini batch over all ranks; collective."""
        counts = torch.stack([part.batch[CHOICES].double().sum(0) for part in parts])  # (parts, E)
        counts = counts.to(self.forward.device)
        dist.all_reduce(counts, group=self.forward.sp.dp_group)
        return list(counts)

    def add_to(self, loss: Tensor, metrics: MetricSums) -> Tensor:
        """Add this rank's part to the loss of the micro batch whose forward pass has just run."""
        routes, self.routes = self.routes, []
        if not routes:
            return loss
        for each in routes:
            loads = torch.stack(each.load)  # (layers, E)
            metrics.add_loads(LOAD.get(self.role, f"{self.role}/moe_load_max"), loads)
            if self.ranks > 1:
                of_ranks = loads.unflatten(-1, (self.ranks, -1)).sum(-1)  # (layers, ranks)
                metrics.add_loads(RANK_LOAD.get(self.role, f"{self.role}/moe_ep_load_max"), of_ranks)
        if not self.coef:
            return loss
        choices = self.choices
        if choices is None:
            choices = torch.stack([each.choices() for each in routes]).sum(0)
            dist.all_reduce(choices)
        balance = balance_loss(routes, choices)
        metrics.add_loss(f"{self.role}/router_aux_loss", balance)
        return loss + self.coef * balance


class RouteObserver(ForwardObserver):
    """Replays the routes in a column, or only compares them, and records the routes of a pass.

    It leaves `ROUTE_MATCHES` (b, 2) float32 where the rows have routes, and, if it records, `OLD_ROUTES`
    (b, T, L, k) on CPU, `unrouted` on padding.
    """

    def __init__(
        self, choices: ExpertChoices, column: str | None, *, replays: bool = False, records: bool = False
    ) -> None:
        self.choices, self.column, self.replays, self.records = choices, column, replays, records
        self.reads = () if column is None else (column,)

    def inputs(self, micro: DataProto, packed: PackedRows) -> Tensor | None:
        """(n, L, k) routes of this rank's tokens; None if the rows have none."""
        rows = None if self.column is None else micro.non_tensor_batch.get(self.column)
        if rows is None:
            return None
        routes = pack_routes(list(rows), packed, self.choices.no_routes)
        if packed.plan is None:
            return routes
        plan = packed.plan
        return routes[plan.local].masked_fill(plan.is_padding[:, None, None], unrouted(routes.dtype))

    @contextmanager
    def watching(self, tokens: PassTokens, inputs: Tensor | None) -> Iterator[Columns]:
        columns: Columns = {}
        if inputs is None and not self.records:
            yield columns
            return
        with self.choices.running(ChoicePass(inputs, self.replays, self.records)) as found:
            yield columns
        if found.matches is not None:
            columns[ROUTE_MATCHES] = tokens.row_sums(torch.stack([found.matches, found.known()], 1))
        if self.records:
            routes = found.routes()
            columns[OLD_ROUTES] = tokens.padded(routes, unrouted(routes.dtype)).cpu()


def pack_routes(rows: Sequence[Tensor | None], packed: PackedRows, like: Tensor) -> Tensor:
    """Pack the routes of padded rows: (length, L, k), `unrouted` where nothing is known.

    Args:
        rows: (tokens, L, k) each; None: not known.
        packed: A token of a shared prompt has its first row's routes.
        like: (0, L, k) of the dtype.
    """
    routes = like.new_full((packed.length, *like.shape[1:]), unrouted(like.dtype))
    for row in reversed(range(len(rows))):
        known = rows[row]
        if known is None:
            continue
        places = packed.positions[row][packed.mask[row].bool()]
        if known.shape != (len(places), *like.shape[1:]) or known.dtype != like.dtype:
            raise BatchError(
                f"row {row} of {len(places)} tokens has routes {known.dtype} {tuple(known.shape)}, and the"
                f" model's are {like.dtype} {(len(places), *like.shape[1:])}"
            )
        routes[places] = known
    return routes


def column_of(padded: Tensor, mask: Tensor) -> np.ndarray:
    """Return the column of routes (b, T, L, k): an object array of (tokens, L, k)."""
    return objects(routes[keep] for routes, keep in zip(padded, mask.bool(), strict=True))


class RouterReplay:
    """The columns of routes that each pass of the policy reads, and what it does with them."""

    def __init__(self, mode: str, model: Any) -> None:
        self.mode, self.model = mode, model
        self.records = mode == "r2"  # the pass before the update

    @cached_property
    def choices(self) -> ExpertChoices:
        return ExpertChoices(self.model)

    def in_old_pass(self, batch: DataProto) -> list[ForwardObserver]:
        """Return the observer of the pass before the update; none if it has nothing to do."""
        self._check(batch)
        column = ENGINE_ROUTES if _has(batch, ENGINE_ROUTES) else None
        return self._observers(column, replays=self.mode == "r3", records=self.records)

    def in_update(self, batch: DataProto) -> list[ForwardObserver]:
        """Return the observer of the update.

        An update without a pass before it replays nothing with r2: its own choices are the old ones.
        """
        self._check(batch)
        column = OLD_ROUTES if self.records else ENGINE_ROUTES
        if self.mode != "off" and _has(batch, column):
            return self._observers(column, replays=True)
        is_compared = ROUTE_MATCHES in batch.batch or not _has(batch, ENGINE_ROUTES)
        return self._observers(None if is_compared else ENGINE_ROUTES)

    def metric(self, batch: DataProto) -> str:
        """Return the name of what the update's matches are."""
        replays_own = self.records and _has(batch, OLD_ROUTES)
        return REPLAY_AGREEMENT if replays_own or ROUTE_MATCHES in batch.batch else ROUTE_AGREEMENT

    def _observers(
        self, column: str | None, *, replays: bool = False, records: bool = False
    ) -> list[ForwardObserver]:
        if column is None and not records:
            return []
        return [RouteObserver(self.choices, column, replays=replays, records=records)]

    def _check(self, batch: DataProto) -> None:
        if self.mode == "r3" and not _has(batch, ENGINE_ROUTES):
            raise ValueError(
                "`worker.actor.router_replay=r3` needs the engine's routes, and the rows have no"
                f" `{ENGINE_ROUTES}`: use r2, which needs none"
            )


def _has(batch: DataProto, column: str) -> bool:
    return column in batch.non_tensor_batch
