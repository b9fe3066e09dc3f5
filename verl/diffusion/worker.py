# SPDX-License-Identifier: Apache-2.0
"""The worker process of a diffusion run: one device that samples pictures and trains on them in turn."""

import time
from collections.abc import Iterator
from dataclasses import replace

from verl.diffusion.engine import DiffusionEngine, FinishedPicture
from verl.diffusion.families.registry import downloaded, family_of
from verl.diffusion.model import DiffusionModel
from verl.diffusion.prompts import PromptEncoder
from verl.diffusion.sampler import schedule_of, size_of
from verl.diffusion.step_forward import StepForward
from verl.distributed.device import memory_metrics, reset_peak_memory
from verl.distributed.sequence_parallel import SequenceParallel
from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.workers.base_worker import ModelWorker
from verl.workers.roles.actor import ActorTraining, DataParallelPPOActor, Updated
from verl.workers.rollout.interface import SamplingOptions
from verl.workers.run_options import RunOptions


class DiffusionWorker(ModelWorker):
    """One process of the worker group; its remote methods are those of `FSDPWorker` that such a run calls."""

    options: RunOptions

    @register(Dispatch.ALL, phase="init_model")
    def init_model(self) -> None:
        config, actor = self.config, self.config.actor
        sp = self._divide(actor)
        self.set_axis("rollout", sp.dp_index, sp.dp_size, is_first=sp.index == 0)
        family = family_of(downloaded(actor.model))
        self.policy = DiffusionModel(
            family, actor, device=self.device, world_size=self.world_size,
            training_steps=self.options.training_steps, seed=self.options.seed, sp=sp,
        )  # fmt: skip
        self.models, parts = [self.policy], self.policy.parts
        size = size_of(config.rollout, family)
        self.schedule = schedule_of(config.rollout, family, parts, size)
        self.certain = schedule_of(config.rollout, family, parts, size, certain=True)
        self.forward = self._build_forward(sp)
        self.engine = DiffusionEngine(
            self.policy, self.forward, size,
            at_once=int(actor.micro_batch_size_per_device_for_experience), seed=self.options.seed,
            measures_kl=self.options.has_full_kl_in_rewards,
        )  # fmt: skip
        self.actor = self._build_actor()

    def _build_forward(self, sp: SequenceParallel) -> StepForward:
        actor, family = self.config.actor, self.policy.family
        longest = self.options.max_prompt_length
        prompts = PromptEncoder(
            family, self.policy.parts, self.device, min(longest, family.longest_prompt),
            self.policy.text_encoders.loaded,
        )  # fmt: skip
        return StepForward(
            family, self.policy.model, self.schedule, prompts,
            guidance=self.config.rollout.guidance_scale,
            reference=self.policy.reference if self.options.kl_loss else None,
            at_once=None if actor.reads_whole_rows else int(actor.micro_batch_size_per_device_for_update),
            sp=sp,
        )  # fmt: skip

    def _build_actor(self) -> DataParallelPPOActor:
        actor = self.config.actor
        if actor.loss_avg_mode == "seq":  # all pictures have as many steps
            actor = replace(actor, loss_avg_mode="token")
        training = ActorTraining(
            *self.policy.training, self.config.rollout.n, self.schedule.num_steps,
            kl_loss=self.options.kl_loss, reference=self.forward if self.options.kl_loss else None,
        )  # fmt: skip
        return DataParallelPPOActor(actor, self.forward, training)

    @register(Dispatch.ALL, phase="sync_weights")
    def sync_weights(self, version: int) -> None:
        """Do nothing: pictures are sampled with the weights that are trained."""

    @register(Dispatch.ALL, phase="sleep")
    def sleep_engine(self) -> None:
        """Do nothing."""

    @register(Dispatch.SHARD, phase="gen", streaming=True)
    def generate(self, prompts: DataProto, options: SamplingOptions) -> Iterator[list[FinishedPicture]]:
        """Sample pictures; with temperature 0, as in validation, by the ODE."""
        schedule = self.certain if options.is_greedy else self.schedule
        yield from self.engine.generate(prompts, options.n, schedule)

    @register(Dispatch.SHARD, phase="update_actor")
    def update_actor(self, batch: DataProto, entropy_coef: float, seed: int) -> Updated:
        """Update the policy on this rank's share of every mini batch."""
        reset_peak_memory(self.options.device)
        start = time.perf_counter()
        self.forward.prepare(batch.non_tensor_batch["prompt_text"].tolist())  # other ranks sampled some rows
        with self.policy.loaded(with_optimizer=True):
            updated = self.actor.update(batch, 1.0, entropy_coef=entropy_coef, seed=seed)
        metrics = updated.metrics | {"perf/update_s": time.perf_counter() - start}
        return Updated(metrics | memory_metrics(self.options.device), None)
