# SPDX-License-Identifier: Apache-2.0
"""A diffusion run as data: what it samples, and the sizes and work of its models. Needs no torch."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from verl.config.data import DataConfig
from verl.config.model import FSDPConfig, MicroBatchSize, ModelConfig, as_number
from verl.config.rollout import RolloutConfig
from verl.config.worker import WorkerConfig
from verl.planning.memory_model import ModelShape
from verl.planning.planned_model import PlannedModel, PlannedPass


@dataclass(frozen=True)
class Work:
    """Operations and memory of a run of a model."""

    products: float = 0.0  # floating-point operations of products and convolutions
    attention: float = 0.0  # and of attention
    moved: float = 0.0  # bytes that all other kernels read and write
    peak: float = 0.0  # bytes held at once at most, without weights
    kept: float = 0.0  # bytes held for the backward pass when the forward pass ends

    def times(self, number: float) -> "Work":
        """Return the work and memory of several such inputs at once."""
        return Work(*(number * getattr(self, entry.name) for entry in fields(self)))


@dataclass(frozen=True)
class PictureShape:
    """Sizes of a pipeline, and the work of one picture or video."""

    transformer: ModelShape
    blocks: tuple[int, ...]  # weights of each, which FSDP gathers one at a time
    buffers: int  # bytes of the transformer that every rank has
    text_encoders: int  # bytes
    vae: int  # bytes
    latent: int  # bytes of one latent in float32
    pixels: int  # bytes of one picture or video, whose numbers are bytes
    velocity: Work  # of a step of the sampler, with both predictions if they are guided
    update: Work  # of a step's forward and backward pass
    decoding: Work
    encoding: Work  # of a prompt


ReadPictures = Callable[[ModelConfig, FSDPConfig, RolloutConfig, int], PictureShape]


@dataclass(frozen=True)
class PlannedPictures:
    """A diffusion run; numbers are those of a rank in a step unless they say otherwise."""

    model: PlannedModel  # its passes: `gen` and `update_actor`
    rollout: RolloutConfig
    prompt_length: int
    prompts: int  # that it samples for
    pictures: int
    trained_steps: int  # of a picture
    updates: int  # optimizer steps
    epochs: int
    reference: bool  # adapters off, in the update
    whole_rows: bool  # the loss reads all steps of a picture at once

    def read(self, read: ReadPictures) -> PictureShape:
        return read(self.model.model, self.model.fsdp, self.rollout, self.prompt_length)

    @property
    def sampling(self) -> PlannedPass:
        return self.model.passes[0]

    @property
    def training(self) -> PlannedPass:
        return self.model.passes[-1]

    @property
    def latents_at_once(self) -> int:
        """Latents of a call of the model in an update; losses of whole rows take all steps of a picture."""
        if self.whole_rows:
            return self._size(self.training) * self.trained_steps
        return min(as_number(self.training.size), self.training.rows * self.trained_steps)

    @property
    def pictures_at_once(self) -> int:
        return self._size(self.sampling)

    def _size(self, each: PlannedPass) -> int:
        return min(as_number(each.size), each.rows)


def planned_pictures(
    data: DataConfig, worker: WorkerConfig, dp_size: int, *, reference: bool
) -> PlannedPictures:
    """Describe a run with `trainer.diffusion`."""
    actor, rollout = worker.actor, worker.rollout
    prompts = -(-data.rollout_batch_size // dp_size)
    pictures = data.rollout_batch_size * rollout.n // dp_size
    mini_batch = actor.global_batch_size * rollout.n // dp_size
    passes = (
        _pass("gen", "experience", actor.micro_batch_size_per_device_for_experience, pictures),
        _pass("update_actor", "update", actor.micro_batch_size_per_device_for_update, mini_batch),
    )
    model = PlannedModel("actor", actor.model, actor.fsdp, actor.offload, passes, actor.optim)
    first, stop = rollout.sde_window or (0, rollout.num_steps - 1)
    trained = max(1, round(rollout.train_timestep_fraction * (stop - first)))
    updates = data.rollout_batch_size // actor.global_batch_size * actor.ppo_epochs
    return PlannedPictures(
        model, rollout, data.max_prompt_length, prompts, pictures, trained, updates,
        actor.ppo_epochs, reference=reference, whole_rows=actor.reads_whole_rows,
    )  # fmt: skip


def _pass(phase: str, kind: str, size: MicroBatchSize, rows: int) -> PlannedPass:
    option = f"worker.actor.micro_batch_size_per_device_for_{kind}"
    return PlannedPass(phase, size, option, rows, False, False, is_update=kind == "update")
