# SPDX-License-Identifier: Apache-2.0
"""Options of a whole run: one tree, one YAML file.

The sections of the data and the algorithm are in `data.py` and `algorithm.py`, those of the
worker processes in `worker.py`.

Names, defaults and meanings are EasyR1's and Long-RL's; `example=` is the value in `examples/config.yaml`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verl.config.algorithm import AlgorithmConfig
from verl.config.algorithm_rules import algorithm_problems
from verl.config.data import DataConfig
from verl.config.model import FSDPConfig
from verl.config.rollout import DIFFUSION
from verl.config.schema import option
from verl.config.trainer import RunConfig
from verl.config.update_options import AUTO, MicroBatchSize, TrainedModelConfig
from verl.config.worker import WorkerConfig

WORLD = "`trainer.nnodes` x `trainer.n_gpus_per_node`"
RANKS = f"the number of ranks that have other sequences, {WORLD} / sequence parallelism"


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    """How long, on what, and what is logged and saved."""

    max_try_make_batch: int = option(
        20, help="Rollouts that online filtering tries to fill one batch; 0 or less is without limit."
    )
    rejection_sample: bool = option(
        False,
        help="Leave out prompts whose responses all score the same, and keep surplus ones (Skywork-OR1).",
    )
    rejection_sample_multiplier: int = option(
        1, help="With `rejection_sample`: prompts sampled for each one that a step still needs.", minimum=1
    )
    critic_warmup: int = option(
        0, help="First step that updates the policy; steps before it train the critic alone.", minimum=0
    )
    val_generations_to_log: int = option(0, help="Validation responses to log.", minimum=0, example=3)
    rollouts_to_keep: int = option(
        8,
        help="Prompts of each step whose responses are written beside the checkpoints; 0 is none.",
        minimum=0,
    )
    viewer_port: int | None = option(
        None,
        help="Port of 127.0.0.1 where a page shows the run and its rollouts; 0 takes a free one, null none.",
        minimum=0,
        maximum=65535,
    )
    debug: bool = option(False, help="Check every key of the batch after each stage.")
    diffusion: bool = option(False, help="The model makes images or videos.", unavailable=DIFFUSION)


@dataclass(frozen=True)
class PPOConfig:
    """A whole run."""

    data: DataConfig = option(DataConfig, help="Prompts: where they come from and how a row becomes one.")
    worker: WorkerConfig = option(WorkerConfig, help="The processes that hold the models.")
    algorithm: AlgorithmConfig = option(
        AlgorithmConfig, help="How rewards become advantages, and the KL term."
    )
    trainer: TrainerConfig = option(TrainerConfig, help="How long, on what, and what is logged and saved.")

    @property
    def world_size(self) -> int:
        """Worker processes of the run: one for each device."""
        return self.trainer.world_size

    @property
    def num_engines(self) -> int:
        """Rollout engines of the run."""
        return self.world_size // self.worker.rollout.tensor_parallel_size

    @property
    def dp_size(self) -> int:
        """Ranks, or groups of ranks that share sequences, that train on different sequences."""
        return self.world_size // self.sp_size

    @property
    def sp_size(self) -> int:
        """Ranks that share one sequence."""
        return self.worker.actor.sp_size

    @property
    def loader_batch_size(self) -> int:
        """Prompts the loader hands out at once: one call of the rollout engine."""
        return self.data.mini_rollout_batch_size or self.data.rollout_batch_size

    @property
    def max_sequence_length(self) -> int:
        """Tokens of a prompt and its response at most."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence that the rollout engine is built for."""
        return self.worker.rollout.max_model_len or self.max_sequence_length

    @property
    def use_reference(self) -> bool:
        """Whether a reference policy is loaded."""
        return not self.algorithm.disable_kl

    @property
    def needs_ref_log_probs(self) -> bool:
        """Whether a KL term reads the reference's log-probs; the KL over the vocabulary runs both models."""
        return self.use_reference and self.algorithm.kl_penalty != "full"

    @property
    def filters_prompts(self) -> bool:
        """Whether a step keeps some of the prompts that it samples, and carries surplus ones."""
        return self.algorithm.online_filtering or self.trainer.rejection_sample

    @property
    def use_critic(self) -> bool:
        """Whether a value model is trained."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def use_prime(self) -> bool:
        """Whether a process reward model is trained."""
        return self.algorithm.adv_estimator == "prime"

    @property
    def models(self) -> list[str]:
        """The models that a process holds shards of, by the names of their sections."""
        frozen = [("ref", self.use_reference), ("reward_model", self.worker.reward_model.is_used)]
        return [*self.trained_roles, *(name for name, is_loaded in frozen if is_loaded)]

    @property
    def trained_roles(self) -> dict[str, TrainedModelConfig]:
        """The models that are updated, by the names of their sections."""
        worker = self.worker
        roles: dict[str, TrainedModelConfig] = {"actor": worker.actor}
        if self.use_critic:
            roles["critic"] = worker.critic
        if self.use_prime:
            roles["prime"] = worker.prime
        return roles

    def problems(self, path: str) -> Iterator[str]:
        """Yield every broken rule between the sections."""
        yield from self._missing_inputs()
        yield from self._ranks()
        yield from self._batches()
        yield from self._lengths()
        yield from algorithm_problems(self)

    def _missing_inputs(self) -> Iterator[str]:
        trainer = self.trainer
        if self.worker.actor.model.model_path is None:
            yield "`worker.actor.model.model_path` must be set: a model folder or a hub name"
        if not self.data.train_files and not trainer.val_only:
            yield "`data.train_files` must be set: a file, a folder or a hub name"
        if not self.data.val_files and trainer.val_only:
            yield "`data.val_files` must be set with `trainer.val_only=true`"
        elif not self.data.val_files and (trainer.val_before_train or trainer.val_freq > 0):
            yield (
                "`data.val_files` must be set; without validation set"
                " `trainer.val_before_train=false` and `trainer.val_freq=-1`"
            )
        if self.worker.reward.reward_function is None and not self.worker.reward_model.is_used:
            yield (
                "`worker.reward.reward_function` must be set: `file.py:function`;"
                " or `worker.reward_model.model.model_path`"
            )

    def _ranks(self) -> Iterator[str]:
        tensor_parallel_size = self.worker.rollout.tensor_parallel_size
        yield from divisible(
            WORLD, self.world_size, "`worker.rollout.tensor_parallel_size`", tensor_parallel_size
        )
        shared = "`worker.actor.ulysses_size` x `worker.actor.ring_size`"
        yield from divisible(WORLD, self.world_size, shared, self.sp_size)
        if self.num_engines > 0 and self.world_size % tensor_parallel_size == 0:
            key = "mini_rollout_batch_size" if self.data.mini_rollout_batch_size else "rollout_batch_size"
            engines = f"the number of rollout engines, {WORLD} / `worker.rollout.tensor_parallel_size`"
            yield from divisible(f"`data.{key}`", self.loader_batch_size, engines, self.num_engines)
        for role, fsdp in self._sharded_roles():
            if fsdp.fsdp_size > 0:
                yield from divisible(
                    WORLD, self.world_size, f"`worker.{role}.fsdp.fsdp_size`", fsdp.fsdp_size
                )

    def _sharded_roles(self) -> Iterator[tuple[str, FSDPConfig]]:
        for role, config in self.trained_roles.items():
            yield role, config.fsdp
        if self.use_reference:
            yield "ref", self.worker.ref.fsdp
        if self.worker.reward_model.is_used:
            yield "reward_model", self.worker.reward_model.fsdp

    def _batches(self) -> Iterator[str]:
        actor, num_responses = self.worker.actor, self.worker.rollout.n
        prompts, at_once = self.data.rollout_batch_size, self.loader_batch_size
        if not self.filters_prompts:  # a filter takes what it needs of each call and carries the rest
            yield from divisible(
                "`data.rollout_batch_size`", prompts, "`data.mini_rollout_batch_size`", at_once
            )
        if actor.micro_batch_size_per_device_for_experience != AUTO:
            yield from divisible(
                "`data.rollout_batch_size` x `worker.rollout.n`",
                prompts * num_responses,
                "`worker.actor.micro_batch_size_per_device_for_experience`",
                actor.micro_batch_size_per_device_for_experience,
            )
        for role, config in self.trained_roles.items():
            size = config.global_batch_size
            yield from divisible(
                "`data.rollout_batch_size`", prompts, f"`worker.{role}.global_batch_size`", size
            )
            yield from self._micro_batches(role, size, config.micro_batch_size_per_device_for_update)

    def _micro_batches(self, role: str, prompts: int, micro_batch_size: MicroBatchSize) -> Iterator[str]:
        batch = f"`worker.{role}.global_batch_size` x `worker.rollout.n`"
        sequences = prompts * self.worker.rollout.n
        if self.dp_size == 0:
            return  # fewer processes than share a sequence, which was said
        if sequences % self.dp_size:
            yield from divisible(batch, sequences, RANKS, self.dp_size)
            return
        if micro_batch_size == AUTO:
            return  # it will be a divisor
        yield from divisible(
            f"{batch} / {WORLD}",
            sequences // self.dp_size,
            f"`worker.{role}.micro_batch_size_per_device_for_update`",
            micro_batch_size,
        )

    def _lengths(self) -> Iterator[str]:
        rollout, needed = self.worker.rollout, self.max_sequence_length
        lengths = f"`data.max_prompt_length` + `data.max_response_length` ({needed})"
        if rollout.max_model_len is not None and rollout.max_model_len < needed:
            yield f"`worker.rollout.max_model_len` ({rollout.max_model_len}) must be at least {lengths}"
        if rollout.max_num_batched_tokens < needed and not rollout.enable_chunked_prefill:
            yield (
                f"`worker.rollout.max_num_batched_tokens` ({rollout.max_num_batched_tokens})"
                f" must be at least {lengths}, or `worker.rollout.enable_chunked_prefill=true`"
            )


def divisible(name: str, number: int, divisor_name: str, divisor: int) -> Iterator[str]:
    """Yield a problem, with the nearest values that are none, unless `number` is a multiple of `divisor`."""
    if number % divisor == 0:
        return
    largest = max(size for size in range(1, min(number + 1, divisor)) if number % size == 0)
    below = number - number % divisor
    multiples = [multiple for multiple in (below, below + divisor) if multiple]
    yield (
        f"{name} ({number}) must be divisible by {divisor_name} ({divisor}):"
        f" {_setting(divisor_name, [largest])}, or {_setting(name, multiples)}"
    )


def _setting(name: str, values: Sequence[int]) -> str:
    """How to give one of these values to an option, or to what follows from several."""
    key = name.strip("`")
    if "`" not in key:
        return "set " + " or ".join(f"`{key}={value}`" for value in values)
    return f"make {name.partition(',')[0]} {' or '.join(map(str, values))}"
