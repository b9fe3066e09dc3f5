# SPDX-License-Identifier: Apache-2.0
"""One training step in numbers: prompts, sequences, mini and micro batches, optimizer steps.

Everything follows from the config and the number of ranks; `--dry-run` prints it. Needs no torch.
"""

from typing import NamedTuple

from verl.config.model import AUTO, MicroBatchSize, PolicyConfig, as_number
from verl.config.ppo import PPOConfig
from verl.config.reward_servers import RewardServerConfig
from verl.config.rollout import COLLECTIVE, DELTA, OBJECT_STORE, RolloutConfig
from verl.config.sft import SFTConfig
from verl.config.trainer import RunConfig, TrainerConfig
from verl.planning.device_defaults import runs_on_gpu
from verl.planning.step_needs import StepNeeds
from verl.utils.text_table import table


class PlanLine(NamedTuple):
    """A line of a printed plan."""

    name: str
    total: str  # of a step
    per_rank: str = ""
    remark: str = ""


HEADING = PlanLine("", "step", "per rank")
WAYS = {
    OBJECT_STORE: "through Ray's object store",
    COLLECTIVE: "by NCCL, on CPU by gloo",
    DELTA: "only what changed, by NCCL, on CPU by gloo",
}


class StepPlan(NamedTuple):
    """The plan of one training step as text, and how many steps there are."""

    text: str
    training_steps: int | None  # None until the number of rows is known


def make_plan(config: PPOConfig, dataset_size: int | None = None, done: tuple[int, int] = (0, 0)) -> StepPlan:
    """Plan a step of reinforcement learning; `dataset_size` counts usable training rows.

    `done` holds the steps of a resumed run and the rows in their batches, whatever size these had: the plan
    adds the steps that its epochs have left.

    Raises:
        ValueError: There are too few rows for a step.
    """
    worker, actor, prompts = config.worker, config.worker.actor, config.data.rollout_batch_size
    rollout, dp_size, max_length = worker.rollout, config.dp_size, config.max_sequence_length
    sequences, mini_batch = prompts * rollout.n, actor.global_batch_size * rollout.n
    size = actor.micro_batch_size_per_device_for_experience
    log_probs = _micro_batches(actor, sequences // dp_size, size)
    needs = StepNeeds.of(config)
    passes = [*(["actor"] if needs.old_pass else []), *(["reference"] if needs.ref_pass else [])]
    models = [*config.models, *(f"teacher {name}" for name in config.distillation.loaded)]
    engine = f"{rollout.name}, tensor parallel {rollout.tensor_parallel_size}"
    responses = f"{rollout.n} responses to a prompt, {max_length} tokens at most"
    optimizer_steps = prompts // actor.global_batch_size * actor.ppo_epochs
    step, size_of_batch = ("data.rollout_batch_size", prompts), config.loader_batch_size
    batch = ("data.mini_rollout_batch_size", size_of_batch) if size_of_batch < prompts else step
    steps = _count_steps(config.trainer, dataset_size, step, batch, done)
    lines = (
        HEADING,
        _processes(config.trainer),
        *([] if worker.hybrid_engine else _sampling_processes(config.trainer, rollout)),
        PlanLine("models", str(len(models)), "", ", ".join(models)),
        PlanLine("rollout engines", str(config.num_engines), "", engine),
        *(_server_line(name, server) for name, server in config.reward_servers.items()),
        PlanLine("prompts", str(prompts), _share(prompts, config.num_engines), "per engine"),
        PlanLine("rollout calls", str(prompts // config.loader_batch_size)),
        PlanLine("sequences", str(sequences), _share(sequences, dp_size), responses),
        *([PlanLine("log-prob micro batches", "", log_probs, " and ".join(passes))] if passes else []),
        PlanLine("mini batches", str(sequences // mini_batch), "", f"{actor.global_batch_size} prompts each"),
        PlanLine("sequences in a mini batch", str(mini_batch), _share(mini_batch, dp_size)),
        _update_line("micro batches in a mini batch", actor, mini_batch // dp_size, max_length),
        PlanLine("optimizer steps", str(optimizer_steps), "", f"{actor.ppo_epochs} PPO epochs"),
        _steps_line(steps, config.trainer, prompts, f"{(steps or 0) * optimizer_steps} optimizer steps"),
    )
    return StepPlan(table(lines, has_remarks=True), steps)


def make_sft_plan(
    config: SFTConfig, dataset_size: int | None = None, done: tuple[int, int] = (0, 0)
) -> StepPlan:
    """Plan a step of supervised fine-tuning; see `make_plan`."""
    actor, max_length = config.worker.actor, config.data.max_length
    rows = actor.global_batch_size // config.dp_size
    step = ("worker.actor.global_batch_size", actor.global_batch_size)
    steps = _count_steps(config.trainer, dataset_size, step, step, done)
    lines = (
        HEADING,
        _processes(config.trainer),
        PlanLine("rows", str(actor.global_batch_size), str(rows), f"{max_length} tokens at most each"),
        PlanLine("ranks that share a row", str(config.world_size // config.dp_size)),
        _update_line("micro batches", actor, rows, max_length),
        PlanLine("optimizer steps", "1"),
        _steps_line(steps, config.trainer, actor.global_batch_size, ""),
    )
    return StepPlan(table(lines, has_remarks=True), steps)


def _count_steps(
    trainer: RunConfig,
    dataset_size: int | None,
    step: tuple[str, int],
    batch: tuple[str, int],
    done: tuple[int, int],
) -> int | None:
    # Steps may reach over the end of an epoch. An epoch consists of whole loader batches, and those of whole
    # steps; remaining rows are dropped.
    option, needed = batch if trainer.max_steps else step
    if dataset_size is not None and dataset_size < needed and not trainer.val_only:
        raise ValueError(
            f"the training data must have at least `{option}` ({needed}) usable rows, has {dataset_size}"
        )
    if trainer.max_steps is not None or dataset_size is None:
        return trainer.max_steps
    steps_of_epoch = dataset_size // batch[1] * batch[1] // step[1]
    done_steps, done_rows = done
    left = steps_of_epoch * step[1] * trainer.total_epochs - done_rows
    return done_steps + max(0, left // step[1])


def _processes(trainer: RunConfig) -> PlanLine:
    return PlanLine("processes", str(trainer.world_size), "1", f"{trainer.nnodes} nodes, {trainer.device}")


def _sampling_processes(trainer: TrainerConfig, rollout: RolloutConfig) -> list[PlanLine]:
    order = "one step ahead" if trainer.async_training.samples_ahead else "in turn with training"
    count, most = trainer.n_gpus_for_rollout, trainer.max_gpus_for_rollout
    more = f"; up to {most} as devices become free" if most > count else ""
    way = rollout.weights_go_by(runs_on_gpu(trainer.device))
    return [
        PlanLine("sampling processes", str(count), "", f"they only sample, {order}{more}"),
        PlanLine("weights to them", "", "", WAYS[way]),
    ]


def _server_line(name: str, server: RewardServerConfig) -> PlanLine:
    if not server.is_served:
        return PlanLine(f"reward server {name}", "0", "", f"{server.kind}, runs at {server.url}")
    place = "in turn, on the devices that train" if server.colocate else "on devices of its own"
    split = f"{server.num_replicas} replicas, tensor parallel {server.tensor_parallel_size}"
    remark = f"{server.kind}, {place}: {split}, {server.model_path}"
    return PlanLine(f"reward server {name}", str(server.num_devices), "", remark)


def _update_line(name: str, actor: PolicyConfig, rows: int, max_length: int) -> PlanLine:
    size = actor.micro_batch_size_per_device_for_update
    has_budget = actor.dynamic_batching and size != AUTO
    budget = f", at most {as_number(size) * max_length} tokens" if has_budget else ""
    return PlanLine(name, "", _micro_batches(actor, rows, size), f"{size} sequences each{budget}")


def _micro_batches(actor: PolicyConfig, rows: int, size: MicroBatchSize) -> str:
    """Micro batches that rows make; an upper bound if they are filled by tokens."""
    if size == AUTO:
        return AUTO
    number = -(-rows // as_number(size))
    return f"<= {number}" if actor.dynamic_batching else str(number)


def _steps_line(steps: int | None, trainer: RunConfig, rows: int, remark: str) -> PlanLine:
    if steps is None:
        remark = f"{trainer.total_epochs} epochs x (training rows / {rows}), known once the rows are read"
        return PlanLine("training steps", "?", "", remark)
    return PlanLine("training steps", str(steps), "", remark)


def _share(number: int, parts: int) -> str:
    return str(number // parts) if number % parts == 0 else f"{number / parts:.1f}"
