# SPDX-License-Identifier: Apache-2.0
"""The training worker: one device with shards of all models of reinforcement learning.

Each method loads the models it uses onto the device; the work itself is in `roles/` and `model_builder.py`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.batch_keys import ROUTES, TEACHER_LOG_PROBS
from verl.config.worker import WorkerConfig
from verl.data.readers import load_tokenizer, read_tokenizer
from verl.distributed.device import GIB, memory_metrics, reset_peak_memory
from verl.distributed.fsdp import torch_dtype
from verl.distributed.weights.gathering import in_pieces
from verl.distributed.weights.server import WeightServer
from verl.models.hub_names import HubNames
from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.workers.base_worker import ModelWorker
from verl.workers.engine_check import SampledRow, check_engine, differences
from verl.workers.roles.actor import ActorTraining, DataParallelPPOActor, Updated
from verl.workers.roles.critic import DataParallelPPOCritic
from verl.workers.roles.prime import DataParallelPrimeModel, check_prime_tokenizer
from verl.workers.roles.reward_model import OPTION, RewardModelScorer
from verl.workers.roles.updater import Training, compute_log_probs
from verl.workers.rollout.engines import TAKES_STACKS
from verl.workers.rollout.interface import EngineAdapter
from verl.workers.rollout.vllm.lora_sync import engine_adapter
from verl.workers.run_options import RunOptions
from verl.workers.weight_transport import Publisher, make_publisher


class TrainingWorker(ModelWorker):
    """One process of the group that trains."""

    config: WorkerConfig
    options: RunOptions
    publishes_adapter = False
    publisher: Publisher | None = None  # from the first published weights on

    @register(Dispatch.ALL, phase="init_model")
    def init_model(self) -> None:
        actor = self.config.actor
        feature_chunks = max(1, self.config.rollout.num_chunk_seq)
        self._prepare(actor, share_prompt=actor.share_prompt, feature_chunks=feature_chunks)
        self._init_actor()
        if self.options.use_critic:
            self._init_critic()
        if self.options.use_prime:
            self._init_prime()
        if self.config.reward_model.is_used:
            self._init_reward_model()

    def _init_reference(self) -> None:
        # a policy with adapters is its own reference, without them; else the reference is a frozen copy
        self.reference_model = self.reference_forward = None
        if not self.options.use_reference:
            return
        model = self.config.actor.model
        if model.lora.is_used:
            self.reference_model, self.reference_forward = self.policy, self.policy.base_forward
        else:
            self.reference_model = self._build_model("ref", self.config.ref, model)
            self.reference_forward = self.reference_model.forward

    def _init_actor(self) -> None:
        config, options = self.config.actor, self.options
        correction = options.rollout_correction
        self.policy = self._build_model("actor", config, config.model, optim=config.optim)
        self._init_reference()
        self._build_teachers(options.distillation)
        self.hub_names = HubNames(self.policy.model.config, config.model.trust_remote_code)
        training = ActorTraining(
            *self.policy.training,
            **self._sizes(),
            kl_loss=options.kl_loss,
            reference=self.reference_forward,
            correction=correction if options.corrects_in_update else None,
            is_reinforce=correction.loss_type == "reinforce",
            teachers=None if options.distillation.rewards_tokens else self.teachers,
            uses_advantages=not options.distillation.is_alone or options.distillation.rewards_tokens,
        )
        self.actor = DataParallelPPOActor(config, self.policy.forward, training)

    def _sizes(self) -> dict[str, int]:
        return {"rollout_n": self.config.rollout.n, "max_response_length": self.options.max_response_length}

    def _init_critic(self) -> None:
        config = self.config.critic
        self.critic_model = self._build_model(
            "critic", config, config.model, optim=config.optim, head="scalar"
        )
        training = Training(*self.critic_model.training, **self._sizes())
        self.critic = DataParallelPPOCritic(config, self.critic_model.forward, training)

    def _init_prime(self) -> None:
        config = self.config.prime
        model = self.config.actor.model
        if config.model.model_path is not None:
            model = config.model
            assert model.tokenizer_path is not None, "filled in when the config was checked"
            arguments = (model.tokenizer_path, self.options.override_chat_template, model.trust_remote_code)
            check_prime_tokenizer(load_tokenizer(*arguments, option="worker.prime.model"), self.tokenizer)
        self.prime_model = self._build_model("prime", config, model, optim=config.optim)
        if model.lora.is_used:
            self.prime_reference, reference_forward = self.prime_model, self.prime_model.base_forward
        else:
            # computes in the type of the model that learns, because their difference is the reward
            fsdp = replace(config.fsdp, torch_dtype=config.fsdp.torch_dtype or "fp32")
            self.prime_reference = self._build_model("prime", replace(config, fsdp=fsdp), model)
            reference_forward = self.prime_reference.forward
        self.prime = DataParallelPrimeModel(
            config,
            self.prime_model.forward,
            reference_forward,
            Training(*self.prime_model.training, **self._sizes()),
            accuracy_key=self.options.accuracy_key,
        )

    def _init_reward_model(self) -> None:
        config = self.config.reward_model
        model = config.model
        assert model.tokenizer_path is not None, "filled in when the config was checked"
        self.reward_model = self._build_model("reward_model", config, model, head="scalar")
        self.scorer = RewardModelScorer(
            self.reward_model.forward,
            read_tokenizer(model.tokenizer_path, model.trust_remote_code, OPTION),
            self.tokenizer,
            config,
            policy_model_type=self.policy.model.config.model_type,
        )

    def _hub_tensors(self, *, with_tower: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights as the engine's loaders read them; every rank iterates to the end."""
        rollout, names = self.config.rollout, self.hub_names
        stacks = names.stacks if rollout.name in TAKES_STACKS else ()
        dtype = torch_dtype(rollout.dtype)
        return names.convert(self.policy.engine_tensors(dtype, with_tower=with_tower, stacks=stacks))

    @register(Dispatch.ALL, phase="init_engine")
    def engine_adapter(self) -> EngineAdapter | None:
        """Return the adapter that engines serve; None if they take whole weights."""
        policy, adapter = self.policy, None
        if policy.adapter is not None:
            adapter = engine_adapter(policy.model, policy.adapter, self.config.rollout, self.options.device)
        self.publishes_adapter = adapter is not None
        return adapter

    @register(Dispatch.ALL, phase="sync_weights")
    def publish_weights(self, version: int) -> Any:
        """Offer weights or adapters to engines in other processes; each rank returns its share."""
        if self.publisher is None:
            self.publisher = make_publisher(self.config.rollout, self.rank, self.world_size, self.device)
        with self.policy.loaded():
            tensors = self.policy.adapter_tensors().items() if self.publishes_adapter else self._hub_tensors()
            return self.publisher.publish(version, in_pieces(tensors, self.publisher.bucket_bytes))

    def _sent_weights(self) -> dict[str, float]:
        """Sum the bytes that links carried to engines since the last call, over all ranks; collective."""
        if not isinstance(self.publisher, WeightServer):
            return {}
        taken = torch.tensor(self.publisher.take_traffic(), dtype=torch.float64, device=self.device)
        dist.all_reduce(taken)
        sent, whole = taken.tolist()
        return {"async/weights_sent_gb": sent / GIB, "async/weights_whole_gb": whole / GIB}

    def close(self) -> None:
        super().close()
        if self.publisher is not None:
            self.publisher.close()

    @register(Dispatch.ALL, phase="sync_weights")
    def compare_engine(self, rows: list[SampledRow], engine_dtype: torch.dtype) -> None:
        """Raise unless an engine that sampled these rows computes what the policy does."""
        config = self.config
        with self.policy.loaded():
            measured = differences(self.policy.model, rows, self.device)
        dtypes = engine_dtype, torch_dtype(config.actor.fsdp.mp_param_dtype)
        is_quantized = config.rollout.quantization is not None
        model_type = self.policy.model.config.model_type
        check_engine(config.rollout.name, model_type, dtypes, measured, is_quantized=is_quantized)

    @register(Dispatch.SHARD, phase="old")
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """Compute `old_log_probs` and the other columns of this pass, those of the writer `actor`."""
        options = self.options
        reference = self.reference_model if options.has_full_kl_in_rewards else None
        with self._loaded(batch, self.policy, reference):
            return self.actor.compute_log_probs(
                batch,
                self.config.rollout.temperature,
                with_sum_squares=options.has_sum_squares,
                reference=self.reference_forward if reference else None,
            )

    @register(Dispatch.SHARD, phase="ref", unread=ROUTES)
    def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        assert self.reference_forward is not None, "the run has a reference"
        actor, temperature = self.config.actor, self.config.rollout.temperature
        with self._loaded(batch, self.reference_model):
            found = compute_log_probs(actor, self.reference_forward, batch, temperature)
        return DataProto.from_dict({"ref_log_probs": found})

    @register(Dispatch.SHARD, phase="teacher", unread=ROUTES)
    def compute_teacher_log_probs(self, batch: DataProto) -> DataProto:
        """Compute `teacher_log_probs`, of each row under its teacher; zero for teachers behind a server."""
        assert self.teachers is not None, "the run has teachers"
        actor, temperature = self.config.actor, self.config.rollout.temperature
        total = torch.zeros(batch.batch["loss_mask"].shape)  # (B, R)
        for name, model in self.teacher_models.items():
            with self._loaded(batch, model):
                total += self.teachers.compute_log_probs(name, actor, batch, temperature)
        return DataProto.from_dict({TEACHER_LOG_PROBS: total})

    @register(Dispatch.SHARD, phase="values", unread=ROUTES)
    def compute_values(self, batch: DataProto) -> DataProto:
        with self._loaded(batch, self.critic_model):
            return DataProto.from_dict({"values": self.critic.compute_values(batch)})

    @register(Dispatch.SHARD, phase="reward_model", unread=ROUTES)
    def compute_reward_model_scores(self, batch: DataProto) -> DataProto:
        with self._loaded(batch, self.reward_model):
            return DataProto.from_dict({"reward_model_scores": self.scorer.score(batch)})

    @register(Dispatch.SHARD, phase="prime_ref", unread=ROUTES)
    def compute_prime_ref_log_probs(self, batch: DataProto) -> DataProto:
        with self._loaded(batch, self.prime_reference):
            return DataProto.from_dict({"prime_ref_log_probs": self.prime.compute_ref_log_probs(batch)})

    @register(Dispatch.SHARD, phase="process_rewards", unread=ROUTES)
    def compute_process_rewards(self, batch: DataProto) -> DataProto:
        with self._loaded(batch, self.prime_model):
            return DataProto.from_dict({"process_rewards": self.prime.compute_process_rewards(batch)})

    @register(Dispatch.SHARD, phase="update_prime", unread=ROUTES)
    def update_prime(self, batch: DataProto) -> dict[str, float]:
        with self._loaded(batch, self.prime_model, with_optimizer=True):
            return self.prime.update(batch)

    @register(Dispatch.SHARD, phase="update_critic", unread=ROUTES)
    def update_critic(self, batch: DataProto) -> dict[str, float]:
        loaded = self._loaded(batch, self.critic_model, with_optimizer=True)
        with self._utilization("critic") as mfu, loaded:
            metrics = self.critic.update(batch)
        return metrics | mfu

    @register(Dispatch.SHARD, phase="update_actor")
    def update_actor(self, batch: DataProto, entropy_coef: float, seed: int) -> Updated:
        """Update the policy on this rank's share of every mini batch."""
        reset_peak_memory(self.options.device)
        reference = self.reference_model if self.actor.reads_reference else None
        temperature = self.config.rollout.temperature
        teachers = self.teacher_models.values() if self.actor.runs_teachers else ()
        loaded = self._loaded(batch, self.policy, reference, *teachers, with_optimizer=True)
        with self._utilization("actor") as mfu, loaded:
            updated = self.actor.update(batch, temperature, entropy_coef=entropy_coef, seed=seed)
        counts = self._encoded_media() | self._sent_weights()
        metrics = updated.metrics | mfu | memory_metrics(self.options.device) | counts
        return updated._replace(metrics=metrics)
