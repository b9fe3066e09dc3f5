# SPDX-License-Identifier: Apache-2.0
"""A model of a worker process: its shard, optimizer and forward pass, on the device while it is used."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedConfig, PreTrainedModel

from verl.checkpoint.sharded import Restored, Snapshot, load_shards, take_snapshot
from verl.config.model import FSDPConfig, ModelConfig, OffloadConfig, OptimConfig
from verl.data.media.loader import MediaLoader
from verl.data.media.references import MediaData
from verl.distributed.device import is_gpu
from verl.distributed.fsdp import full_named_tensors, make_mesh, torch_dtype
from verl.distributed.offload import Offloader
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.families.interface import MediaFamily, is_part
from verl.models.families.registry import encoder_of, family_of, whole_config
from verl.models.flops import FlopsCounter
from verl.models.lora import adapted_layers, adapted_parameters
from verl.models.lora_weights import AdapterFiles, fold, is_adapter
from verl.models.registry import check_model
from verl.models.scalar_head import is_scalar
from verl.optim.build import build_optimizer
from verl.optim.schedules import build_scheduler
from verl.workers.model_builder import adapter_config, build_model, trainable_options
from verl.workers.packing.forward import BaseForward, PackedForward
from verl.workers.packing.sp_strategy import Strategy, StrategyPlanner
from verl.workers.packing.vision_features import FrozenTower, TrainedTower


@dataclass(frozen=True)
class ModelSetup:
    """Settings that all models of a worker share."""

    device: torch.device
    world_size: int
    media: MediaLoader | None  # None for models without a processor
    share_prompt: bool = False  # run a prompt once for all of its responses
    sp: SequenceParallel = field(default_factory=SequenceParallel)
    embeds_dir: str | None = None  # keeps features of frozen vision towers
    always_shards: bool = False  # under sequence parallelism, short sequences too


class ShardedModel:
    """One model of a worker, named after its section: `actor`, `critic`, `ref`, `prime`, `reward_model`."""

    def __init__(
        self,
        role: str,  # section of the options, and folder in checkpoints
        model: ModelConfig,
        fsdp: FSDPConfig,
        offload: OffloadConfig,
        setup: ModelSetup,
        *,
        optim: OptimConfig | None = None,  # None for a model that is never updated
        training_steps: int = 0,  # for the learning rate schedule
        head: str = "causal",  # `causal`, or `scalar` for values and scores
        option: str | None = None,  # section of `model` in the config, for errors; None is the role's
    ) -> None:
        """Build, shard, load and check the model; collective over all ranks."""
        self.role, self.options, self.fsdp, self.setup = role, model, fsdp, setup
        option = option or f"worker.{role}.model"
        self.model: PreTrainedModel = build_model(
            model,
            fsdp,
            mesh=make_mesh(setup.world_size, fsdp.fsdp_size, setup.device.type),
            device=setup.device,
            trainable=optim is not None,
            head=head,
            option=option,
        )
        self.adapter = None if optim is None else adapter_config(model, option)
        self.optimizer: Optimizer | None = None
        self.scheduler: LRScheduler | None = None
        if optim is not None:
            self.optimizer = build_optimizer(self.model, optim, f"worker.{role}.optim")
            self.scheduler = build_scheduler(self.optimizer, optim, training_steps)
        # With `enable_cpu_offload` FSDP itself keeps weights, gradients and moments in host memory.
        moves = is_gpu(setup.device) and not fsdp.enable_cpu_offload
        self.offloader = Offloader(
            self.model,
            setup.device,
            optimizer=self.optimizer,
            offloads_weights=moves and offload.offload_params,
            offloads_state=moves and offload.offload_optimizer,
        )
        self.tower = self._frozen_tower()
        self.forward = self._forward(PackedForward)
        trains_vision = not model.freeze_vision_tower
        self.flops = FlopsCounter(self.model.config, device=setup.device, trains_vision=trains_vision)
        with self.loaded():
            check_model(self.model, None if setup.media is None else setup.media.processor)

    @property
    def training(self) -> tuple[Optimizer, LRScheduler]:
        assert self.optimizer is not None and self.scheduler is not None, f"{self.role} is never updated"
        return self.optimizer, self.scheduler

    def _frozen_tower(self) -> FrozenTower | None:
        family, options, media = family_of(self.model.config), self.options, self.setup.media
        if media is None or not isinstance(family, MediaFamily):
            return None
        frozen = trainable_options(options, f"worker.{self.role}.model").frozen_senses
        if not family.encoders.keys() <= frozen:
            return None
        return self._tower(FrozenTower, media, self.setup.embeds_dir)

    def _tower(self, kind: type[FrozenTower], media: MediaLoader, folder: str | None = None) -> FrozenTower:
        setup, dtype = self.setup, torch_dtype(self.fsdp.mp_param_dtype)
        return kind(self.model, self.model.config, media, setup.device, dtype, setup.sp, folder)

    @cached_property
    def engine_tower(self) -> FrozenTower | None:
        """The tower that encodes prompts for the rollout engine; None if the engine has its own."""
        family = family_of(self.model.config)
        is_needed = isinstance(family, MediaFamily) and family.embeds_prompts
        if self.tower is not None or self.setup.media is None or not is_needed:
            return self.tower
        return self._tower(TrainedTower, self.setup.media)

    def _forward(self, kind: type[PackedForward]) -> PackedForward:
        setup = self.setup
        forward = kind(
            self.model, self.model.config, setup.media, setup.device, setup.share_prompt, setup.sp, self.tower
        )
        if setup.always_shards:
            forward.planner = StrategyPlanner(setup.sp.size, [Strategy.SHARDED])
        return forward

    @cached_property
    def base_forward(self) -> PackedForward:
        """The forward pass without the adapters: a reference that costs no memory."""
        assert self.adapter is not None, f"{self.role} has no adapters"
        return self._forward(BaseForward)

    def engine_tensors(self, dtype: torch.dtype, *, with_tower: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full tensor of each weight; every rank iterates to the end.

        Weights are cast to `dtype` before they are gathered, unless adapters are folded in. Those of a frozen
        vision tower are left out on request.
        """
        left_out = () if with_tower or self.tower is None else encoder_of(self.model.config)

        def is_wanted(name: str) -> bool:
            return not is_part(name, left_out)

        if self.adapter is None:
            return full_named_tensors(self.model, dtype, is_wanted)
        tensors = full_named_tensors(self.model, select=is_wanted)
        return fold(
            tensors,
            self.adapter.scale,
            has_magnitude=self.adapter.use_dora,
            parameters=adapted_parameters(self.model),
        )

    def adapter_tensors(self) -> dict[str, Tensor]:
        # collective
        return dict(full_named_tensors(self.model, select=is_adapter))

    def holding(self, rows: Iterable[MediaData]) -> AbstractContextManager[None]:
        """Keep a frozen tower's features of the rows' media inside the block; every rank enters."""
        return nullcontext() if self.tower is None else self.tower.holding(rows)

    def loaded(self, with_optimizer: bool = False) -> AbstractContextManager[None]:
        """Load the model, and its optimizer if requested, onto the device inside the block."""
        return self.offloader.loaded(with_optimizer=with_optimizer)

    def snapshot(
        self, *, model_only: bool, copies: bool, extra: dict[str, Any], files: tuple | None
    ) -> Snapshot:
        """Collect this rank's part of a checkpoint; with `copies` training can continue before it is written.

        `extra` is further state of this rank; `files` are tokenizer and processor, None after the first rank.
        """
        optimizer, scheduler = (None, None) if model_only else (self.optimizer, self.scheduler)
        savable = () if files is None else (self._config_on_hub(), self.model.generation_config, *files)
        adapter = None
        if self.adapter is not None:
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.adapter_tensors().items()}
            parameters = [each.name for each in adapted_parameters(self.model)]
            adapter = AdapterFiles(self.adapter, adapted_layers(self.model), tensors, parameters)
        return take_snapshot(self.model, optimizer, scheduler, extra, savable, adapter, copies=copies)

    def _config_on_hub(self) -> PreTrainedConfig:
        config, options = self.model.config, self.options
        if is_scalar(config) or options.model_path is None:
            return config
        return whole_config(config, options.model_path, trust_remote_code=options.trust_remote_code)

    def load(self, folder: Path) -> Restored:
        """Resume from `folder/role`, saved by any number of ranks."""
        if self.tower is not None:
            self.tower.forget()
        restored = load_shards(folder / self.role, self.model, self.optimizer, self.scheduler)
        self.offloader.settle()
        return restored
