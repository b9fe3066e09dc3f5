# SPDX-License-Identifier: Apache-2.0
"""The models that each process of a run holds shards of, with their sizes and where they wait."""

from collections.abc import Callable
from dataclasses import dataclass

from verl.planning import memory_model
from verl.planning.memory_model import Handling, ModelShape
from verl.planning.planned_run import PlannedModel, PlannedRun

NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

ReadShape = Callable[..., ModelShape]  # `verl.planning.model_sizes.read_shape`


@dataclass(frozen=True)
class Resting:
    """Bytes of a rank that are there all the time: on its device, and in host memory."""

    device: int
    host: int


@dataclass(frozen=True)
class HeldModel:
    """A model of a rank, and where it waits.

    Attributes:
        planned: Its options and what it computes.
        shape: Its sizes.
        how: It is held and run.
        host_weights: Its weights wait in host memory.
        host_state: So does its optimizer's state.
        is_streamed: FSDP keeps all of it in host memory and fetches layers.
    """

    planned: PlannedModel
    shape: ModelShape
    how: Handling
    host_weights: bool
    host_state: bool
    is_streamed: bool

    @property
    def is_trained(self) -> bool:
        """It has gradients and an optimizer."""
        return self.planned.optim is not None

    @property
    def weights(self) -> int:
        """Bytes of the shard."""
        return memory_model.weights(self.shape, self.how)

    @property
    def gradients(self) -> int:
        """Bytes of the shard's gradients."""
        return memory_model.gradients(self.shape, self.how) if self.is_trained else 0

    @property
    def state(self) -> int:
        """Bytes of the optimizer's state."""
        return memory_model.optimizer_state(self.shape, self.how) if self.is_trained else 0

    @property
    def state_here(self) -> int:
        """Bytes of the optimizer's state that are on the device while others work."""
        return 0 if self.host_state or self.is_streamed else self.state

    def resting(self) -> Resting:
        """While another model works."""
        in_host = self.weights * (self.host_weights or self.is_streamed)
        in_host += self.state * (self.host_state or self.is_streamed)
        return Resting(self.weights + self.state - in_host, in_host)


def held_models(run: PlannedRun, device: str, read_shape: ReadShape) -> list[HeldModel]:
    """Every model of a rank, in the order in which they are loaded.

    Args:
        run: Its models.
        device: "cuda" or "cpu".
        read_shape: Gives the sizes of a model.
    """
    return [_held(model, run.trainer.world_size, device, read_shape) for model in run.models]


def _held(model: PlannedModel, world_size: int, device: str, read_shape: ReadShape) -> HeldModel:
    fsdp, is_trained = model.fsdp, model.optim is not None
    shape = read_shape(
        model.model, fsdp, option=f"worker.{model.role}.model", is_trained=is_trained, head=model.head
    )
    moves = device == "cuda" and not fsdp.enable_cpu_offload
    return HeldModel(
        planned=model,
        shape=shape,
        how=Handling(
            device=device,
            ranks=fsdp.fsdp_size if 0 < fsdp.fsdp_size < world_size else world_size,
            c=NUMBER_BYTES[fsdp.mp_param_dtype],
            r=NUMBER_BYTES[fsdp.mp_reduce_dtype],
            checkpointing=model.model.enable_gradient_checkpointing,
            keeps_gathered=not fsdp.enable_full_shard,
            optimizer="adamw" if model.optim is None else model.optim.strategy,
        ),
        host_weights=moves and model.offload.offload_params,
        host_state=moves and model.offload.offload_optimizer,
        is_streamed=device == "cuda" and fsdp.enable_cpu_offload,
    )
