# SPDX-License-Identifier: Apache-2.0
"""Optimizer, checkpoints and memory placement of the models in worker processes."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from verl.checkpoint.sharded import Snapshot, load_shards, take_snapshot
from verl.config.model import FSDPConfig, OffloadConfig, OptimConfig
from verl.distributed.device import is_gpu
from verl.distributed.offload import Offloader
from verl.distributed.weights.gathering import full_named_tensors
from verl.models.lora import adapted_layers, adapted_parameters
from verl.models.lora_weights import AdapterConfig, AdapterFiles, is_adapter
from verl.optim.build import build_optimizer
from verl.optim.schedules import build_scheduler


class TrainedModel:
    """A sharded model of a worker, with its optimizer and checkpoints; saved if it has an optimizer.

    A subclass builds `model`, and then calls `_prepare_training`.
    """

    role: str  # section of the options, and folder in checkpoints
    model: Any
    adapter: AdapterConfig | None = None
    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None

    def _prepare_training(
        self,
        device: torch.device,
        fsdp: FSDPConfig,
        offload: OffloadConfig,
        optim: OptimConfig | None,  # None for a model that is never updated
        training_steps: int,
    ) -> None:
        if optim is not None:
            self.optimizer = build_optimizer(self.model, optim, f"worker.{self.role}.optim")
            self.scheduler = build_scheduler(self.optimizer, optim, training_steps)
        # With `enable_cpu_offload` FSDP itself keeps weights, gradients and moments in host memory.
        moves = is_gpu(device) and not fsdp.enable_cpu_offload
        self.offloader = Offloader(
            self.model,
            device,
            optimizer=self.optimizer,
            offloads_weights=moves and offload.offload_params is True,
            offloads_state=moves and offload.offload_optimizer is True,
        )

    @property
    def training(self) -> tuple[Optimizer, LRScheduler]:
        assert self.optimizer is not None and self.scheduler is not None, f"{self.role} is never updated"
        return self.optimizer, self.scheduler

    def loaded(self, with_optimizer: bool = False) -> AbstractContextManager[None]:
        """Load the model, and its optimizer if requested, onto the device inside the block."""
        return self.offloader.loaded(with_optimizer=with_optimizer)

    def adapter_tensors(self) -> dict[str, Tensor]:
        # collective
        return dict(full_named_tensors(self.model, select=is_adapter))

    def snapshot(
        self, *, model_only: bool, copies: bool, extra: dict[str, Any], files: tuple | None
    ) -> Snapshot:
        """Collect this rank's part of a checkpoint; with `copies` training can continue before it is written.

        `extra` is further state of this rank; `files` are tokenizer and processor, None after the first rank.
        """
        optimizer, scheduler = (None, None) if model_only else (self.optimizer, self.scheduler)
        savable = () if files is None else self._files(files)
        adapter = self._adapter_files()
        return take_snapshot(self.model, optimizer, scheduler, extra, savable, adapter, copies=copies)

    def _files(self, files: tuple) -> tuple:
        """Return what rank 0 saves next to the weights."""
        raise NotImplementedError

    def _adapter_files(self) -> Any:
        if self.adapter is None:
            return None
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.adapter_tensors().items()}
        parameters = [each.name for each in adapted_parameters(self.model)]
        return AdapterFiles(self.adapter, adapted_layers(self.model), tensors, parameters)

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Resume from `folder/role`, saved by any number of ranks; return the rank's own `extra` state."""
        extra = load_shards(folder / self.role, self.model, self.optimizer, self.scheduler)
        self.offloader.settle()
        return extra
