# SPDX-License-Identifier: Apache-2.0
"""A model of a worker process: its shard, optimizer and forward pass, on the device while it is used."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.config.model import FSDPConfig, ModelConfig, OffloadConfig, OptimConfig
from verl.data.media.loader import MediaLoader
from verl.data.media.references import MediaData
from verl.distributed.fsdp import make_mesh, torch_dtype
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.weights.gathering import full_named_tensors
from verl.models.families.interface import MediaFamily, Sense, is_part
from verl.models.families.registry import family_of, whole_config
from verl.models.flops import FlopsCounter
from verl.models.lora import adapted_parameters
from verl.models.lora_weights import fold
from verl.models.registry import check_model
from verl.models.scalar_head import is_scalar
from verl.models.trainable import frozen_senses
from verl.workers.model_builder import adapter_config, build_model
from verl.workers.packing.forward import BaseForward, PackedForward
from verl.workers.packing.sp_strategy import Strategy
from verl.workers.packing.vision_features import FrozenTower, TrainedTower
from verl.workers.trained_model import TrainedModel


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


class ShardedModel(TrainedModel):
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
            mesh=make_mesh(setup.world_size, fsdp.fsdp_size, setup.device.type, fsdp.tensor_parallel_size),
            device=setup.device,
            trainable=optim is not None,
            head=head,
            option=option,
        )
        self.adapter = None if optim is None else adapter_config(model, option)
        self._prepare_training(setup.device, fsdp, offload, optim, training_steps)
        self.flops = FlopsCounter(self.model, fsdp.tensor_parallel_size)
        self.tower = self._frozen_tower(frozen_senses(model))
        self.forward = self._forward(PackedForward)
        with self.loaded():
            check_model(self.model, None if setup.media is None else setup.media.processor)

    def _frozen_tower(self, frozen: set[Sense]) -> FrozenTower | None:
        family, media = family_of(self.model.config), self.setup.media
        if media is None or not isinstance(family, MediaFamily) or not family.encoders.keys() <= frozen:
            return None
        return self._tower(FrozenTower, media, self.setup.embeds_dir)

    def _tower(self, kind: type[FrozenTower], media: MediaLoader, folder: str | None = None) -> FrozenTower:
        setup, dtype = self.setup, torch_dtype(self.fsdp.mp_param_dtype)
        return kind(self.model, media, setup.device, dtype, setup.sp, folder, self.flops)

    @cached_property
    def engine_tower(self) -> FrozenTower | None:
        """The tower that encodes prompts for the rollout engine; None if the engine has its own."""
        is_needed = family_of(self.model.config).embeds_prompts
        if self.tower is not None or self.setup.media is None or not is_needed:
            return self.tower
        return self._tower(TrainedTower, self.setup.media)

    def _forward(self, kind: type[PackedForward]) -> PackedForward:
        setup = self.setup
        forward = kind(
            self.model, setup.media, setup.device, setup.share_prompt, setup.sp, self.tower, self.flops
        )
        if setup.always_shards:
            forward.strategies = [Strategy.SHARDED]
        return forward

    @cached_property
    def base_forward(self) -> PackedForward:
        """The forward pass without the adapters: a reference that costs no memory."""
        assert self.adapter is not None, f"{self.role} has no adapters"
        return self._forward(BaseForward)

    def engine_tensors(
        self, dtype: torch.dtype, *, with_tower: bool = True, stacks: Collection[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full tensor of each weight; every rank iterates to the end.

        Weights are cast to `dtype` before they are gathered, unless adapters are folded in. Those of a frozen
        vision tower are left out on request. Joint weights `stacks` come as slices of their experts, unless
        they have adapters.
        """
        left_out = () if with_tower or self.tower is None else family_of(self.model.config).encoder

        def is_wanted(name: str) -> bool:
            return not is_part(name, left_out)

        if self.adapter is None:
            return full_named_tensors(self.model, dtype, is_wanted, stacks)
        adapted = adapted_parameters(self.model)
        plain = set(stacks) - {each.name for each in adapted}
        tensors = full_named_tensors(self.model, select=is_wanted, stacks=plain)
        return fold(tensors, self.adapter, adapted)

    def holding(self, rows: Iterable[MediaData]) -> AbstractContextManager[None]:
        """Keep a frozen tower's features of the rows' media inside the block; every rank enters."""
        return nullcontext() if self.tower is None else self.tower.holding(rows)

    def _files(self, files: tuple) -> tuple:
        config, options = self.model.config, self.options
        if not is_scalar(config) and options.model_path is not None:
            config = whole_config(config, options.model_path, trust_remote_code=options.trust_remote_code)
        return config, self.model.generation_config, *files

    def load(self, folder: Path) -> dict[str, Any] | None:
        if self.tower is not None:
            self.tower.forget()
        return super().load(folder)
