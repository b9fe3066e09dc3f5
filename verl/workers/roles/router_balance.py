# SPDX-License-Identifier: Apache-2.0
"""The balance of a mixture's routers during an update: the loss, and metrics of the largest load.

The loss of an optimizer step reads how often all its tokens choose each expert, which a micro batch alone
does not know. Choices are those under the weights from before the update's first step, like
`old_log_probs`: they come with the batch, or from a forward pass before the first step; an update of a single
micro batch counts its own. Hence the loss does not depend on the division into micro batches and ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl.models.mixture.routing import balance_loss
from verl.protocol import DataProto
from verl.workers.packing.row_forward import RowForward
from verl.workers.roles.metric_sums import MetricSums

CHOICES = "expert_choices"  # (B, E) of a batch
# By role; others have them under their own prefix.
LOAD = {"actor": "moe/load_max", "train": "moe/load_max"}
RANK_LOAD = {"actor": "moe/ep_load_max", "train": "moe/ep_load_max"}  # of divided experts


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
