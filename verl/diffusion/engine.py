# SPDX-License-Identifier: Apache-2.0
"""Sampling of pictures with the weights that are trained, in place."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from verl.diffusion.families.interface import Size
from verl.diffusion.model import DiffusionModel
from verl.diffusion.sampler import NoiseSchedule, sample
from verl.diffusion.step_forward import StepForward
from verl.protocol import DataProto
from verl.workers.packing.micro_batches import max_over_ranks
from verl.workers.rollout.interface import FinishedResponse

IDLE = ""  # the prompt of a rank that has none left while others sample


@dataclass(frozen=True)
class FinishedPicture(FinishedResponse):
    """A sampled picture; its tokens are the numbers of its steps."""

    pixels: np.ndarray | None = None  # (3, H, W) uint8, or (F, 3, H, W) of a video
    latents: Tensor | None = None  # (S + 1, ...) before and after each step, if it draws noise
    kl: list[float] | None = None  # (S,) to the steps of the reference, if rewards have it


class DiffusionEngine:
    """Samples the pictures of this rank's prompts; every rank of FSDP runs the model equally often."""

    def __init__(
        self,
        policy: DiffusionModel,
        forward: StepForward,
        size: Size,
        *,
        at_once: int,  # pictures of a call of the model
        seed: int,
        measures_kl: bool = False,  # of steps with noise, to those of the reference
    ) -> None:
        self.policy, self.forward, self.at_once, self.seed = policy, forward, at_once, seed
        self.measures_kl = measures_kl
        self.shape = policy.family.latent_shape(policy.parts, size)

    def generate(
        self, prompts: DataProto, n: int, schedule: NoiseSchedule
    ) -> Iterator[list[FinishedPicture]]:
        """Sample `n` pictures for each prompt, in order, with each model on the device once.

        The noise of a picture depends on `seed`, the `uid` of its prompt and its number; without noisy steps,
        as in validation, on the prompt's text: another validation starts from the same noise.
        """
        uids = prompts.non_tensor_batch["uid"].tolist()
        texts = prompts.non_tensor_batch["prompt_text"].tolist()
        rows = [(uid, text, number) for uid, text in zip(uids, texts, strict=True) for number in range(n)]
        parts = [rows[at : at + self.at_once] for at in range(0, len(rows), self.at_once)]
        idle: list[list[tuple[str, str, int]]] = [[]] * (max_over_ranks(len(parts)) - len(parts))
        self.forward.prepare([*texts, IDLE] if idle else texts)
        with self.policy.loaded(), self.policy.vae.loaded():
            for part in parts + idle:
                found = self._sample(part or [(IDLE, IDLE, 0)], schedule)
                yield found if part else []

    def _sample(self, rows: Sequence[tuple[str, str, int]], schedule: NoiseSchedule) -> list[FinishedPicture]:
        names = [f"{uid if schedule.noisy else text} {number}" for uid, text, number in rows]
        generators = [self._generator(name) for name in names]
        noise = torch.stack([torch.randn(self.shape, generator=generator) for generator in generators])
        conditions = self.forward.conditions([text for _, text, _ in rows])
        velocity = partial(self.forward.velocity, conditions=conditions)
        self.forward.model.eval()

        def reference(latents: Tensor, times: Tensor) -> Tensor:
            with self.policy.reference():
                return velocity(latents, times)

        other = reference if self.measures_kl else None
        found = sample(velocity, noise.to(self.forward.device), schedule, generators, other)
        pixels = (self.policy.decode(found.latents[:, -1]) * 255).round().byte().numpy()
        latents, log_probs = found.latents.cpu(), found.log_probs.tolist()
        kl = [None] * len(rows) if found.kl is None else found.kl.tolist()
        steps = list(range(schedule.num_steps))
        return [
            FinishedPicture(
                *(uid, number, steps, log_probs[row], "stop"),
                pixels=pixels[row],
                latents=latents[row] if schedule.noisy else None,
                kl=kl[row],
            )
            for row, (uid, _, number) in enumerate(rows)
        ]

    def _generator(self, name: str) -> torch.Generator:
        # whatever rank and micro batch it is in
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
