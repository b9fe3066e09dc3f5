# SPDX-License-Identifier: Apache-2.0
"""A tiny diffusion model under FSDP: built, updated, saved and sampled on every rank."""

import torch

from tests.diffusion.models import LENGTH, PROMPTS, SIZE, STEPS, generators, noise
from verl.checkpoint.sharded import write_snapshot
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig, OptimConfig, TrainedModelConfig
from verl.diffusion.families.interface import guided
from verl.diffusion.families.registry import family_of
from verl.diffusion.model import DiffusionModel
from verl.diffusion.sampler import NoiseSchedule, sample

KINDS = {
    "full": LoraConfig(),
    "lora": LoraConfig(rank=4, alpha=6),
    "dora": LoraConfig(rank=2, alpha=6, target_modules="attn.to_q,ff.net.2", use_dora=True),
}
TIMES = [987.3, 303.7]


def build(folder, lora, world_size, *, seed=0, torch_dtype="fp32", computes_in="fp32", **options):
    config = TrainedModelConfig(
        model=ModelConfig(model_path=str(folder), lora=lora, **options),
        optim=OptimConfig(lr=3e-2, lr_scheduler_type="cosine"),
        fsdp=FSDPConfig(torch_dtype=torch_dtype, mp_param_dtype=computes_in),
    )
    return DiffusionModel(
        family_of(folder), config,
        device=torch.device("cpu"), world_size=world_size, training_steps=8, seed=seed,
    )  # fmt: skip


def conditions_of(policy):
    with torch.no_grad():
        return policy.family.encode(policy.parts, PROMPTS, LENGTH)


def velocities(policy, seed):
    latents = noise((policy.family, policy.parts), seed)
    return unguided(policy, latents, torch.tensor(TIMES), conditions_of(policy))


def unguided(policy, latents, times, conditions):
    return guided(policy.family, policy.model, latents, times, conditions, None, 1.0)


def update(policy, seed):
    """Pull the velocities of noise to zero."""
    with policy.loaded(with_optimizer=True):
        velocities(policy, seed).square().mean().backward()
        policy.optimizer.step()
        policy.optimizer.zero_grad()
        policy.scheduler.step()


def save(policy, folder, *, is_first, extra=None):
    files = (None, None) if is_first else None
    snapshot = policy.snapshot(model_only=False, copies=False, extra=extra or {}, files=files)
    write_snapshot(folder / policy.role, snapshot)


def images(policy):
    """Sample without noise and without guidance."""
    family, parts = policy.family, policy.parts
    conditions = conditions_of(policy)
    schedule = NoiseSchedule(*family.times(parts, STEPS, SIZE), 0.7, "sde", noisy=())
    found = sample(
        lambda latents, times: unguided(policy, latents, times, conditions),
        noise((family, parts)), schedule, generators(),
    )  # fmt: skip
    return policy.decode(found.latents[:, -1])
