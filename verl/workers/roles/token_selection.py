# SPDX-License-Identifier: Apache-2.0
"""Token selection: losses that treat some tokens of a mini batch differently.

A choice among all tokens of a mini batch (by covariance, `algorithms/token_selection.py`) would depend on the
micro batches if each made its own. So the log-probs of the whole mini batch are computed first, under the
weights before its update, and gathered; every rank makes the same choice and keeps its own rows. It costs
one more forward pass.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algorithms.token_selection import SelectionInputs, TokenSelection
from verl.config.worker import ActorConfig
from verl.protocol import DataProto
from verl.workers.packing.row_forward import RowForward
from verl.workers.roles.updater import compute_log_probs


class MiniBatchSelection:
    """Selects tokens of mini batches for one model."""

    def __init__(
        self,
        config: ActorConfig,
        forward: RowForward,
        group: dist.ProcessGroup | None,
        choose: TokenSelection,
    ) -> None:
        self.config, self.forward, self.group, self.choose = config, forward, group, choose
        self.ratio = config.kl_cov_ratio if config.loss_type == "kl_cov" else config.clip_cov_ratio

    def add_to(self, mini_batch: DataProto, temperature: float, seed: int) -> DataProto:
        """Add `selected` (B, R) bool; collective over all ranks."""
        tensors = mini_batch.batch
        keep = tensors["loss_mask"].bool()  # (B, R)
        log_probs = compute_log_probs(self.config, self.forward, self.group, mini_batch, temperature)
        columns = torch.arange(keep.shape[1]).expand_as(keep)
        row_ids = tensors["row_ids"][:, None].expand_as(keep)
        values = torch.stack([log_probs, tensors["old_log_probs"], tensors["advantages"]])[:, keep]  # (3, n)
        token_ids = torch.stack([row_ids, columns])[:, keep]  # (2, n)
        all_values, own = self._gather(values)
        all_token_ids, _ = self._gather(token_ids)
        chosen = self.choose(
            SelectionInputs(
                *all_values.unbind(),
                *all_token_ids.unbind(),
                seed=seed,
                clip_ratio_low=self.config.clip_ratio_low,
                clip_ratio_high=self.config.clip_ratio_high,
                ratio=self.ratio,
                lower=self.config.clip_cov_lb,
                upper=self.config.clip_cov_ub,
            )
        )
        selected = torch.zeros_like(keep).masked_scatter(keep, chosen[own])
        return mini_batch.merge(DataProto.from_dict({"selected": selected}))

    def _gather(self, columns: Tensor) -> tuple[Tensor, slice]:
        """Gather (k, n) of every rank as (k, N), n its own; also return the slice of this rank's columns."""
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, columns, group=self.group)
        start = sum(part.shape[1] for part in gathered[: dist.get_rank(self.group)])
        return torch.cat(gathered, dim=1), slice(start, start + columns.shape[1])
