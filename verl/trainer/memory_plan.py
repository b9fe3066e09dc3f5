# SPDX-License-Identifier: Apache-2.0
"""How much memory a run takes at its most, phase by phase, on a device and on a node.

The bytes of single models are `utils/memory_model.py`'s; here they are put together for what is in memory at
the same time. On CPU a device's memory is the share that a process has of the node's. Nothing here needs
torch; the sizes of the models come from `workers/model_sizes.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verl.trainer.config import PPOConfig
from verl.trainer.held_models import HeldModel, line_of, mini_batch_share, step_share
from verl.trainer.machine import Machine
from verl.utils import memory_model
from verl.workers.config import as_number

GIB = 1 << 30
# Of processes without models: workers on CPU with a tiny one took 0.8 GiB; vLLM's is an estimate.
PROCESS_BYTES = {"hf": int(0.85 * GIB), "vllm": int(1.1 * GIB)}
NODE_BYTES = 2 * GIB  # of the controller, of Ray's own processes and of the reward function's
CONTEXT_BYTES = {"cuda": 1 * GIB, "cpu": 0}  # of a GPU, for kernels and for NCCL's buffers
CPU_SEQUENCES = 256  # that vLLM's cache on CPU is made for, see `rollout/vllm_rollout_spmd.py`
MAX_CPU_CACHE = 1 << 30
LOG_PROBS = {"actor": ("old",), "ref": ("ref",), "critic": ("values",), "prime": ("process_rewards",)}


class Item(NamedTuple):
    """A part of what a phase takes, in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Phase:
    """What is in memory at the fullest moment of a phase.

    Attributes:
        name: As in `timing_s/*`.
        device: Of one device; on CPU, of one process.
        host: Of host memory for each process of a node beside it.
        node: Of host memory once on a node.
        size_option: The micro batch size that it depends on, if it does.
    """

    name: str
    device: tuple[Item, ...]
    host: tuple[Item, ...] = ()
    node: tuple[Item, ...] = ()
    size_option: str | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes of one device."""
        return total(self.device)


@dataclass(frozen=True)
class MemoryPlan:
    """The phases of a run and the machine that they run on.

    Example::

        plan = plan_memory(config, held_models(config, "cuda", read_shape), machine)
        plan.misfits()  # [] if all fits
    """

    phases: tuple[Phase, ...]
    machine: Machine
    processes: int  # on a node
    trained: tuple[str, ...] = ()  # what of which model is trained

    def node_bytes(self, phase: Phase) -> int:
        """Host memory of a node in a phase."""
        of_process = total(phase.host) + (total(phase.device) if self.machine.device == "cpu" else 0)
        return self.processes * of_process + total(phase.node)

    def is_within(self, phase: Phase) -> bool:
        """Whether a phase fits into what is there."""
        machine = self.machine
        on_device = machine.device == "cpu" or phase.device_bytes <= machine.usable_device
        return on_device and self.node_bytes(phase) <= machine.usable_host

    def misfits(self) -> list[Phase]:
        """The phases that do not fit."""
        return [phase for phase in self.phases if not self.is_within(phase)]


def total(items: Sequence[Item]) -> int:
    """Bytes of all of them."""
    return sum(item.size for item in items)


def plan_memory(config: PPOConfig, models: Sequence[HeldModel], machine: Machine) -> MemoryPlan:
    """Put the phases of a run together; micro batch sizes must be numbers.

    Args:
        config: Of the run.
        models: What each rank holds, from `held_models`.
        machine: What there is.
    """
    phases = [_load(models, machine), _rollout(config, models, machine)]
    for model in models:
        phases += _passes(config, models, model, machine)
    phases.append(_save(models, machine))
    common = _everywhere(config, models, machine)
    return MemoryPlan(
        tuple(_with(phase, *common) for phase in phases),
        machine,
        config.trainer.n_gpus_per_node,
        tuple(f"{model.role}: {model.shape.trained_text}" for model in models if model.is_trained),
    )


def _with(phase: Phase, device: Sequence[Item], host: Sequence[Item], node: Sequence[Item]) -> Phase:
    parts = [(*own, *more) for own, more in ((phase.device, device), (phase.host, host), (phase.node, node))]
    return Phase(phase.name, *parts, size_option=phase.size_option)


def _everywhere(
    config: PPOConfig, models: Sequence[HeldModel], machine: Machine
) -> tuple[list[Item], list[Item], list[Item]]:
    """What is there in all phases: of the device, of each process, of the node."""
    process = [Item("process", PROCESS_BYTES[config.worker.rollout.name])]
    context = CONTEXT_BYTES[machine.device]
    device = [Item("context", context)] if context else []
    waiting = sum(model.resting().host for model in models)
    engine = _engine_weights(config, models)
    if machine.device == "cpu":
        device.append(Item("engine", engine + _cpu_cache(config, models)))
    else:
        waiting += engine  # it sleeps with its weights in host memory
    if waiting:
        process.append(Item("offloaded", waiting))
    if config.trainer.async_save and config.trainer.save_freq > 0:
        process.append(Item("checkpoint being written", _snapshot(models)))
    return device, process, [Item("controller", NODE_BYTES), Item("batch", _batch(config))]


def _batch(config: PPOConfig) -> int:
    """The tensors of a step: on the controller, in Ray's object store, and with the workers."""
    places, numbers = 3 * config.max_sequence_length, 8 * config.data.max_response_length  # int64, float32
    rows = config.data.rollout_batch_size * config.worker.rollout.n
    return 3 * rows * (8 * places + 4 * numbers)


def _resting(models: Sequence[HeldModel], *, without: HeldModel | None = None) -> Item:
    """What waits on the device, the model that works left out."""
    size = sum(model.resting().device for model in models if model is not without)
    return Item("other models" if without is not None else "models", size)


def _load(models: Sequence[HeldModel], machine: Machine) -> Phase:
    """Each model is read whole on the first rank; on CPU those before it are in the same memory."""
    most, before = 0, 0
    for model in models:
        read = memory_model.load(model.shape, model.how)
        most = max(most, before + read if machine.device == "cpu" else read - model.weights)
        before += model.weights
    extra = max(0, most - before) if machine.device == "cpu" else most
    weights = sum(model.resting().device for model in models) - sum(_state_here(model) for model in models)
    return Phase("load", (Item("weights", weights),), node=(Item("first rank reads", extra),))


def _state_here(model: HeldModel) -> int:
    """The optimizer's state on the device while others work."""
    return 0 if model.host_state or model.is_streamed else model.state


def _rollout(config: PPOConfig, models: Sequence[HeldModel], machine: Machine) -> Phase:
    policy = models[0]
    whole = max(policy.shape.head, policy.shape.text.params) * policy.shape.stored // policy.shape.params
    items = [_resting(models), Item("a gathered weight", whole)]
    if machine.device == "cuda":
        share = config.worker.rollout.gpu_memory_utilization
        items.append(Item("engine", int(share * machine.device_bytes)))
    elif config.worker.rollout.name == "hf":
        items.append(Item("weights in exchange", _engine_weights(config, models)))
    return Phase("gen", tuple(items))


def _engine_weights(config: PPOConfig, models: Sequence[HeldModel]) -> int:
    number = {"fp32": 4}.get(config.worker.rollout.dtype, 2)
    return number * models[0].shape.params // config.worker.rollout.tensor_parallel_size


def _cpu_cache(config: PPOConfig, models: Sequence[HeldModel]) -> int:
    """Keys and values: vLLM's cache, or those of the prompts that `hf` runs together."""
    rollout, text = config.worker.rollout, models[0].shape.text
    token = memory_model.cache_bytes_per_token(text, {"fp32": 4}.get(rollout.dtype, 2))
    if rollout.name == "hf":
        prompts = max(1, rollout.max_num_batched_tokens // config.data.max_prompt_length)
        prompts = min(prompts, config.loader_batch_size // config.num_engines)
        return prompts * rollout.n * config.max_sequence_length * token
    sequence = (-(-config.max_model_len // 128) + 1) * 128 * token
    return max(4 * sequence, min(CPU_SEQUENCES * sequence, MAX_CPU_CACHE))


def _passes(
    config: PPOConfig, models: Sequence[HeldModel], model: HeldModel, machine: Machine
) -> list[Phase]:
    """The phases in which a model works."""
    role = model.role
    if role == "reward_model":
        size = as_number(config.worker.reward_model.micro_batch_size_per_device)
        option = "worker.reward_model.micro_batch_size_per_device"
        return [_without_gradients(config, models, model, "reward_model", size, option)]
    owner = "actor" if role == "ref" else role
    section = getattr(config.worker, owner)
    key = f"worker.{owner}.micro_batch_size_per_device_for"
    size = as_number(section.micro_batch_size_per_device_for_experience)
    phases = [
        _without_gradients(config, models, model, name, size, f"{key}_experience") for name in LOG_PROBS[role]
    ]
    if role == "prime" and not model.is_trained:
        phases = [_named(phase, "prime_ref") for phase in phases]
    if model.is_trained:
        phases.append(_update(config, models, model, f"{key}_update"))
    return phases


def _named(phase: Phase, name: str) -> Phase:
    return Phase(name, phase.device, phase.host, phase.node, phase.size_option)


def _without_gradients(
    config: PPOConfig, models: Sequence[HeldModel], model: HeldModel, name: str, size: int, option: str
) -> Phase:
    is_scorer = model.role == "reward_model"
    section = getattr(config.worker, "actor" if model.role == "ref" else model.role)
    line = line_of(
        config, model.shape, size, step_share(config),
        dynamic=is_scorer or section.dynamic_batching,
        shares=config.worker.actor.share_prompt and not is_scorer,
    )  # fmt: skip
    taken = memory_model.log_prob_pass(model.shape, model.how, line)
    gathered = min(taken, memory_model.gathered(model.shape, model.how))
    items = [
        Item("weights", 0 if model.is_streamed else model.weights),
        Item("optimizer", _state_here(model)),
        Item("gathered weights", gathered),
        Item("activations", taken - gathered),
        _resting(models, without=model),
    ]
    return Phase(name, tuple(items), size_option=option)


def _update(config: PPOConfig, models: Sequence[HeldModel], model: HeldModel, option: str) -> Phase:
    section = getattr(config.worker, model.role)
    size = as_number(section.micro_batch_size_per_device_for_update)
    line = line_of(
        config, model.shape, size, mini_batch_share(config, model.role),
        dynamic=section.dynamic_batching, shares=config.worker.actor.share_prompt,
    )  # fmt: skip
    taken = memory_model.update_pass(model.shape, model.how, line)
    gathered = min(taken, memory_model.gathered(model.shape, model.how))
    kept = (model.weights, model.gradients, model.state)
    names = ("weights", "gradients", "optimizer")
    here, there = (0, 1) if model.is_streamed else (1, 0)
    items = [Item(name, here * size) for name, size in zip(names, kept, strict=True)]
    items += [Item("gathered weights", gathered), Item("activations", taken - gathered)]
    host = (Item("gradients", there * model.gradients),)
    return Phase(f"update_{model.role}", (*items, _resting(models, without=model)), host, size_option=option)


def _snapshot(models: Sequence[HeldModel]) -> int:
    return sum(model.weights + model.state for model in models if model.is_trained)


def _save(models: Sequence[HeldModel], machine: Machine) -> Phase:
    """A copy for the thread that writes."""
    return Phase("save_checkpoint", (_resting(models),), (Item("copy", _snapshot(models)),))
