# SPDX-License-Identifier: Apache-2.0
"""Options of a reinforcement learning run: one tree, one YAML file.

Names, defaults and meanings are EasyR1's and Long-RL's; `example=` is the value in `examples/config.yaml`.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from verl.config.algorithm import AlgorithmConfig
from verl.config.data import DataConfig
from verl.config.distillation import DistillationConfig
from verl.config.hints.renamed_keys import VERL_KEYS, RenamedKeys
from verl.config.model import AUTO, FSDPConfig, TrainedModelConfig
from verl.config.reward_servers import RewardServerConfig, server_problems
from verl.config.rules.algorithm_rules import algorithm_problems, group_problems
from verl.config.rules.diffusion_rules import diffusion_problems
from verl.config.rules.distillation_rules import distillation_problems, served_teacher_problems
from verl.config.rules.engine_rules import FOR_ROLLOUT, engine_problems, length_problems
from verl.config.schema import option
from verl.config.trainer import WORLD, RunTree, TrainerConfig, WorldProblem, divisible
from verl.config.worker import WorkerConfig


@dataclass(frozen=True)
class PPOConfig(RunTree):
    """A reinforcement learning run."""

    RENAMED: ClassVar[RenamedKeys] = VERL_KEYS
    data: DataConfig = option(DataConfig, "Prompts and their batches.")
    worker: WorkerConfig = option(WorkerConfig, "Models, rollout engine and reward function.")
    algorithm: AlgorithmConfig = option(AlgorithmConfig, "Advantages, KL term and selection of rollouts.")
    trainer: TrainerConfig = option(TrainerConfig, "Duration, devices, logging and checkpoints.")
    distillation: DistillationConfig = option(DistillationConfig, "Teachers of the policy.")
    reward_servers: dict[str, RewardServerConfig] = option(
        dict,
        "Models that judge or score responses, by name: the reward function gets them as `servers`; and"
        " teachers (`kind=teacher`).",
    )

    @property
    def engine(self) -> str:
        return "diffusers" if self.trainer.diffusion else self.worker.rollout.name

    @property
    def num_serving(self) -> int:
        return sum(server.num_devices for server in self.reward_servers.values() if server.takes_devices)

    @property
    def num_engines(self) -> int:
        return self.num_sampling // self.worker.rollout.tensor_parallel_size

    @property
    def num_sampling(self) -> int:
        """Number of devices that sample."""
        return self.world_size if self.worker.hybrid_engine else self.trainer.n_gpus_for_rollout

    @property
    def loader_batch_size(self) -> int:
        """Prompts per call of the rollout engine."""
        return self.data.mini_rollout_batch_size or self.data.rollout_batch_size

    @property
    def max_sequence_length(self) -> int:
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence in the rollout engine."""
        data = self.data
        return self.worker.rollout.longest_sequence(data.max_prompt_length, data.max_response_length)

    @property
    def models(self) -> list[str]:
        frozen = [("ref", self.algorithm.use_reference), ("reward_model", self.worker.reward_model.is_used)]
        return [*self.trained_roles, *(name for name, is_loaded in frozen if is_loaded)]

    @property
    def trained_roles(self) -> dict[str, TrainedModelConfig]:
        """Options of the models that are updated, by section."""
        roles: dict[str, TrainedModelConfig] = {"actor": self.worker.actor}
        if self.algorithm.use_critic:
            roles["critic"] = self.worker.critic
        if self.algorithm.use_prime:
            roles["prime"] = self.worker.prime
        return roles

    def problems(self, path: str) -> Iterator[str]:
        # Causes first: sizes that follow from a wrong one are not worth reading.
        alone = self.distillation.is_alone  # nothing compares the responses to a prompt
        groups = [] if alone else list(group_problems(self.algorithm, self.worker.rollout, self.trainer))
        cores = list(self._cores())
        sizes = () if cores else self._sizes()
        yield from [*groups, *cores]
        yield from self.input_problems()
        yield from self.kernel_problems()
        if not self.worker.scores_when_sampled and not self.worker.reward_model.is_used and not alone:
            yield (
                "`worker.reward.reward_function` must be set: `file.py:function`;"
                " or `worker.reward_model.model.model_path`, or an environment or an agent in"
                " `worker.rollout.multi_turn`, whose turns earn rewards; or learn from a teacher alone with"
                " `distillation.distillation_loss.use_task_rewards=false`"
            )
        yield from distillation_problems(
            self.distillation, self.worker, self.algorithm, self.trainer, self.data
        )
        yield from served_teacher_problems(
            self.distillation, self.reward_servers, self.worker.rollout, self.max_sequence_length
        )
        yield from diffusion_problems(self.data, self.worker, self.algorithm, self.trainer)
        yield from algorithm_problems(self.data, self.worker, self.algorithm, self.trainer)
        yield from server_problems(self.reward_servers, self.worker, self.algorithm, self.trainer)
        yield from engine_problems(self.data, self.worker, self.algorithm, self.trainer)
        yield from (size for size in sizes if not groups or "`worker.rollout.n`" not in size)
        yield from length_problems(self.data, self.worker)

    def _cores(self) -> Iterator[str]:
        # A cluster may have more cores than this machine.
        is_here = self.trainer.device == "cpu" and os.environ.get("RAY_ADDRESS") in (None, "", "local")
        problem = self.trainer.core_problem(self.num_serving) if is_here else None
        if problem and any(isinstance(size, WorldProblem) for size in self._sizes()):
            yield problem

    def _sizes(self) -> Iterator[str]:
        sharding: dict[str, FSDPConfig] = {
            f"worker.{role}": getattr(self.worker, role).fsdp for role in self.models
        }
        yield from self._engines()
        yield from self.rank_problems(sharding | self.distillation.sharding)
        yield from self._batches()
        for role, config in self.trained_roles.items():
            yield from self._mini_batches(role, config)

    def _engines(self) -> Iterator[str]:
        key, size = "`worker.rollout.tensor_parallel_size`", self.worker.rollout.tensor_parallel_size
        devices = WORLD if self.worker.hybrid_engine else FOR_ROLLOUT
        yield from divisible(devices, self.num_sampling, key, size)
        if self.num_engines > 0 and self.num_sampling % size == 0:
            name = "mini_rollout_batch_size" if self.data.mini_rollout_batch_size else "rollout_batch_size"
            engines = f"the number of rollout engines, {devices} / {key}"
            yield from divisible(f"`data.{name}`", self.loader_batch_size, engines, self.num_engines)

    def _batches(self) -> Iterator[str]:
        prompts, size = self.data.rollout_batch_size, self.loader_batch_size
        # A filter takes what it needs from each call and carries the rest over.
        if not self.algorithm.online_filtering and not self.trainer.rejection_sample:
            yield from divisible("`data.rollout_batch_size`", prompts, "`data.mini_rollout_batch_size`", size)
        batch, sequences = "`data.rollout_batch_size` x `worker.rollout.n`", prompts * self.worker.rollout.n
        key = "`worker.actor.micro_batch_size_per_device_for_experience`"
        micro_batch = self.worker.actor.micro_batch_size_per_device_for_experience
        if micro_batch != AUTO:
            yield from divisible(batch, sequences, key, micro_batch)

    def _mini_batches(self, role: str, config: TrainedModelConfig) -> Iterator[str]:
        key, size = f"`worker.{role}.global_batch_size`", config.global_batch_size
        yield from divisible("`data.rollout_batch_size`", self.data.rollout_batch_size, key, size)
        batch, sequences = f"{key} x `worker.rollout.n`", size * self.worker.rollout.n
        yield from self.dp_problems(batch, sequences)
        micro_batch = config.micro_batch_size_per_device_for_update
        if self.dp_size and sequences % self.dp_size == 0 and micro_batch != AUTO:
            key = f"`worker.{role}.micro_batch_size_per_device_for_update`"
            yield from divisible(f"{batch} / {WORLD}", sequences // self.dp_size, key, micro_batch)
