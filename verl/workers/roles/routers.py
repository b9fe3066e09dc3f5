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
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl.batch_keys import ENGINE_ROUTES, OLD_ROUTES, ROUTE_MATCHES
from verl.models.mixture.routing import balance_loss
from verl.protocol import DataProto
from verl.workers.packing.row_forward import RowForward
from verl.workers.packing.row_routes import RouteUse
from verl.workers.roles.metric_sums import MetricSums

CHOICES = "expert_choices"  # (B, E) of a batch
# By role; others have them under their own prefix.
LOAD = {"actor": "moe/load_max", "train": "moe/load_max"}
RANK_LOAD = {"actor": "moe/ep_load_max", "train": "moe/ep_load_max"}  # of divided experts
# Metrics: share of the experts in the given routes which a router chooses as well.
ROUTE_AGREEMENT = "moe/route_agreement"  # of the engine and the trainer, before the update
REPLAY_AGREEMENT = "moe/replay_agreement"  # of the replayed routes and the update


class RouterBalance:
    """Adds the balance loss to the losses of micro batches."""

    def __init__(
        self,
        role: str,
        forward: RowForward,
        group: dist.ProcessGroup | None,
        coef: float,
        ranks: int = 1,  # that the experts of a layer are divided over
    ) -> None:
        self.role, self.forward, self.group, self.coef, self.ranks = role, forward, group, coef, ranks
        assert forward.routing is not None or not coef, "checked when the model was built"
        forward.records_routes = forward.routing is not None
        forward.keeps_router_logits = coef > 0
        self.choices: Tensor | None = None  # (E,) of the mini batch; None: of the next micro batch

    def total(self, parts: Sequence[DataProto]) -> list[Tensor]:
        """Sum `expert_choices` (B, E) of each mini batch over all ranks; collective."""
        counts = torch.stack([part.batch[CHOICES].double().sum(0) for part in parts])  # (parts, E)
        counts = counts.to(self.forward.device)
        dist.all_reduce(counts, group=self.group)
        return list(counts)

    def add_to(self, loss: Tensor, metrics: MetricSums) -> Tensor:
        """Add this rank's part to the loss of the micro batch whose forward pass has just run."""
        routes, self.forward.routes = self.forward.routes, []
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


class RouterReplay:
    """The columns of routes that each pass of the policy reads, and what it does with them."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.records = mode == "r2"  # the pass before the update

    def in_old_pass(self, batch: DataProto) -> RouteUse | None:
        """Return the routes that the pass before the update reads."""
        self._check(batch)
        return RouteUse(ENGINE_ROUTES, self.mode == "r3") if _has(batch, ENGINE_ROUTES) else None

    def in_update(self, batch: DataProto) -> tuple[RouteUse | None, str]:
        """Return the routes that the update reads, and the name of their metric.

        An update without a pass before it replays nothing with r2: its own choices are the old ones.
        """
        self._check(batch)
        column = OLD_ROUTES if self.records else ENGINE_ROUTES
        is_compared = ROUTE_MATCHES in batch.batch
        if self.mode != "off" and _has(batch, column):
            name = REPLAY_AGREEMENT if self.records or is_compared else ROUTE_AGREEMENT
            return RouteUse(column, True), name
        if _has(batch, ENGINE_ROUTES) and not is_compared:
            return RouteUse(ENGINE_ROUTES, False), ROUTE_AGREEMENT
        return None, ""

    def _check(self, batch: DataProto) -> None:
        if self.mode == "r3" and not _has(batch, ENGINE_ROUTES):
            raise ValueError(
                "`worker.actor.router_replay=r3` needs the engine's routes, and the rows have no"
                f" `{ENGINE_ROUTES}`: use r2, which needs none"
            )


def _has(batch: DataProto, column: str) -> bool:
    return column in batch.non_tensor_batch
