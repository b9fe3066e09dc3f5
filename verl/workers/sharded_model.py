# SPDX-License-Identifier: Apache-2.0
"""A model as a worker process holds it: sharded, with what trains it, on the device while it is used."""

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
from transformers import PreTrainedModel

from verl.checkpoint.sharded import Restored, Snapshot, load_shards, take_snapshot
from verl.config.model import FSDPConfig, ModelConfig, OffloadConfig, OptimConfig
from verl.data.media.loader import MediaData, MediaLoader
from verl.distributed.fsdp import full_named_tensors, loaded_on_device, make_mesh, torch_dtype
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.flops import FlopsCounter
from verl.models.lora import adapted_layers
from verl.models.lora_weights import AdapterFiles, fold, is_adapter
from verl.models.registry import check_model, model_type_of
from verl.optim.build import build_optimizer
from verl.optim.schedules import build_scheduler
from verl.workers.model_builder import adapter_config, build_model
from verl.workers.packing.forward import BaseForward, PackedForward
from verl.workers.packing.sp_strategy import StrategyPlanner, Way
from verl.workers.packing.vision_features import FrozenTower


@dataclass(frozen=True)
class Place:
    """Where a worker's models live."""

    device: torch.device
    world_size: int
    media: MediaLoader | None  # decodes the rows' media; None where there is no processor
    share_prompt: bool = False  # run a prompt once for all of its responses
    sp: SequenceParallel = field(default_factory=SequenceParallel)
    embeds_dir: str | None = None  # keeps what frozen vision towers compute
    always_divides: bool = False  # sequences over the ranks of a line


class ShardedModel:
    """One model of a worker, under the name of its section: `actor`, `critic`, `ref`, `prime` ...

    Attributes:
        model: The sharded model.
        forward: The packed forward pass through it.
        adapter: How it is adapted; None where its weights are trained.
        tower: Its vision tower, if it has one that is frozen.
        optimizer, scheduler: What updates it; None for a frozen model.
        flops: What its passes cost.
    """

    def __init__(
        self,
        role: str,
        model: ModelConfig,
        fsdp: FSDPConfig,
        offload: OffloadConfig,
        place: Place,
        *,
        optim: OptimConfig | None = None,
        training_steps: int = 0,
        head: str = "causal",
    ) -> None:
        """Build, shard, load and check the model; every rank calls it.

        Args:
            role: Section of the options; names the folder in checkpoints.
            model: Which model.
            fsdp: How it is sharded.
            offload: What leaves the device while it is not used.
            place: The device, and the ranks.
            optim: None for a model that is never updated.
            training_steps: Of the run, for the schedule of the learning rate.
            head: `causal`, or `scalar` for values and scores.
        """
        self.role = role
        self.fsdp, self.offload, self.place = fsdp, offload, place
        mesh = make_mesh(place.world_size, fsdp.fsdp_size, place.device.type)
        self.model: PreTrainedModel = build_model(
            model,
            fsdp,
            mesh=mesh,
            device=place.device,
            trainable=optim is not None,
            head=head,
            option=f"worker.{role}.model",
        )
        self.optimizer: Optimizer | None = None
        self.scheduler: LRScheduler | None = None
        if optim is not None:
            self.optimizer = build_optimizer(self.model, optim, f"worker.{role}.optim")
            self.scheduler = build_scheduler(self.optimizer, optim, training_steps)
        self.adapter = None if optim is None else adapter_config(model, f"worker.{role}.model")
        self.tower = self._frozen_tower(model)
        self.forward = self._forward(PackedForward)
        self.flops = FlopsCounter(self.model.config, device=place.device)
        with self.loaded():
            check_model(self.model)

    @property
    def training(self) -> tuple[Optimizer, LRScheduler]:
        """What updates the model."""
        assert self.optimizer is not None and self.scheduler is not None, f"{self.role} is never updated"
        return self.optimizer, self.scheduler

    def _frozen_tower(self, model: ModelConfig) -> FrozenTower | None:
        config, place = self.model.config, self.place
        is_frozen = model.freeze_vision_tower and model_type_of(config).vision_tower is not None
        if not is_frozen or place.media is None:
            return None
        dtype = torch_dtype(self.fsdp.mp_param_dtype)
        return FrozenTower(self.model, config, place.media, place.device, dtype, place.sp, place.embeds_dir)

    def _forward(self, kind: type[PackedForward]) -> PackedForward:
        place = self.place
        forward = kind(
            self.model, self.model.config, place.media, place.device, place.share_prompt, place.sp, self.tower
        )
        if place.always_divides:
            forward.division = StrategyPlanner(place.sp.size, [Way.DIVIDED])
        return forward

    @cached_property
    def base_forward(self) -> PackedForward:
        """The forward pass through the model without its adapters: the reference that costs no memory."""
        assert self.adapter is not None, f"{self.role} has no adapters"
        return self._forward(BaseForward)

    def engine_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of each weight, adapters folded into theirs; every rank iterates to the end.

        Args:
            dtype: What weights are cast to before they are gathered, where nothing is folded.
        """
        if self.adapter is None:
            return full_named_tensors(self.model, dtype)
        adapter = self.adapter
        return fold(full_named_tensors(self.model), adapter.scale, has_magnitude=adapter.use_dora)

    def adapter_tensors(self) -> dict[str, Tensor]:
        """The whole tensors of the adapters by their names in the model; every rank calls it."""
        return dict(full_named_tensors(self.model, select=is_adapter))

    def holding(self, rows: Iterable[MediaData]) -> AbstractContextManager[None]:
        """Have what its frozen tower makes of the rows' media at hand inside the block; every rank enters."""
        return nullcontext() if self.tower is None else self.tower.holding(rows)

    def loaded(self, with_optimizer: bool = False) -> AbstractContextManager[None]:
        """Have the model, and its optimizer if asked for, on the device inside the block."""
        return loaded_on_device(
            self.model,
            self.place.device,
            offload_params=self.offload.offload_params and not self.fsdp.enable_cpu_offload,
            optimizer=self.optimizer if with_optimizer else None,
            offload_optimizer_state=self.offload.offload_optimizer,
        )

    def snapshot(
        self, *, model_only: bool, copies: bool, extra: dict[str, Any], files: tuple | None
    ) -> Snapshot:
        """Collect this rank's part of a checkpoint.

        Args:
            model_only: Leave out what trains the model.
            copies: Copy it to host memory, so that training may go on before it is written.
            extra: State of this rank beside.
            files: Tokenizer and processor to put beside the config; None on all ranks but the first.
        """
        optimizer, scheduler = (None, None) if model_only else (self.optimizer, self.scheduler)
        savable = () if files is None else (self.model.config, self.model.generation_config, *files)
        adapter = None
        if self.adapter is not None:
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.adapter_tensors().items()}
            adapter = AdapterFiles(self.adapter, adapted_layers(self.model), tensors)
        return take_snapshot(self.model, optimizer, scheduler, extra, savable, adapter, copies=copies)

    def load(self, folder: Path) -> Restored:
        """Go on from `folder/role`, saved by any number of ranks."""
        if self.tower is not None:
            self.tower.forget()
        return load_shards(folder / self.role, self.model, self.optimizer, self.scheduler)
