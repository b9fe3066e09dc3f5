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
from verl.checkpoint.sharded import Snapshot
from verl.config.model import FSDPConfig, ModelConfig, TrainedModelConfig
from verl.diffusion.families.interface import DiffusionFamily
from verl.diffusion.video_ulysses import VideoUlysses
from verl.distributed.fsdp import keep_float32, make_mesh, shard_model, torch_dtype
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.lora import ALL_LINEAR, adapters_disabled, set_adapter
from verl.models.lora_weights import AdapterConfig, read_adapter
from verl.models.trainable import select_trainable
from verl.workers.model_builder import adapter_config, weights_dtype
from verl.workers.trained_model import TrainedModel

VAE = "vae"  # its convolutions overflow in float16, and lose colors in bfloat16
TIMES = "timestep"  # argument of all transformers of diffusers


class DiffusionModel(TrainedModel):
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
        config: TrainedModelConfig,
        *,
        device: torch.device,
        world_size: int,
        training_steps: int,
        seed: int = 0,  # of the adapters' initial values
        sp: SequenceParallel | None = None,  # ranks that share the tokens of a row
    ) -> None:
        options, fsdp = config.model, config.fsdp
        self.family, self.options, self.device = family, options, device
        assert options.model_path is not None, "required when the config was checked"
        self.adapter = adapter_of(family, options, self.option)
        dtype = weights_dtype(fsdp, is_whole=self.adapter is None)
        self.parts = DiffusionPipeline.from_pretrained(
            options.model_path,
            dtype={TRANSFORMER: dtype, VAE: torch.float32, "default": torch_dtype(fsdp.mp_param_dtype)},
        )
        self.configs = PipelineConfigs.of(options.model_path)
        self.model: Any = self.parts.transformer
        if self.adapter is None:
            for param in self.model.parameters():  # FSDP trains weights of one data type
                param.data = param.data.to(dtype)
        self._select(seed)
        if sp is not None and sp.size > 1:
            assert family.layers is not None, "the config was checked"
            VideoUlysses(self.model, family.layers, sp)
        if recomputes(options, self.option):
            self.model.enable_gradient_checkpointing()
        self._shard(fsdp, world_size)
        self._prepare_training(device, fsdp, config.offload, config.optim, training_steps)

    def _select(self, seed: int) -> None:
        """Select what is trained; adapters have the same values on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            select_trainable(self.model, self.options, self.option, self.adapter)
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

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images or videos in [0, 1] on the CPU; the VAE is on the device only meanwhile."""
        vae = self.parts.vae
        try:
            vae.to(self.device)
            return self.family.decode(vae, latents.to(self.device)).cpu()
        finally:
            vae.to("cpu")

    def snapshot(self, **options: Any) -> Snapshot:
        snapshot = super().snapshot(**options)
        return snapshot._replace(manifest=snapshot.manifest | {BASE_MODEL: self.options.model_path})

    def _files(self, files: tuple) -> tuple:
        return (self.configs,)  # of the pipeline

    def _adapter_files(self) -> PipelineAdapter | None:
        files = super()._adapter_files()
        return None if files is None else PipelineAdapter(files)


def recomputes(options: ModelConfig, option: str) -> bool:
    """Return whether all blocks of a transformer are recomputed; raises where only some would be."""
    if options.recomputed not in (0, 1):
        raise ValueError(
            f"`{option}.enable_gradient_checkpointing` ({options.recomputed}) must be true or false for a"
            " diffusion model"
        )
    return options.recomputed == 1


def adapter_of(family: DiffusionFamily, options: ModelConfig, option: str) -> AdapterConfig | None:
    """Return the adapter of a transformer, by default in the modules that its family names."""
    adapter = adapter_config(options, option)
    if adapter is None or adapter.target_modules != ALL_LINEAR:
        return adapter
    return replace(adapter, target_modules=",".join(family.adapted))


def _cast_inputs(
    dtype: torch.dtype, model: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast latents and conditions as a pipeline of this dtype does; times stay as they are."""

    def is_cast(name: str, value: Any) -> bool:
        return name != TIMES and isinstance(value, Tensor) and value.is_floating_point()

    return args, {name: value.to(dtype) if is_cast(name, value) else value for name, value in named.items()}
