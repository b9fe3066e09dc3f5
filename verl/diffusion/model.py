# SPDX-License-Identifier: Apache-2.0
"""The trained transformer of a diffusion model: sharded, adapted, with optimizer and checkpoints."""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.checkpoint.manifest import BASE_MODEL
from verl.checkpoint.pipelines import TRANSFORMER, PipelineAdapter, PipelineConfigs
from verl.checkpoint.sharded import Snapshot
from verl.config.model import FSDPConfig, ModelConfig, TrainedModelConfig
from verl.diffusion.families.interface import DiffusionFamily
from verl.diffusion.families.registry import downloaded
from verl.diffusion.frozen_parts import FrozenParts
from verl.diffusion.stored_parts import data_types, open_pipeline, stored_part
from verl.diffusion.video_ulysses import VideoUlysses
from verl.distributed.fsdp import keep_float32, make_mesh, shard_model, torch_dtype
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.lora import ALL_LINEAR, adapters_disabled, set_adapter
from verl.models.lora_weights import AdapterConfig, read_adapter
from verl.models.trainable import select_trainable
from verl.workers.model_builder import adapter_config, fill_model, on_rank0, weights_dtype
from verl.workers.trained_model import TrainedModel

TIMES = "timestep"  # argument of all transformers of diffusers


class DiffusionModel(TrainedModel):
    """The policy of a run: the transformer of a pipeline, trained whole or by adapters.

    Attributes:
        parts: The pipeline, with all models.
        model: The transformer under FSDP.
        text_encoders, vae: Frozen, and on the device only inside their `loaded`.
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
        folder = downloaded(options)
        self.adapter = adapter_of(family, options, self.option)
        dtype = weights_dtype(fsdp, is_whole=self.adapter is None)
        computes_in = torch_dtype(fsdp.mp_param_dtype)
        self.parts = open_pipeline(folder, dtype, computes_in)
        encoders = [part for name, part in self.parts.components.items() if name.startswith("text_encoder")]
        self.text_encoders = FrozenParts([part for part in encoders if part], computes_in, device)
        # Convolutions of a VAE overflow in float16, and lose colors in bfloat16.
        self.vae = FrozenParts([self.parts.vae], torch.float32, device)
        self.configs = PipelineConfigs.of(str(folder))
        self.model: Any = self.parts.transformer
        if self.adapter is None:
            for param in self.model.parameters():  # FSDP trains weights of one data type
                param.data = param.data.to(dtype)
        source = on_rank0(lambda: self._read(folder, dtype, seed))
        self._select(self.model, seed)
        if sp is not None and sp.size > 1:
            assert family.layers is not None, "the config was checked"
            VideoUlysses(self.model, family.layers, sp)
        if recomputes(options, self.option):
            self.model.enable_gradient_checkpointing()
        self._shard(fsdp, world_size, source)
        self._prepare_training(device, fsdp, config.offload, config.optim, training_steps)
        self.offloader.settle()  # what is offloaded leaves the device before text encoders need it

    def _read(self, folder: Path, dtype: torch.dtype, seed: int) -> Any:
        """Open the transformer of the files, with its adapters at their first values."""
        model = stored_part(folder / TRANSFORMER, dtype)
        if self.adapter is not None and self.adapter.use_dora:  # whose magnitudes are those of the weights
            dtypes = data_types(model, dtype)
            for name, param in model.named_parameters():
                param.data = param.data.to(dtypes[name])
        self._select(model, seed)
        path = self.options.lora.path
        if path is not None:
            where = f"`{self.option}.lora.path` ({path})"
            set_adapter(model, read_adapter(Path(path), where), str, where)
        return model

    def _select(self, model: Any, seed: int) -> None:
        """Select what is trained."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            select_trainable(model, self.options, self.option, self.adapter)

    def _shard(self, fsdp: FSDPConfig, world_size: int, source: Any) -> None:
        """Shard the transformer, and fill the shards with the values of rank 0's source."""
        mesh = make_mesh(world_size, fsdp.fsdp_size, self.device.type)
        # FSDP would round times to bfloat16, in which 987.3 is 988.
        shard_model(self.model, mesh, fsdp, casts_inputs=False)
        keep_float32(self.model, self.model._keep_in_fp32_modules or ())
        computes_in = torch_dtype(fsdp.mp_param_dtype)
        self.model.register_forward_pre_hook(partial(_cast_inputs, computes_in), with_kwargs=True)
        fill_model(self.model, source, fsdp, mesh, self.device)

    def reference(self) -> AbstractContextManager[None]:
        """Compute with the weights before training inside the block: without adapters."""
        return adapters_disabled(self.model)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images or videos in [0, 1] on the CPU; the VAE is loaded."""
        return self.family.decode(self.parts.vae, latents.to(self.device)).cpu()

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
