# SPDX-License-Identifier: Apache-2.0
"""The models that each process of a run holds shards of, as far as their memory depends on the options."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl.trainer.config import PPOConfig
from verl.utils import memory_model
from verl.utils.memory_model import Handling, Line, ModelShape
from verl.workers.model_config import FSDPConfig, ModelConfig

NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

ReadShape = Callable[..., ModelShape]  # `verl.workers.model_sizes.read_shape`


@dataclass(frozen=True)
class Resting:
    """Bytes of a rank that are there all the time: on its device, and in host memory."""

    device: int
    host: int


@dataclass(frozen=True)
class HeldModel:
    """A model of a rank, where it waits, and how many sequences it runs at once.

    Attributes:
        role: Section of its options.
        shape: Its sizes.
        how: It is held and run.
        is_trained: It has gradients and an optimizer.
        host_weights: Its weights wait in host memory.
        host_state: So does its optimizer's state.
        is_streamed: FSDP keeps all of it in host memory and fetches layers.
    """

    role: str
    shape: ModelShape
    how: Handling
    is_trained: bool
    host_weights: bool
    host_state: bool
    is_streamed: bool

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

    def resting(self) -> Resting:
        """While another model works."""
        in_host = self.weights * (self.host_weights or self.is_streamed)
        in_host += self.state * (self.host_state or self.is_streamed)
        return Resting(self.weights + self.state - in_host, in_host)


def held_models(config: PPOConfig, device: str, read_shape: ReadShape) -> list[HeldModel]:
    """Every model of a rank, in the order in which they are loaded.

    Args:
        config: Of the run.
        device: "cuda" or "cpu".
        read_shape: Gives the sizes of a model.
    """
    worker, actor = config.worker, config.worker.actor

    def held(role: str, model: ModelConfig, section: Any, *, head: str = "causal", frozen: bool) -> HeldModel:
        shape = read_shape(
            model, section.fsdp, option=f"worker.{role}.model", is_trained=not frozen, head=head
        )
        moves = device == "cuda" and not section.fsdp.enable_cpu_offload
        return HeldModel(
            role=role,
            shape=shape,
            how=_handling(config, model, section, device, frozen),
            is_trained=not frozen,
            host_weights=moves and section.offload.offload_params,
            host_state=moves and section.offload.offload_optimizer,
            is_streamed=device == "cuda" and section.fsdp.enable_cpu_offload,
        )

    models = [held("actor", actor.model, actor, frozen=False)]
    if config.use_reference and not actor.model.lora.is_used:
        models.append(held("ref", actor.model, worker.ref, frozen=True))
    if config.use_critic:
        models.append(held("critic", worker.critic.model, worker.critic, head="scalar", frozen=False))
    if config.use_prime:
        model = worker.prime.model if worker.prime.model.model_path is not None else actor.model
        models += [held("prime", model, worker.prime, frozen=frozen) for frozen in (False, True)]
    if worker.reward_model.is_used:
        section = worker.reward_model
        models.append(held("reward_model", section.model, section, head="scalar", frozen=True))
    return models


def _handling(config: PPOConfig, model: ModelConfig, section: Any, device: str, frozen: bool) -> Handling:
    fsdp: FSDPConfig = section.fsdp
    return Handling(
        device=device,
        ranks=fsdp.fsdp_size if 0 < fsdp.fsdp_size < config.world_size else config.world_size,
        c=NUMBER_BYTES[fsdp.mp_param_dtype],
        r=NUMBER_BYTES[fsdp.mp_reduce_dtype],
        checkpointing=model.enable_gradient_checkpointing,
        keeps_gathered=not fsdp.enable_full_shard,
        optimizer="adamw" if frozen else section.optim.strategy,
    )


def mini_batch_share(config: PPOConfig, role: str) -> int:
    """Sequences of one rank in a mini batch."""
    section = getattr(config.worker, role)
    return section.global_batch_size * config.worker.rollout.n // config.dp_size


def step_share(config: PPOConfig) -> int:
    """Sequences of one rank in a step."""
    return config.data.rollout_batch_size * config.worker.rollout.n // config.dp_size


def line_of(
    config: PPOConfig, shape: ModelShape, size: int, rows: int, *, dynamic: bool, shares: bool
) -> Line:
    """The longest line of a micro batch, where all prompts and responses have their full length.

    Args:
        config: Of the run.
        shape: Of the model; all tokens of a prompt may stand for media.
        size: Sequences of a micro batch.
        rows: Sequences of this rank that are divided into micro batches.
        dynamic: A line is filled by tokens, up to those of `size` sequences.
        shares: A prompt runs once for its responses.
    """
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    size, group = min(size, rows), min(config.worker.rollout.n, rows) if shares else 1
    together = min(size, group)
    groups = -(-size // together)
    tokens, responses = groups * prompt + size * response, size * response
    if dynamic:
        tokens = min(size * (prompt + response), -(-rows // group) * prompt + rows * response)
        groups = -(-tokens // (prompt + group * response))
        responses = tokens * group * response // (prompt + group * response)
    else:
        tokens, responses = -(-tokens // config.sp_size), -(-responses // config.sp_size)
    patches = 0 if shape.tower is None else groups * prompt * shape.merge
    return Line(tokens, responses, patches)
