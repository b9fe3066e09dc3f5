# SPDX-License-Identifier: Apache-2.0
"""The tokens that a loss chooses among all tokens of a mini batch, on all ranks.

Such a choice (by covariance, `algorithms/token_selection.py`) cannot be made micro batch by micro batch
without depending on the cut. So the log-probs of the whole mini batch are computed first, under the weights
that it is about to change, and gathered; every rank makes the same choice and keeps its own rows. It costs
one more forward pass.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algorithms.token_selection import TOKEN_SELECTIONS, SelectionInputs
from verl.config.model import as_number
from verl.config.worker import ActorConfig
from verl.protocol import DataProto
from verl.workers.packing.forward import PackedForward
from verl.workers.roles.updater import forward_in_micro_batches


class MiniBatchSelection:
    """Adds `selected` (B, R) to mini batches."""

    def __init__(self, config: ActorConfig, forward: PackedForward, group: dist.ProcessGroup | None) -> None:
        self.config = config
        self.forward = forward
        self.group = group
        self.choose = TOKEN_SELECTIONS[config.loss_type]
        share = {"clip_cov": config.clip_cov_ratio, "kl_cov": config.kl_cov_ratio}
        self.ratio = share[config.loss_type]

    def prepare(self, temperature: float, seed: int) -> Callable[[DataProto], DataProto]:
        """What `Updater.run` calls with each mini batch of one update; the choice differs between them."""
        number = 0

        def select(mini_batch: DataProto) -> DataProto:
            nonlocal number
            number += 1
            return self._select(mini_batch, temperature, seed * 1_000_003 + number)

        return select

    def _select(self, mini_batch: DataProto, temperature: float, seed: int) -> DataProto:
        tensors = mini_batch.batch
        keep = tensors["response_mask"].bool()  # (B, R)
        log_probs = forward_in_micro_batches(
            self.forward,
            mini_batch,
            lambda micro: self.forward.log_probs(micro, temperature).log_probs,
            size=as_number(self.config.micro_batch_size_per_device_for_experience),
            dynamic_batching=self.config.dynamic_batching,
            group=self.group,
        )
        positions = torch.arange(keep.shape[1]).expand_as(keep)
        row_ids = tensors["row_ids"][:, None].expand_as(keep)
        numbers = torch.stack([log_probs, tensors["old_log_probs"], tensors["advantages"]])[:, keep]  # (3, n)
        places = torch.stack([row_ids, positions])[:, keep]  # (2, n)
        all_numbers, own = self._gather(numbers)
        all_places, _ = self._gather(places)
        chosen = self.choose(
            SelectionInputs(
                *all_numbers.unbind(),
                *all_places.unbind(),
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

    def _gather(self, rows: Tensor) -> tuple[Tensor, slice]:
        """(k, n) of every rank, n its own, as (k, N); and where this rank's columns are."""
        device = self.forward.device
        counts = torch.zeros(dist.get_world_size(self.group), dtype=torch.int64, device=device)
        rank = dist.get_rank(self.group)
        counts[rank] = rows.shape[1]
        dist.all_reduce(counts, group=self.group)
        sizes = counts.tolist()
        padded = rows.new_zeros(len(rows), max(sizes))
        padded[:, : rows.shape[1]] = rows
        padded = padded.to(device)
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        joined = torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1).cpu()
        start = sum(sizes[:rank])
        return joined, slice(start, start + sizes[rank])
