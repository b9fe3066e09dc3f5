# SPDX-License-Identifier: Apache-2.0
"""Predicted seconds of a training step, phase by phase, on a cluster of known devices.

Operations, bytes of memory, of collectives and of copies, each over the speed that programs reach of it. An
estimate to compare options with: `docs/predicted_step.md` holds it against published runs. Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from verl.distributed.backends import USUAL_GPU
from verl.planning.memory_plan import HeldModel, Planner, held_model
from verl.planning.planned_model import PlannedPass
from verl.planning.planned_run import PlannedRun
from verl.planning.speed import operations
from verl.planning.speed.cluster import Cluster
from verl.planning.speed.operations import Operations
from verl.planning.speed.rollout_time import IMAGE_SECONDS, EngineSpeed
from verl.planning.speed.workload import ExpectedLengths, PassWork, encoding_work, expected_lengths, pass_work
from verl.utils.imports import deferred

C = TypeVar("C")  # a config tree
# Its module imports this one.
predict_pictures = deferred("verl.planning.diffusion.picture_step_time", "predict_pictures")

HIDDEN_SHARE = 0.9  # of a collective that overlaps products when they take as long
# Of launching a layer's kernels and FSDP's hooks, forward and backward.
LAYER_SECONDS = 0.9e-3, 2.0e-3
MICRO_BATCH_SECONDS = 20e-3  # of packing, layouts, the loss and the root's hooks
GATHER_SECONDS = 1e-3  # of each tensor that the weight sync gathers and loads
LAYER_TENSORS = 12
WAKE_SECONDS = 1.5  # of mapping and unmapping the engine's memory, and of emptying torch's cache
STEP_SECONDS = 1.0  # of the controller: moving batches, metrics, logs
SEQUENCE_SECONDS = 0.3e-3  # of the controller: decoding, rewards that sampling does not hide, padding
DISK_BYTES = 2e9  # a second, of a node
OPTIMIZER_PASSES = 7  # over the weights: gradient, and reading and writing weight and two moments


@dataclass(frozen=True)
class PhaseTime:
    """The seconds of a phase in a step, by part."""

    name: str  # as in `timing_s/*`
    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class StepTime:
    """A predicted step."""

    phases: tuple[PhaseTime, ...]
    tokens: float  # of all sequences, or what `unit` names
    mfu: Mapping[str, float]  # of updates, by phase
    gpus: int  # that train or sample
    samples_ahead: bool = False  # while the models train
    unit: str = "tokens"  # that are counted

    @property
    def seconds(self) -> float:
        total = sum(phase.seconds for phase in self.phases)
        if not self.samples_ahead:
            return total
        sampling = self.phase("gen").seconds
        return max(sampling, total - sampling)

    def phase(self, name: str) -> PhaseTime:
        return next(phase for phase in self.phases if phase.name == name)


@dataclass(frozen=True)
class Predictor(Generic[C]):
    """Predicts the step of a run, and of the same run with other options."""

    plan: Planner[C]
    cluster: Cluster
    mean_prompt: float | None = None
    mean_response: float | None = None

    def assumed(self, config: C) -> str:
        """Say what the prediction assumes."""
        pictures = self.plan.describe(config).pictures
        if pictures is not None:
            return f"{pictures.rollout.num_steps} steps to a picture, all prompts new"
        return f"{self.lengths(config).text} (--mean-prompt, --mean-response)"

    def lengths(self, config: C) -> ExpectedLengths:
        return expected_lengths(self.plan.describe(config), self.mean_prompt, self.mean_response)

    def __call__(self, config: C) -> StepTime:
        """Predict a run whose micro batch sizes are numbers."""
        plan, run, lengths = self.plan, self.plan.describe(config), self.lengths(config)
        cluster = replace(self.cluster, has_flash3=run.attention_kernel == "flash")
        if run.pictures is not None:
            return predict_pictures(run, plan.read_pictures, cluster)
        models = [held_model(each, cluster.world_size, USUAL_GPU, plan.read_shape) for each in run.models]
        phases = _encoding(run, models[0], lengths, cluster)
        phases += [] if run.engine is None else _rollout(run, models[0], lengths, cluster)
        mfu = {}
        tokens = run.rows * run.row_groups(cluster.world_size)
        tokens *= lengths.prompt + lengths.responses.mean
        for model in models:
            for each in _passes(run, model):
                work = pass_work(run, model.planned, each, lengths, model.shape)
                phase = _pass_time(run, model, each, work, cluster)
                phases.append(phase)
                if each.is_update:
                    needed = operations.needed_by_update(model.part, work)
                    mfu[each.phase] = needed / phase.seconds / cluster.gpu.peak
        phases += rest_of_step(run, models, cluster)
        gpus, engine = cluster.world_size, run.engine
        if engine is None:
            return StepTime(tuple(phases), tokens, mfu, gpus)
        gpus += engine.own * engine.options.tensor_parallel_size
        return StepTime(tuple(phases), tokens, mfu, gpus, engine.samples_ahead)


def _passes(run: PlannedRun, model: HeldModel) -> list[PlannedPass]:
    """The passes of a model; one with adapters is its own reference."""
    passes = list(model.planned.passes)
    if run.reference and model.planned.role == "actor" and model.planned.model.lora.is_used:
        passes.append(replace(passes[0], phase="ref", rows=run.rows, is_update=False))
    return passes


def _pass_time(
    run: PlannedRun, model: HeldModel, each: PlannedPass, work: PassWork, cluster: Cluster
) -> PhaseTime:
    shape, setup, update = model.part, model.setup, each.is_update
    if update:
        done = operations.update(shape, setup, work)
    else:
        done = operations.forward(shape, work, is_compiled=setup.is_compiled)
    parts = pass_parts(run, model, done, work, cluster, is_update=update)
    parts["reading images"] = IMAGE_SECONDS * work.images * _unread_share(run, each, cluster)
    return PhaseTime(each.phase, parts)


def _unread_share(run: PlannedRun, each: PlannedPass, cluster: Cluster) -> float:
    """Return the share of a pass's images whose inputs are not in the node's cache yet."""
    is_known = each.is_update and any(other.phase == "old" for other in run.passes)
    if each.phase not in ("old", "update_actor") or is_known:
        return 0.0
    # engines of these processes have left the images of the prompts that this node sampled
    return 1.0 if run.engine is None or run.engine.own else 1 - 1 / cluster.nodes


def pass_parts(
    run: PlannedRun, model: HeldModel, done: Operations, work: PassWork, cluster: Cluster, *, is_update: bool
) -> dict[str, float]:
    """Return the seconds of a pass over all rows of a step, by part."""
    parts = _kernels(done, cluster)
    computing = sum(parts.values())
    kernels = max(computing, work.micro_batches * _launch_seconds(model, work, is_update=is_update))
    moved, sent, summed = _moving_seconds(run, model, work, cluster, is_update=is_update)
    parts["launching kernels"] = kernels - computing
    parts["collectives"] = moved - HIDDEN_SHARE * min(moved, kernels)
    parts["sending tokens"], parts["summing activations"] = sent, summed
    if is_update:
        parts["optimizer"] = OPTIMIZER_PASSES * model.weights * work.repeats / cluster.memory
    parts["offloading"] = _copied_bytes(model, is_update=is_update) / cluster.pcie
    return parts


def _kernels(done: Operations, cluster: Cluster) -> dict[str, float]:
    return {
        "products": (done.products + done.head) / cluster.products,
        "attention": done.attention / cluster.attention,
        "elementwise": done.elementwise / cluster.memory,
        "softmax": done.softmax / cluster.memory,
    }


def _encoding(
    run: PlannedRun, policy: HeldModel, lengths: ExpectedLengths, cluster: Cluster
) -> list[PhaseTime]:
    """A frozen tower's work on the media of new prompts: in each step of the first epoch."""
    work = encoding_work(run, policy.planned, lengths, policy.shape)
    if work is None:
        return []
    parts = _kernels(operations.forward(policy.shape, work), cluster)
    parts["reading images"] = IMAGE_SECONDS * work.images
    return [PhaseTime("encode", parts)]


def _launch_seconds(model: HeldModel, work: PassWork, *, is_update: bool) -> float:
    shape = model.shape
    layers = shape.text.layers + (shape.tower.layers if shape.tower and work.patches else 0)
    forwards = 1 + model.setup.checkpointing if is_update else 1
    return layers * (LAYER_SECONDS[0] * forwards + LAYER_SECONDS[1] * is_update) + MICRO_BATCH_SECONDS


def _moving_seconds(
    run: PlannedRun, model: HeldModel, work: PassWork, cluster: Cluster, *, is_update: bool
) -> tuple[float, float, float]:
    """Return seconds in collectives and copies that products may hide, and in two kinds that they wait for.

    These send tokens to experts, and sum the activations of ranks that share layers.
    """
    setup, ulysses, stride = model.setup, run.lengths.ranks // run.ring, model.setup.layer_ranks
    copies = max(1, cluster.world_size // (setup.ranks * stride))  # of the weights, with hybrid sharding
    moved = operations.collectives(
        model.part, setup, work, is_update=is_update, copies=copies, ulysses=ulysses, ring=run.ring
    )
    seconds = moved.sharding / cluster.link(setup.ranks, stride) + moved.heads / cluster.exchange(ulysses)
    seconds += moved.ring / cluster.link(run.ring, ulysses)
    seconds += moved.replicas / cluster.link(copies, setup.ranks * stride)
    seconds += moved.expert_sharding / cluster.link(setup.expert_shards, setup.expert_ranks)
    if model.is_streamed:
        seconds += (1 + is_update) * work.micro_batches * model.weights / cluster.pcie
    sent, summed = moved.experts / cluster.exchange(setup.expert_ranks), moved.sums / cluster.link(stride)
    return seconds, sent, summed


def _copied_bytes(model: HeldModel, *, is_update: bool) -> float:
    """Bytes that a pass of an offloaded model copies in both directions.

    Copies in host memory are kept: weights return there only after an update, which alone needs the state.
    """
    if model.is_streamed:
        return 0.0
    weights, state = model.weights - model.resting_weights, model.state - model.resting_state
    return 2.0 * (weights + state) if is_update else float(weights)


def _rollout(
    run: PlannedRun, policy: HeldModel, lengths: ExpectedLengths, cluster: Cluster
) -> list[PhaseTime]:
    assert run.engine is not None
    calls = max(1, round(run.rows * run.row_groups(cluster.world_size) / run.engine.options.n))
    engines = run.engine.own or max(1, cluster.world_size // run.engine.options.tensor_parallel_size)
    calls = max(1, round(calls / engines / run.engine.prompts))
    shape = policy.shape
    as_adapter = run.serves_adapters(USUAL_GPU)
    sampled = EngineSpeed(run.engine, shape, cluster, has_adapters=as_adapter).call_seconds(lengths)
    parts = {name: calls * value for name, value in sampled.items()}
    ranks = policy.setup.ranks * policy.setup.layer_ranks
    gathered = run.engine.number * shape.params * (ranks - 1) / ranks
    sent = shape.trained / shape.params if as_adapter else 1.0
    sync = {
        "gathering weights": sent * gathered / cluster.link(ranks),
        "starting gathers": GATHER_SECONDS * LAYER_TENSORS * shape.text.layers,
        "waking the engine": 0.0 if run.engine.own else WAKE_SECONDS,
        "offloading": (policy.weights - policy.resting_weights) / cluster.pcie,
    }
    return [PhaseTime("gen", parts), PhaseTime("sync_weights", sync)]


def rest_of_step(run: PlannedRun, models: list[HeldModel], cluster: Cluster) -> list[PhaseTime]:
    """Checkpoints, shared out among steps, and the controller."""
    sequences = run.rows * run.row_groups(cluster.world_size)
    parts = {"step": STEP_SECONDS, "sequences": SEQUENCE_SECONDS * sequences}
    phases = [PhaseTime("controller", parts)]
    if run.trainer.save_freq > 0:
        held = sum(model.weights + model.state for model in models if model.is_trained)
        seconds = held / cluster.pcie if run.trainer.async_save else cluster.gpus * held / DISK_BYTES
        name = "copying" if run.trainer.async_save else "writing"
        phases.append(PhaseTime("save_checkpoint", {name: seconds / run.trainer.save_freq}))
    return phases
