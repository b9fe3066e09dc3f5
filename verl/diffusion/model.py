# SPDX-License-Identifier: Apache-2.0
"""The trained transformer of a diffusion model: sharded, adapted, with optimizer and checkpoints."""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import Tensor

from verl.checkpoint.manifest import BASE_MODEL
from verl.checkpoint.pipelines import TRANSFORMER, PipelineAdapter, PipelineConfigs
from verl.checkpoint.sharded import Restored, Snapshot, load_shards, take_snapshot
from verl.config.model import FSDPConfig, ModelConfig, OffloadConfig, OptimConfig
from verl.diffusion.families.interface import DiffusionFamily
from verl.diffusion.video_ulysses import VideoUlysses
from verl.distributed.device import is_gpu
from verl.distributed.fsdp import full_named_tensors, keep_float32, make_mesh, shard_model, torch_dtype
from verl.distributed.offload import Offloader
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.lora import ALL_LINEAR, adapted_layers, adapted_parameters, adapters_disabled, set_adapter
from verl.models.lora_weights import AdapterFiles, is_adapter, read_adapter
from verl.models.trainable import TrainableOptions, select_trainable
from verl.optim.build import build_optimizer
from verl.optim.schedules import build_scheduler
from verl.workers.model_builder import trainable_options, weights_dtype

VAE = "vae"  # its convolutions overflow in float16, and lose colors in bfloat16
TIMES = "timestep"  # argument of all transformers of diffusers


class DiffusionModel:
    """The policy of a run: the transformer of a pipeline, trained whole or by adapters.

    Attributes:
        parts: The pipeline with its other parts, which stay frozen in host memory.
        model: The transformer under FSDP.
    """

    role = "actor"
    option = f"worker.{role}.model"

    def __init__(
        self,
        family: DiffusionFamily,
        options: ModelConfig,
        fsdp: FSDPConfig,
        offload: OffloadConfig,
        optim: OptimConfig,
        *,
        device: torch.device,
        world_size: int,
        training_steps: int,
        seed: int = 0,  # of the adapters' initial values
        sp: SequenceParallel | None = None,  # ranks that share the tokens of a row
    ) -> None:
        self.family, self.options, self.device = family, options, device
        assert options.model_path is not None, "required when the config was checked"
        trained = trained_part(family, options, self.option)
        self.adapter, dtype = trained.adapter, weights_dtype(fsdp, trained)
        self.parts = DiffusionPipeline.from_pretrained(
            options.model_path,
            dtype={TRANSFORMER: dtype, VAE: torch.float32, "default": torch_dtype(fsdp.mp_param_dtype)},
        )
        self.configs = PipelineConfigs.of(options.model_path)
        self.model: Any = self.parts.transformer
        if self.adapter is None:
            for param in self.model.parameters():  # FSDP trains weights of one data type
                param.data = param.data.to(dtype)
        self._select(trained, seed)
        if sp is not None and sp.size > 1:
            assert family.layers is not None, "the config was checked"
            VideoUlysses(self.model, family.layers, sp)
        if options.enable_gradient_checkpointing:
            self.model.enable_gradient_checkpointing()
        self._shard(fsdp, world_size)
        self.optimizer = build_optimizer(self.model, optim, "worker.actor.optim")
        self.scheduler = build_scheduler(self.optimizer, optim, training_steps)
        moves = is_gpu(device) and not fsdp.enable_cpu_offload
        self.offloader = Offloader(
            self.model,
            device,
            optimizer=self.optimizer,
            offloads_weights=moves and offload.offload_params,
            offloads_state=moves and offload.offload_optimizer,
        )

    def _select(self, trained: TrainableOptions, seed: int) -> None:
        """Select what is trained; adapters have the same values on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            select_trainable(self.model, trained, self.option)
        path = self.options.lora.path
        if path is not None:
            where = f"`{self.option}.lora.path` ({path})"
            set_adapter(self.model, read_adapter(Path(path), where), str, where)

    def _shard(self, fsdp: FSDPConfig, world_size: int) -> None:
        # FSDP would round times to bfloat16, in which 987.3 is 988.
        mesh = make_mesh(world_size, fsdp.fsdp_size, self.device.type)
        shard_model(self.model, mesh, fsdp, casts_inputs=False)
        keep_float32(self.model, self.model._keep_in_fp32_modules or ())
        computes_in = torch_dtype(fsdp.mp_param_dtype)
        self.model.register_forward_pre_hook(partial(_cast_inputs, computes_in), with_kwargs=True)

    def reference(self) -> AbstractContextManager[None]:
        """Compute with the weights before training inside the block: without adapters."""
        return adapters_disabled(self.model)

    def loaded(self, with_optimizer: bool = False) -> AbstractContextManager[None]:
        """Load the model, and its optimizer if requested, onto the device inside the block."""
        return self.offloader.loaded(with_optimizer=with_optimizer)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images or videos in [0, 1] on the CPU; the VAE is on the device only meanwhile."""
        vae = self.parts.vae
        try:
            vae.to(self.device)
            return self.family.decode(vae, latents.to(self.device)).cpu()
        finally:
            vae.to("cpu")

    def snapshot(
        self, *, model_only: bool, copies: bool, extra: dict[str, Any], files: tuple | None
    ) -> Snapshot:
        """Collect this rank's part of a checkpoint, see `take_snapshot`.

        `files` are None after the first rank; the configs of the pipeline are written on the first one.
        """
        optimizer, scheduler = (None, None) if model_only else (self.optimizer, self.scheduler)
        configs = () if files is None else (self.configs,)
        snapshot = take_snapshot(
            self.model, optimizer, scheduler, extra, configs, self._adapter_files(), copies=copies
        )
        return snapshot._replace(manifest=snapshot.manifest | {BASE_MODEL: self.options.model_path})

    def _adapter_files(self) -> PipelineAdapter | None:
        if self.adapter is None:
            return None
        gathered = full_named_tensors(self.model, select=is_adapter)
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in gathered}
        parameters = [each.name for each in adapted_parameters(self.model)]
        return PipelineAdapter(AdapterFiles(self.adapter, adapted_layers(self.model), tensors, parameters))

    def load(self, folder: Path) -> Restored:
        """Resume from `folder/actor`, saved by any number of ranks."""
        restored = load_shards(folder / self.role, self.model, self.optimizer, self.scheduler)
        self.offloader.settle()
        return restored


def trained_part(family: DiffusionFamily, options: ModelConfig, option: str) -> TrainableOptions:
    """Return what of a transformer is trained; adapters are by default those of the family."""
    found = trainable_options(options, option)
    adapter = found.adapter
    if adapter is None or adapter.target_modules != ALL_LINEAR:
        return found
    return replace(found, adapter=replace(adapter, target_modules=",".join(family.adapted)))


def _cast_inputs(
    dtype: torch.dtype, model: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast latents and conditions as a pipeline of this dtype does; times stay as they are."""

    def is_cast(name: str, value: Any) -> bool:
        return name != TIMES and isinstance(value, Tensor) and value.is_floating_point()

    return args, {name: value.to(dtype) if is_cast(name, value) else value for name, value in named.items()}
