# SPDX-License-Identifier: Apache-2.0
"""How much memory a run takes at its most, phase by phase, on a device and on a node.

The bytes of single models are `memory_model.py`'s; here they are put together for what is in memory at
the same time. On CPU a device's memory is the share that a process has of the node's. Nothing here needs
torch; the sizes of the models come from `model_sizes.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from verl.planning import memory_model
from verl.planning.held_models import HeldModel, ReadShape, held_models
from verl.planning.machine import GIB, Machine
from verl.planning.phases import Item, MemoryPlan, Phase
from verl.planning.planned_run import PlannedPass, PlannedRun

C = TypeVar("C")  # a config tree

PROCESS_BYTES = int(0.85 * GIB)  # of a worker without models; on CPU with a tiny one they took 0.8 GiB
NODE_BYTES = 2 * GIB  # of the controller, of Ray's own processes and of the reward function's
CONTEXT_BYTES = {"cuda": 1 * GIB, "cpu": 0}  # of a GPU, for kernels and for NCCL's buffers
BATCH_PLACES = 3  # the controller, Ray's object store, and the workers


@dataclass(frozen=True)
class Planner(Generic[C]):
    """Plans what a run takes of a machine, and what it would take with other options.

    Attributes:
        describe: `planned_ppo` or `planned_sft`: what the memory of a run follows from.
        read_shape: Gives the sizes of a model.
        machine: What there is.
    """

    describe: Callable[[C], PlannedRun]
    read_shape: ReadShape
    machine: Machine

    def __call__(self, config: C) -> MemoryPlan:
        """The plan of a run; micro batch sizes must be numbers."""
        return plan_memory(self.describe(config), self.read_shape, self.machine)


def plan_memory(run: PlannedRun, read_shape: ReadShape, machine: Machine) -> MemoryPlan:
    """Put the phases of a run together.

    Args:
        run: Its models, its rows and what it does with them.
        read_shape: Gives the sizes of a model.
        machine: What there is.
    """
    models = held_models(run, machine.device, read_shape)
    phases = [_load(models, machine)]
    if run.engine is not None:
        sampling = run.engine.sampling(models[0].shape, machine)
        phases.append(Phase("gen", (_resting(models), *sampling)))
    for model in models:
        phases += [_phase(run, models, model, one) for one in model.planned.passes]
    phases.append(_save(models))
    common = _everywhere(run, models, machine)
    return MemoryPlan(
        tuple(_with(phase, *common) for phase in phases),
        machine,
        run.trainer.n_gpus_per_node,
        tuple(f"{model.planned.role}: {model.shape.trained_text}" for model in models if model.is_trained),
    )


def _with(phase: Phase, device: Sequence[Item], host: Sequence[Item], node: Sequence[Item]) -> Phase:
    return replace(
        phase,
        device=(*phase.device, *device),
        host=(*phase.host, *host),
        node=(*phase.node, *node),
    )


def _everywhere(
    run: PlannedRun, models: Sequence[HeldModel], machine: Machine
) -> tuple[list[Item], list[Item], list[Item]]:
    """What is there in all phases: of the device, of each process, of the node."""
    engine, policy, process = run.engine, models[0].shape, PROCESS_BYTES
    device, waiting = [], sum(model.resting().host for model in models)
    if CONTEXT_BYTES[machine.device]:
        device.append(Item("context", CONTEXT_BYTES[machine.device]))
    if engine is not None:
        process += engine.process_bytes
        if machine.device == "cpu":
            device.append(Item("engine", engine.weights(policy) + engine.cpu_cache(policy)))
        else:
            waiting += engine.weights(policy)  # it sleeps with its weights in host memory
    host = [Item("process", process)]
    if waiting:
        host.append(Item("offloaded", waiting))
    if run.trainer.async_save and run.trainer.save_freq > 0:
        host.append(Item("checkpoint being written", _snapshot(models)))
    return device, host, [Item("controller", NODE_BYTES), Item("batch", BATCH_PLACES * run.batch_bytes)]


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
    weights = sum(model.resting().device - model.state_here for model in models)
    return Phase("load", (Item("weights", weights),), node=(Item("first rank reads", extra),))


def _phase(run: PlannedRun, models: Sequence[HeldModel], model: HeldModel, one: PlannedPass) -> Phase:
    """The phase in which a model works."""
    line = one.longest_line(run.lengths, model.shape)
    formula = memory_model.update_pass if one.is_update else memory_model.log_prob_pass
    taken = formula(model.shape, model.how, line)
    gathered = min(taken, memory_model.gathered(model.shape, model.how))
    held, host = _held_by_update(model) if one.is_update else (_held_by_pass(model), [])
    working = [Item("gathered weights", gathered), Item("activations", taken - gathered)]
    return Phase(
        one.phase,
        (*held, *working, _resting(models, without=model)),
        tuple(host),
        size_option=one.size_option,
        updates=model.planned.role if one.is_update else None,
    )


def _held_by_pass(model: HeldModel) -> list[Item]:
    """What a model that works without gradients has on the device."""
    weights = 0 if model.is_streamed else model.weights
    return [Item("weights", weights), Item("optimizer", model.state_here)]


def _held_by_update(model: HeldModel) -> tuple[list[Item], list[Item]]:
    """What a model that is updated has on the device, and in host memory."""
    if model.is_streamed:
        return [], [Item("gradients", model.gradients)]
    kept = {"weights": model.weights, "gradients": model.gradients, "optimizer": model.state}
    return [Item(name, size) for name, size in kept.items()], []


def _snapshot(models: Sequence[HeldModel]) -> int:
    return sum(model.weights + model.state for model in models if model.is_trained)


def _save(models: Sequence[HeldModel]) -> Phase:
    """A copy for the thread that writes."""
    return Phase("save_checkpoint", (_resting(models),), (Item("copy", _snapshot(models)),))
