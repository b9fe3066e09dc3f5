# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a run, phase by phase, on a device and on a node.

Adds up the bytes of all models that are in memory at the same time; `memory_model.py` has the bytes of one.
On CPU a "device" is the share that a process has of its node. Needs no torch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from verl.config.model import FSDPConfig
from verl.config.rollout import DELTA, OBJECT_STORE
from verl.distributed.backends import on_gpu
from verl.planning import memory_model
from verl.planning.machine import GIB, Machine, MemoryPlan, Parts, Phase
from verl.planning.memory_model import NUMBER_BYTES, ModelSetup, ModelShape
from verl.planning.planned_model import PlannedModel, PlannedPass
from verl.planning.planned_run import PlannedRun, PlannedServer
from verl.utils.imports import deferred

C = TypeVar("C")  # a config tree
Shapes = dict[PlannedServer, ModelShape]
ReadShape = Callable[..., ModelShape]  # `verl.planning.model_sizes.read_shape`

plan_pictures = deferred("verl.planning.diffusion.memory", "plan_pictures")  # which imports this module
read_pictures = deferred("verl.planning.diffusion.shapes", "read_pictures")  # imports diffusers

PROCESS_BYTES = int(0.85 * GIB)  # of a worker without models; on CPU with a tiny one it took 0.8 GiB
# Of an engine's code: vLLM's in a worker's process, estimated; SGLang's two of its own, measured on CPU.
ENGINE_BYTES = {"vllm": GIB // 4, "sglang": int(1.2 * GIB)}
NODE_BYTES = 2 * GIB  # of the controller, Ray's own processes and those of the reward function
CONTEXT_BYTES = 1 * GIB  # of a GPU, for kernels and NCCL's buffers
# Of a GPU while vLLM sleeps, by `enforce_eager`: its NCCL groups, workspaces, and CUDA graphs; estimates.
ASLEEP_BYTES = {True: 1 * GIB, False: 3 * GIB}
# torch rounds page-locked memory up to a power of two: the mean over sizes. Buffers of `Offloader` are exact.
LOCKED_ROUNDING = 1.45
PUBLISHED_VERSIONS = 2  # of the weights, which wait for engines in other processes
SENT_BYTES = 2 * (64 << 20)  # of a GPU, for each engine that it sends weights to
SERVED_CACHE_BYTES = GIB // 4  # of keys and values of a model that is served on CPU
REWARD = "reward"  # phase in which models score on the GPUs that train
BATCH_COPIES = 3  # in the controller, Ray's object store, and the workers


@dataclass(frozen=True)
class Planner(Generic[C]):
    """Plans the memory of a run, and of the same run with other options."""

    describe: Callable[[C], PlannedRun]  # `planned_ppo` or `planned_sft`
    read_shape: ReadShape
    machine: Machine
    read_pictures: Callable[..., Any] = read_pictures  # of diffusion models

    def __call__(self, config: C) -> MemoryPlan:
        """Plan a run whose micro batch sizes are numbers."""
        run = self.describe(config)
        if run.pictures is not None:
            return plan_pictures(run, self.read_pictures, self.machine)
        return plan_memory(run, self.read_shape, self.machine)


@dataclass(frozen=True)
class HeldModel:
    """A model on one rank: bytes of its shard, and how many are on the device while other models work."""

    planned: PlannedModel
    shape: ModelShape
    part: ModelShape  # that a rank runs, smaller than `shape` where ranks share layers
    setup: ModelSetup
    weights: int
    gradients: int
    state: int  # of the optimizer
    resting_weights: int
    resting_state: int
    is_streamed: bool  # FSDP keeps everything in host memory and fetches layers

    @property
    def is_trained(self) -> bool:
        return self.planned.optim is not None

    @property
    def offloaded(self) -> int:
        rounding = LOCKED_ROUNDING if self.is_streamed else 1  # FSDP locks each weight by itself
        return int(rounding * (self.weights - self.resting_weights)) + self.state - self.resting_state


def plan_memory(run: PlannedRun, read_shape: ReadShape, machine: Machine) -> MemoryPlan:
    models = [held_model(model, run.trainer.world_size, machine.device, read_shape) for model in run.models]
    phases = [_load(models)]
    if run.shared_engine is not None:
        policy, sends = models[0], run.serves_adapters(machine.device)
        sampling = run.shared_engine.sampling(policy.shape, policy.setup, machine, sends_adapters=sends)
        engine = run.shared_engine.share(policy.shape, machine)
        phases.append(Phase("gen", {"models": _resting(models)} | sampling, **engine))
    phases += [_phase(run, models, model, each) for model in models for each in model.planned.passes]
    phases.append(Phase("save_checkpoint", {"models": _resting(models)}, {"copy": _snapshot(models)}))
    device, host, node = _common(run, models, machine)
    for phase in phases:
        if phase.name not in ("load", "gen"):
            phase.device.update(_sleeping_engine(run, machine))
    shapes = {
        server: read_shape(server.model, FSDPConfig(), option=server.option, is_trained=False, head="causal")
        for server in run.servers
    }
    shared = [server for server in shapes if server.options.colocate and machine.device != "cpu"]
    if shared:  # they score in turn with the models that train
        awake = {server.option: server.awake(shapes[server], machine) for server in shared}
        phases.append(Phase(REWARD, {"models": _resting(models)} | _sleeping_engine(run, machine) | awake))
    asleep = {
        f"{server.option}, asleep": CONTEXT_BYTES + ASLEEP_BYTES[server.options.enforce_eager]
        for server in shared  # a process of its own for each
    }
    node |= _server_processes(shapes, machine)
    for phase in phases:
        if phase.name != REWARD:
            phase.device.update(asleep)
        phase.device.update(device)
        phase.host.update(host)
        phase.node.update(node)
    phases += _servers_of_own(shapes, machine)
    if run.engine is not None and run.engine.own and (engine := run.engine.share(models[0].shape, machine)):
        phases.append(Phase("gen", dict(engine["engine"]), **engine))
    trained = [f"{model.planned.role}: {model.shape.trained_text}" for model in models if model.is_trained]
    served = [f"{server.option}: {shape.params:,} parameters are served" for server, shape in shapes.items()]
    return MemoryPlan(tuple(phases), machine, run.trainer.n_gpus_per_node, (*trained, *served))


def context_bytes(device: str) -> int:
    """Return what a process takes of a GPU before it has a model."""
    return CONTEXT_BYTES if on_gpu(device) else 0


def shape_of(model: PlannedModel, read_shape: ReadShape) -> ModelShape:
    trained = model.optim is not None
    # Of all switches of its blocks they change this alone, and reading takes seconds.
    read = replace(model.model, compile_blocks=False, enable_gradient_checkpointing=True)
    shape = read_shape(read, model.fsdp, option=model.option, is_trained=trained, head=model.head)
    if model.model.runs_tiles(is_trained=trained):
        return shape
    tower = shape.tower and replace(shape.tower, is_tiled=False)
    return replace(shape, text=replace(shape.text, is_tiled=False), tower=tower)


def held_model(model: PlannedModel, world_size: int, device: str, read_shape: ReadShape) -> HeldModel:
    """Read the sizes of a model and share it out among the ranks."""
    fsdp, is_trained, shape = model.fsdp, model.optim is not None, shape_of(model, read_shape)
    if model.router_replay != "off" and not shape.routes:
        raise ValueError(
            f"`worker.actor.router_replay` must be 'off', got {model.router_replay!r}: the model is no"
            " mixture of experts whose routers choose by one topk"
        )
    setup = ModelSetup(
        device=device,
        ranks=fsdp.shards(world_size) // fsdp.tensor_parallel_size,
        c=NUMBER_BYTES[fsdp.mp_param_dtype],
        r=NUMBER_BYTES[fsdp.mp_reduce_dtype],
        checkpointing=model.model.recomputed,
        is_compiled=model.model.compile_blocks is True,
        keeps_gathered=not fsdp.enable_full_shard,
        optimizer="adamw" if model.optim is None else model.optim.strategy,
        expert_ranks=fsdp.expert_parallel_size,
        layer_ranks=fsdp.tensor_parallel_size,
        reduces_once=fsdp.reduces_once(world_size),
    )
    part = shape.part(setup.layer_ranks)
    weights = memory_model.weights(part, setup)
    gradients = memory_model.gradients(part, setup) if is_trained else 0
    state = memory_model.optimizer_state(part, setup) if is_trained else 0
    is_streamed = on_gpu(device) and fsdp.enable_cpu_offload
    offloads_weights = is_streamed or (on_gpu(device) and model.offload.offload_params)
    offloads_state = is_streamed or (on_gpu(device) and model.offload.offload_optimizer)
    resting = (0 if offloads_weights else weights, 0 if offloads_state else state)
    return HeldModel(model, shape, part, setup, weights, gradients, state, *resting, is_streamed)


def _resting(models: Sequence[HeldModel], *, without: HeldModel | None = None) -> int:
    return sum(model.resting_weights + model.resting_state for model in models if model is not without)


def _snapshot(models: Sequence[HeldModel]) -> int:
    """Bytes of the copy that a checkpoint is written from."""
    return sum(model.weights + model.state for model in models if model.is_trained)


def _load(models: Sequence[HeldModel]) -> Phase:
    read = max(memory_model.reading(model.shape) for model in models)
    weights = sum(model.resting_weights for model in models)
    return Phase("load", {"weights": weights}, first_rank={"first rank reads": read})


def _phase(run: PlannedRun, models: Sequence[HeldModel], model: HeldModel, each: PlannedPass) -> Phase:
    lengths, prompt = run.lengths, model.planned.prompt
    if prompt is not None:
        lengths = replace(lengths, prompt=prompt, media=prompt)
    batch, features = each.largest_micro_batch(lengths, model.shape), 0
    if model.planned.model.freeze_vision_tower:  # they come from the host, and are joined
        features = 2 * model.setup.c * model.shape.text.hidden * batch.media
        batch = replace(batch, patches=0)
    formula = memory_model.update_peak if each.is_update else memory_model.log_prob_peak
    taken = formula(model.part, model.setup, batch)
    gathered = min(taken, memory_model.gathered(model.part, model.setup))
    device, host = working_parts(model, is_update=each.is_update)
    device |= {"gathered weights": gathered, "activations": taken - gathered}
    if features:
        device["features of media"] = features
    device["other models"] = _resting(models, without=model)
    if run.compares_teachers:
        device |= _in_update_with_teachers(models, model, is_update=each.is_update)
    role = model.planned.role if each.is_update else None
    return Phase(each.phase, device, host, size_option=each.size_option, updated_role=role)


def _in_update_with_teachers(models: Sequence[HeldModel], model: HeldModel, *, is_update: bool) -> Parts:
    """Return what is on the device in addition, because policy and teachers run in one update."""
    policy, teachers = models[0], [each for each in models if each.planned.is_teacher]
    if is_update and model is policy:
        awake = sum(0 if each.is_streamed else each.weights - each.resting_weights for each in teachers)
        return {"teachers": awake}
    if model.planned.is_teacher and not policy.is_streamed:
        working = policy.weights + policy.gradients + policy.state
        return {"policy in its update": working - policy.resting_weights - policy.resting_state}
    return {}


def working_parts(model: HeldModel, *, is_update: bool) -> tuple[Parts, Parts]:
    """Return the parts of a running model on the device, and in host memory."""
    if model.is_streamed:
        return {}, {"gradients": model.gradients} if is_update else {}
    if is_update:
        return {"weights": model.weights, "gradients": model.gradients, "optimizer": model.state}, {}
    return {"weights": model.weights, "optimizer": model.resting_state}, {}


def _sleeping_engine(run: PlannedRun, machine: Machine) -> Parts:
    engine = run.shared_engine
    if machine.device == "cpu" or engine is None or engine.options.name != "vllm":
        return {}
    return {"sleeping engine": ASLEEP_BYTES[engine.options.enforce_eager]}


def _server_processes(shapes: Shapes, machine: Machine) -> Parts:
    """Return the host memory of all servers, as if they were on one node."""
    parts: Parts = {}
    for server, shape in shapes.items():
        options, weights = server.options, server.weights(shape)
        held = PROCESS_BYTES + ENGINE_BYTES["vllm"]
        if machine.device == "cpu":
            held += weights + SERVED_CACHE_BYTES
        elif options.colocate:
            held += int(LOCKED_ROUNDING * weights)  # they wait in host memory
        parts[server.option] = options.num_devices * held
    return parts


def _servers_of_own(shapes: Shapes, machine: Machine) -> list[Phase]:
    """Return what servers hold all the time on dedicated GPUs."""
    if machine.device == "cpu":
        return []
    return [
        Phase(server.option, {"engine": server.awake(shape, machine), "context": CONTEXT_BYTES})
        for server, shape in shapes.items()
        if server.options.takes_devices
    ]


def _common(run: PlannedRun, models: Sequence[HeldModel], machine: Machine) -> tuple[Parts, Parts, Parts]:
    """Parts that every phase holds: on the device, in each process, and once on a node."""
    engine, policy, context = run.shared_engine, models[0].shape, context_bytes(machine.device)
    device: Parts = {"context": context} if context else {}
    process, offloaded = PROCESS_BYTES, 0
    if engine is not None:
        process += ENGINE_BYTES.get(engine.options.name, 0)
        if machine.device == "cpu":
            device["engine"] = engine.weights(policy) + engine.cpu_cache(policy)
        elif engine.options.name == "hf":
            offloaded += engine.weights(policy)
        elif run.serves_adapters(machine.device) or engine.is_quantized:
            # vLLM discards other weights, and the next sync brings them.
            offloaded += int(LOCKED_ROUNDING * engine.weights(policy))
    host = {"process": process, **host_copies(run, models, offloaded)}
    node: Parts = {"controller": NODE_BYTES, "batch": BATCH_COPIES * run.batch_bytes}
    if run.engine is not None and run.engine.own:
        sent = policy.trained if run.serves_adapters(machine.device) else policy.params
        host["published weights"] = PUBLISHED_VERSIONS * run.engine.number * sent // run.trainer.world_size
        way = run.engine.options.weights_go_by(on_gpu(machine.device))
        if on_gpu(machine.device) and way != OBJECT_STORE:
            device["weights being sent"] = SENT_BYTES * run.engine.own
        if way == DELTA:  # each engine holds what it was sent; they are spread evenly over the nodes
            node["weights held by engines"] = run.engine.own * run.engine.number * sent // run.trainer.nnodes
    if models[0].planned.router_replay != "off":
        node["routes"] = BATCH_COPIES * policy.routes * run.batch_tokens
    return device, host, node


def host_copies(run: PlannedRun, models: Sequence[HeldModel], offloaded: int = 0) -> Parts:
    """Return the copies of models in host memory; `offloaded` bytes are of what else waits there."""
    offloaded += sum(model.offloaded for model in models)
    copies = {"offloaded": offloaded} if offloaded else {}
    if run.trainer.async_save and run.trainer.save_freq > 0:
        copies["checkpoint being written"] = _snapshot(models)
    return copies


def expert_sizes(
    run: PlannedRun, read_shape: ReadShape, at_most: int | None = None
) -> Iterator[dict[str, int]]:
    """Yield options by which all mixtures that can have a size have the same one, the smallest first."""
    allowed = [(model, _expert_divisors(model, run.trainer.world_size, read_shape)) for model in run.models]
    for size in sorted(set().union(*(sizes for _, sizes in allowed))):
        changes = {
            f"{model.section}.fsdp.expert_parallel_size": size
            for model, sizes in allowed
            if size in sizes and size != model.fsdp.expert_parallel_size
        }
        if changes and (at_most is None or size <= at_most):
            yield changes


def _expert_divisors(model: PlannedModel, world_size: int, read_shape: ReadShape) -> list[int]:
    """Return all sizes of a mixture, 1 included; none for a model whose experts stay whole."""
    shape = shape_of(model, read_shape)
    if model.optim is not None and model.optim.strategy == "muon" and shape.has_expert_biases:
        return []
    largest = math.gcd(shape.divisible_experts, model.fsdp.shards(world_size))
    sizes = range(1, largest + 1) if shape.divisible_experts else ()
    return [size for size in sizes if largest % size == 0]
