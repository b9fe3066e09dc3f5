# SPDX-License-Identifier: Apache-2.0
"""Log-probs of sampled steps under the current weights (the diffusion counterpart of `PackedForward`).

Steps play the part of tokens: results are (B, S), and the roles of text models read them as they are.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from verl.diffusion.families.interface import Conditions, DiffusionFamily, guided
from verl.diffusion.prompts import PromptEncoder
from verl.diffusion.sampler import NoiseSchedule
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.fused_log_probs import TokenLogProbs
from verl.protocol import DataProto
from verl.workers.packing.micro_batches import max_over_ranks
from verl.workers.packing.row_forward import RowForward
from verl.workers.packing.sp_strategy import Strategy


class StepForward(RowForward):
    """Runs a diffusion model over steps of trajectories, in any order.

    Micro batches have `latents` (B, S + 1, ...) of whole trajectories, `loss_mask` (B, S) and `prompt_text`;
    the model runs the latents of steps that the mask has, all of them at once.
    """

    keys = ("latents", "attention_mask", "responses", "loss_mask")
    object_keys = ("uid", "prompt_text")
    strategies = (Strategy.SHARDED,)

    def __init__(
        self,
        family: DiffusionFamily,
        model: nn.Module,  # the transformer, possibly under FSDP
        schedule: NoiseSchedule,  # that was sampled
        prompts: PromptEncoder,
        *,
        guidance: float = 1.0,  # at most 1 disables classifier-free guidance
        # Keeps what is trained out of the model inside a block; None: there is no KL.
        reference: Callable[[], AbstractContextManager[Any]] | None = None,
        # Latents of a call of the model in an update; None keeps the steps of a row together, for losses of
        # whole trajectories.
        at_once: int | None = None,
        sp: SequenceParallel | None = None,  # ranks that share the tokens of every row
    ) -> None:
        super().__init__(model, prompts.device, sp or SequenceParallel())
        self.family, self.schedule, self.prompts = family, schedule, prompts
        self.guidance, self.reference, self.at_once = guidance, reference, at_once

    def prepare(self, texts: Sequence[str]) -> None:
        """Encode prompts before they are needed, and the one of predictions without a condition."""
        twice = self.family.predicts_twice(self.guidance)
        self.prompts.prepare([*texts, *([self.family.unguided] if twice else [])])

    def conditions(self, texts: Sequence[str]) -> tuple[Conditions, Conditions | None]:
        """Return what the model reads of prompts, and of none as many times if that guides."""
        twice = self.family.predicts_twice(self.guidance)
        without = self.prompts.encode([self.family.unguided] * len(texts)) if twice else None
        return self.prompts.encode(texts), without

    def velocity(
        self, latents: Tensor, times: Tensor, conditions: tuple[Conditions, Conditions | None]
    ) -> Tensor:
        """Return guided velocities of latents (B, ...) at times (B,)."""
        given, without = conditions
        return guided(self.family, self.model, latents, times, given, without, self.guidance)

    def parts(self, micro: DataProto) -> Sequence[DataProto]:
        """Divide the steps of a micro batch into calls of the model: (row, step) in any rows."""
        if self.at_once is None:
            return [micro]
        mask = micro.batch["loss_mask"]
        places = mask.nonzero()  # (places, 2)
        parts = []
        for number in range(max_over_ranks(max(1, -(-len(places) // self.at_once)))):
            rows, steps = places[number * self.at_once : (number + 1) * self.at_once].T
            own = torch.zeros_like(mask)
            own[rows, steps] = mask[rows, steps]
            parts.append(micro.merge({"loss_mask": own}, replace=["loss_mask"]))
        return parts

    def log_probs(
        self,
        micro: DataProto,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_sum_squares: bool = False,
        reference: Any = None,
        divergence: Any = None,
    ) -> TokenLogProbs:
        """Compute log-probs of the steps of `loss_mask`, and the KL of each to the reference.

        Returns:
            (B, S) float32 each, zero where the mask is; the entropy is that of the steps' Gaussians, which no
            weight changes.
        """
        mask, latents = micro.batch["loss_mask"], micro.batch["latents"]
        rows, steps = mask.nonzero(as_tuple=True)
        if not len(rows):  # FSDP needs something to run
            rows, steps = torch.zeros(1, dtype=torch.int64), torch.tensor(self.schedule.noisy[:1])
        before, after = (latents[rows, number].to(self.device) for number in (steps, steps + 1))
        times = self.schedule.times[steps].to(self.device)
        conditions = self.conditions(micro.non_tensor_batch["prompt_text"][rows.numpy()].tolist())
        found = self.schedule.after(steps, before, self.velocity(before, times, conditions))
        kl = None
        if self.reference is not None:
            with torch.no_grad(), self.reference():
                other = self.schedule.after(steps, before, self.velocity(before, times, conditions))
            kl = found.kl(other)
        entropy = torch.log(found.std) + 0.5 * math.log(2 * math.pi * math.e) if with_entropy else None
        kept, places = mask[rows, steps].to(self.device), (rows.to(self.device), steps.to(self.device))
        zeros = torch.zeros(mask.shape, device=self.device)
        log_probs, entropy, kl = (
            None if each is None else zeros.index_put(places, each * kept)
            for each in (found.log_prob(after), entropy, kl)
        )
        assert log_probs is not None, "always computed"
        return TokenLogProbs(log_probs, entropy, kl=kl)
