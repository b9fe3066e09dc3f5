# SPDX-License-Identifier: Apache-2.0
"""The process that owns one device: a shard of the policy, a shard of the reference, and a rollout engine.

Its remote methods are the whole interface between the controller and the devices. Each has what it needs on
the device while it works; the work itself stands in `actor/`, `rollout/` and `model_builder.py`.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from verl.models.registry import check_model
from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.single_controller.worker import Worker
from verl.utils.checkpoint.fsdp_checkpoint import load_shards, save_huggingface_files, save_shards
from verl.utils.device import backend_of, memory_metrics, reset_peak_memory, set_device, set_seed
from verl.utils.flops_counter import FlopsCounter
from verl.utils.fsdp_utils import full_named_tensors, loaded_on_device, make_mesh, torch_dtype
from verl.utils.hub_names import HubNames
from verl.utils.media_cache import MediaCache
from verl.utils.multimodal import DecodedMedia, MediaData, MediaLoader, MediaOptions
from verl.utils.optim import build_optimizer, build_scheduler
from verl.utils.tokenizer import load_processor, load_tokenizer
from verl.workers.actor.dp_actor import DataParallelPPOActor, KLLoss
from verl.workers.config import FSDPConfig, OffloadConfig, WorkerConfig
from verl.workers.forward import PackedForward
from verl.workers.model_builder import build_model
from verl.workers.rollout.base import (
    EngineSetup,
    FinishedResponse,
    RolloutRequest,
    SamplingOptions,
    build_rollout_engine,
)


@dataclass(frozen=True)
class RunOptions:
    """What a worker needs to know of the options outside `worker`."""

    device: str  # "cuda" or "cpu"
    training_steps: int
    max_sequence_length: int
    media: MediaOptions
    media_cache: MediaCache  # opens the directory of the node where it is unpickled
    override_chat_template: str | None
    use_reference: bool
    kl_loss: KLLoss | None
    seed: int


class FSDPWorker(Worker):
    """One process of the colocated worker group."""

    def __init__(self, config: WorkerConfig, options: RunOptions) -> None:
        super().__init__()
        self.config = config
        self.options = options
        self.device = set_device(options.device, self.local_rank)
        set_seed(options.seed + self.rank)
        dist.init_process_group(backend_of(options.device))

    @register(Dispatch.ALL, phase="init_model")
    def init_model(self) -> None:
        """Load policy, reference and engine."""
        config = self.config
        self._place_on_axes()
        self._load_tokenizer()
        self.policy = policy = self._build(config.actor.fsdp, trainable=True)
        self.hub_names = HubNames(policy.config, config.actor.model.trust_remote_code)
        self.flops = FlopsCounter(policy.config, device=self.device)
        self.optimizer = build_optimizer(policy, config.actor.optim)
        self.scheduler = build_scheduler(self.optimizer, config.actor.optim, self.options.training_steps)
        self.actor = self._actor(
            policy, optimizer=self.optimizer, scheduler=self.scheduler, kl_loss=self.options.kl_loss
        )
        with self._policy_loaded():
            check_model(policy)
        if self.options.use_reference:
            reference = self._build(config.ref.fsdp, trainable=False)
            self.reference = self._actor(reference)
            with self._reference_loaded():
                check_model(reference)
        self.engine = build_rollout_engine(config.rollout, self._engine_setup())
        self.engine.sleep()

    @register(Dispatch.ALL, phase="sync_weights")
    def sync_weights(self) -> None:
        """Put the trained weights into the engine, tensor by tensor, and wake it."""
        with self._policy_loaded():
            tensors = full_named_tensors(self.policy, torch_dtype(self.config.rollout.dtype))
            self.engine.sync_weights(self.hub_names.convert(tensors))
        self.engine.wake()

    @register(Dispatch.ALL, phase="sleep")
    def sleep_engine(self) -> None:
        """Give the engine's device memory to training."""
        self.engine.sleep()

    @register(Dispatch.SHARD, phase="gen", axis="rollout", streaming=True)
    def generate(self, prompts: DataProto, sampling: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        """Sample responses to this engine's prompts; produces them as they finish.

        Args:
            prompts: Reads `uid`, `raw_prompt_ids`, `multi_modal_data`.
            sampling: The same for all prompts.
        """
        columns = (prompts.non_tensor_batch[key] for key in ("uid", "raw_prompt_ids", "multi_modal_data"))
        requests = [
            RolloutRequest(uid, ids, self._decode(media)) for uid, ids, media in zip(*columns, strict=True)
        ]
        yield from self.engine.generate(requests, sampling)

    @register(Dispatch.SHARD, phase="old")
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """Recompute the log-probs of the responses under the current policy: `old_log_probs` (B, R)."""
        with self._policy_loaded():
            log_probs = self.actor.compute_log_probs(batch, self.config.rollout.temperature)
        return DataProto.from_dict({"old_log_probs": log_probs})

    @register(Dispatch.SHARD, phase="ref")
    def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        """Compute the log-probs of the responses under the reference: `ref_log_probs` (B, R)."""
        with self._reference_loaded():
            log_probs = self.reference.compute_log_probs(batch, self.config.rollout.temperature)
        return DataProto.from_dict({"ref_log_probs": log_probs})

    @register(Dispatch.SHARD, phase="update_actor")
    def update_actor(self, batch: DataProto) -> dict[str, float]:
        """Update the policy on this rank's share of every mini batch; the metrics are equal on all ranks."""
        reset_peak_memory(self.options.device)
        start = time.perf_counter()
        with self._policy_loaded(with_optimizer=True):
            metrics = self.actor.update(batch, self.config.rollout.temperature)
        seconds = time.perf_counter() - start
        metrics |= memory_metrics(self.options.device)
        mfu = self._mfu(batch, seconds / self.config.actor.ppo_epochs)
        return metrics if mfu is None else metrics | {"perf/mfu_actor": mfu}

    @register(Dispatch.ALL, phase="save_checkpoint")
    def save_checkpoint(self, folder: str, model_only: bool) -> None:
        """Write this rank's part of a checkpoint into `folder/actor`."""
        path = Path(folder) / "actor"
        optimizer, scheduler = (None, None) if model_only else (self.optimizer, self.scheduler)
        save_shards(path, self.policy, optimizer, scheduler, extra={"engine_rng": self.engine.rng_state()})
        if self.rank == 0:
            parts = (self.policy.config, self.policy.generation_config, self.tokenizer, self.processor)
            save_huggingface_files(path, *parts)

    @register(Dispatch.ALL, phase="load_checkpoint")
    def load_checkpoint(self, folder: str) -> None:
        """Go on from a checkpoint, of any number of ranks."""
        restored = load_shards(Path(folder) / "actor", self.policy, self.optimizer, self.scheduler)
        if restored.extra is not None:
            self.engine.set_rng_state(restored.extra["engine_rng"])

    def _place_on_axes(self) -> None:
        """Say which part of a batch this rank gets in training and in sampling."""
        tp_size = self.config.rollout.tensor_parallel_size
        self.set_axis("train", self.rank, self.world_size, is_first=True)
        self.set_axis(
            "rollout", self.rank // tp_size, self.world_size // tp_size, is_first=self.rank % tp_size == 0
        )

    def _load_tokenizer(self) -> None:
        model, options = self.config.actor.model, self.options
        assert model.tokenizer_path is not None, "it is the model's, and the config was checked"
        arguments = (model.tokenizer_path, options.override_chat_template, model.trust_remote_code)
        self.tokenizer, self.processor = load_tokenizer(*arguments), load_processor(*arguments)
        self.media = None
        if self.processor is not None:
            self.media = MediaLoader(self.processor, options.media, options.media_cache)

    def _decode(self, media: MediaData) -> DecodedMedia | None:
        if not media:
            return None
        assert self.media is not None, "the loader refuses media where the model has no processor"
        return self.media.decode(media)

    def _build(self, fsdp: FSDPConfig, *, trainable: bool) -> Any:
        mesh = make_mesh(self.world_size, fsdp.fsdp_size, self.options.device)
        return build_model(self.config.actor.model, fsdp, mesh=mesh, device=self.device, trainable=trainable)

    def _mfu(self, batch: DataProto, seconds: float) -> float | None:
        """The share of the device's peak that an update of these sequences reached, if known."""
        lengths = batch.batch["attention_mask"].sum(-1).tolist()
        responses = int(batch.batch["response_mask"].sum())
        return self.flops.mfu(lengths, seconds, num_response_tokens=responses)

    def _actor(self, model: Any, **training: Any) -> DataParallelPPOActor:
        forward = PackedForward(model, model.config, self.media, self.device)
        rollout_n = self.config.rollout.n
        return DataParallelPPOActor(
            self.config.actor, forward, dist.group.WORLD, rollout_n=rollout_n, **training
        )

    def _engine_setup(self) -> EngineSetup:
        model = self.config.actor.model
        assert model.model_path is not None, "the config was checked"
        return EngineSetup(
            model_path=model.model_path,
            max_length=self.options.max_sequence_length,
            device=self.options.device,
            dp_rank=self.rank // self.config.rollout.tensor_parallel_size,
            tokenizer_path=model.tokenizer_path,
            trust_remote_code=model.trust_remote_code,
            override_config=model.override_config,
        )

    def _policy_loaded(self, with_optimizer: bool = False) -> AbstractContextManager[None]:
        config = self.config.actor
        optimizer = self.optimizer if with_optimizer else None
        return self._loaded(self.policy, config.fsdp, config.offload, optimizer)

    def _reference_loaded(self) -> AbstractContextManager[None]:
        return self._loaded(self.reference.forward.model, self.config.ref.fsdp, self.config.ref.offload)

    def _loaded(
        self, model: Any, fsdp: FSDPConfig, offload: OffloadConfig, optimizer: Any = None
    ) -> AbstractContextManager[None]:
        return loaded_on_device(
            model,
            self.device,
            offload_params=offload.offload_params and not fsdp.enable_cpu_offload,
            optimizer=optimizer,
            offload_optimizer_state=offload.offload_optimizer,
        )
