# SPDX-License-Identifier: Apache-2.0
"""What one training step does, in numbers: prompts, sequences, mini and micro batches, optimizer steps.

All of it follows from the config and the number of ranks; `--dry-run` prints it. Nothing here needs torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verl.config.model import AUTO, MicroBatchSize
from verl.config.ppo import PPOConfig


class PlanLine(NamedTuple):
    """One line of the plan as it is printed: what, how many in the run, how many on one rank, remark."""

    name: str
    total: str
    per_rank: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Plan:
    """The numbers of one training step, and how many steps there are.

    Example::

        Plan(world_size=8, num_engines=4, prompts=512, sequences=2560, mini_batches=4, optimizer_steps=4, ...)
    """

    world_size: int
    num_engines: int
    dp_size: int
    rollout_calls: int  # calls of the engines in a step
    prompts: int  # prompts in a step
    sequences: int  # responses in a step
    mini_batches: int  # in a step and PPO epoch
    mini_batch_prompts: int
    mini_batch_sequences: int
    update_micro_batches: int | None  # on one rank in a mini batch; the most, with dynamic batching
    experience_micro_batches: int | None  # on one rank in a step; the most, with dynamic batching
    optimizer_steps: int  # in a step, PPO epochs included
    token_budget: int | None  # tokens in a micro batch of the update at most; None where its size is `auto`
    training_steps: int | None  # None until the number of rows is known

    @property
    def total_optimizer_steps(self) -> int | None:
        """Optimizer steps of the whole run; None until the number of rows is known."""
        return None if self.training_steps is None else self.training_steps * self.optimizer_steps


def make_plan(config: PPOConfig, dataset_size: int | None = None) -> Plan:
    """Return the plan of a checked config; `dataset_size` is the number of usable training rows."""
    actor, num_responses, dp_size = config.worker.actor, config.worker.rollout.n, config.dp_size
    prompts, update = config.data.rollout_batch_size, actor.global_batch_size
    sequences = prompts * num_responses
    mini_batches = prompts // update
    size = actor.micro_batch_size_per_device_for_update
    return Plan(
        world_size=config.world_size,
        num_engines=config.num_engines,
        dp_size=dp_size,
        rollout_calls=prompts // config.loader_batch_size,
        prompts=prompts,
        sequences=sequences,
        mini_batches=mini_batches,
        mini_batch_prompts=update,
        mini_batch_sequences=update * num_responses,
        update_micro_batches=micro_batches_of(
            update * num_responses // dp_size, actor.micro_batch_size_per_device_for_update
        ),
        experience_micro_batches=micro_batches_of(
            sequences // dp_size, actor.micro_batch_size_per_device_for_experience
        ),
        optimizer_steps=mini_batches * actor.ppo_epochs,
        token_budget=None if size == AUTO else int(size) * config.max_sequence_length,
        training_steps=count_training_steps(config, dataset_size),
    )


def count_training_steps(config: PPOConfig, dataset_size: int | None) -> int | None:
    """Return the training steps of the run, or None if they depend on a number of rows that is not known.

    An epoch takes whole loader batches and makes whole training steps of them; what is left over is dropped.

    Raises:
        ValueError: There are too few rows for a step, and rows to train on are needed.
    """
    if config.trainer.max_steps is not None and dataset_size is None:
        return config.trainer.max_steps
    if dataset_size is None:
        return None
    size = config.loader_batch_size if config.trainer.max_steps else config.data.rollout_batch_size
    if dataset_size < size and not config.trainer.val_only:
        key = "mini_rollout_batch_size" if size < config.data.rollout_batch_size else "rollout_batch_size"
        raise ValueError(
            f"`data.train_files` must have at least `data.{key}` ({size}) usable rows, has {dataset_size}"
        )
    if config.trainer.max_steps is not None:
        return config.trainer.max_steps
    prompts_per_epoch = dataset_size // config.loader_batch_size * config.loader_batch_size
    return prompts_per_epoch // config.data.rollout_batch_size * config.trainer.total_epochs


def plan_text(config: PPOConfig, plan: Plan) -> str:
    """Return the plan as a table with one line for each stage of a step."""
    lines = [PlanLine("", "step", "per rank"), *_rollout_lines(config, plan), *_update_lines(config, plan)]
    return plan_table([*lines, _length_line(config, plan)])


def plan_table(lines: Sequence[PlanLine]) -> str:
    """Return lines as a table, the first one its head."""
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    rows = [
        (line.name.ljust(widths[0]), line.total.rjust(widths[1]), line.per_rank.rjust(widths[2]), line.remark)
        for line in lines
    ]
    return "".join(f"  {'  '.join(row)}".rstrip() + "\n" for row in rows)


def _rollout_lines(config: PPOConfig, plan: Plan) -> list[PlanLine]:
    tensor_parallel_size = config.worker.rollout.tensor_parallel_size
    where = f"{config.trainer.nnodes} nodes, {config.trainer.device}"
    engines = f"{config.worker.rollout.name}, tensor parallel {tensor_parallel_size}"
    return [
        PlanLine("processes", str(plan.world_size), "1", where),
        PlanLine("models", str(len(config.models)), "", ", ".join(config.models)),
        PlanLine("rollout engines", str(plan.num_engines), "", engines),
        PlanLine("prompts", str(plan.prompts), _share(plan.prompts, plan.num_engines), "per engine"),
        PlanLine("rollout calls", str(plan.rollout_calls)),
        PlanLine(
            "sequences",
            str(plan.sequences),
            _share(plan.sequences, plan.dp_size),
            f"{config.worker.rollout.n} responses to a prompt, {config.max_sequence_length} tokens at most",
        ),
        PlanLine(
            "log-prob micro batches",
            "",
            at_most(plan.experience_micro_batches, dynamic=config.worker.actor.dynamic_batching),
            " and ".join(_log_prob_models(config)),
        ),
    ]


def _update_lines(config: PPOConfig, plan: Plan) -> list[PlanLine]:
    is_budget = config.worker.actor.dynamic_batching and plan.token_budget is not None
    budget = f", at most {plan.token_budget} tokens" if is_budget else ""
    return [
        PlanLine("mini batches", str(plan.mini_batches), "", f"{plan.mini_batch_prompts} prompts each"),
        PlanLine(
            "sequences in a mini batch",
            str(plan.mini_batch_sequences),
            _share(plan.mini_batch_sequences, plan.dp_size),
        ),
        PlanLine(
            "micro batches in a mini batch",
            "",
            at_most(plan.update_micro_batches, dynamic=config.worker.actor.dynamic_batching),
            f"{config.worker.actor.micro_batch_size_per_device_for_update} sequences each{budget}",
        ),
        PlanLine(
            "optimizer steps", str(plan.optimizer_steps), "", f"{config.worker.actor.ppo_epochs} PPO epochs"
        ),
    ]


def _log_prob_models(config: PPOConfig) -> list[str]:
    """The models whose log-probs a step computes before the update."""
    models = [] if config.algorithm.rollout_correction.bypass_mode else ["actor"]
    return models + (["reference"] if config.use_reference else [])


def _length_line(config: PPOConfig, plan: Plan) -> PlanLine:
    if plan.training_steps is None:
        epochs = config.trainer.total_epochs
        remark = f"{epochs} epochs x (training rows / {plan.prompts}), known once the rows are read"
        return PlanLine("training steps", "?", "", remark)
    remark = f"{plan.total_optimizer_steps} optimizer steps"
    return PlanLine("training steps", str(plan.training_steps), "", remark)


def _share(number: int, parts: int) -> str:
    return str(number // parts) if number % parts == 0 else f"{number / parts:.1f}"


def at_most(number: int | None, *, dynamic: bool) -> str:
    """A number of micro batches, which is the largest where lines are filled by tokens; None is `auto`."""
    if number is None:
        return AUTO
    return f"<= {number}" if dynamic else str(number)


def micro_batches_of(rows: int, size: MicroBatchSize) -> int | None:
    """Micro batches that rows make; None as long as their size is `auto`."""
    return None if size == AUTO else -(-rows // int(size))
