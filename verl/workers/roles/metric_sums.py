# SPDX-License-Identifier: Apache-2.0
"""Metrics of an update, kept as sums and counts, since a mean of means would be wrong."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor

from verl.utils.masking import masked_sum


class MetricSums:
    """Sums and counts of metrics, kept on the device."""

    def __init__(self, device: torch.device | str) -> None:
        self._losses: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._loads: dict[str, Tensor] = {}  # of each layer and expert
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._ranks = 1

    def shared_by(self, ranks: int) -> "MetricSums":
        """A view that adds to the same sums values which `ranks` ranks compute alike and each add."""
        view = copy.copy(self)
        view._ranks = ranks
        return view

    def add_loss(self, name: str, loss: Tensor) -> None:
        """Add the loss of a micro batch, already divided by the denominators of its mini batch."""
        self._losses[name] = self._losses.get(name, self._zero) + loss.detach() / self._ranks

    def add_mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        self.add_shares(name, masked_sum(values.detach().double(), mask), mask.sum())

    def add_shares(self, name: str, parts: Tensor, wholes: Tensor) -> None:
        """Add scalars whose quotient over the training step is the metric."""
        self._sums[name] = self._sums.get(name, self._zero) + parts.double() / self._ranks
        self._counts[name] = self._counts.get(name, self._zero) + wholes.double() / self._ranks

    def add_loads(self, name: str, loads: Tensor) -> None:
        """Add the tokens of this rank that each layer sent to each expert: (layers, experts) float64.

        The metric is the largest share of a layer's tokens times the number of experts; or of groups of them.
        """
        self._loads[name] = self._loads[name] + loads if name in self._loads else loads

    def reduce(
        self, group: dist.ProcessGroup | None, num_updates: int, sp_group: dist.ProcessGroup | None = None
    ) -> dict[str, float]:
        """Sum over the data-parallel `group` and `sp_group`, the ranks with the same rows, and return means.

        Losses are divided by `num_updates`, the other metrics by their counts.
        """
        tables = (self._losses, self._sums, self._counts)
        scalars = [value for table in tables for value in table.values()]
        flat = torch.cat([torch.stack(scalars), *(loads.flatten() for loads in self._loads.values())])
        dist.all_reduce(flat, group=group)
        if sp_group is not None:
            dist.all_reduce(flat, group=sp_group)
        parts = flat.split([len(scalars), *(loads.numel() for loads in self._loads.values())])
        largest = []
        for part, own in zip(parts[1:], self._loads.values(), strict=True):
            loads = part.view_as(own)
            shares = loads / loads.sum(-1, keepdim=True).clamp(min=1.0)
            largest.append(shares.max().item() * loads.shape[-1])
        totals = iter(parts[0].tolist())
        losses, sums, counts = ({name: next(totals) for name in table} for table in tables)
        means = {name: total / num_updates for name, total in losses.items()}
        means |= {name: total / max(counts[name], 1.0) for name, total in sums.items()}
        return means | dict(zip(self._loads, largest, strict=True))
