# SPDX-License-Identifier: Apache-2.0
"""Base classes of worker processes: devices, models, checkpoints and profiles."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

from verl.checkpoint.sharded import AsyncWriter
from verl.config.distillation import TEACHERS, DistillationConfig, TeacherConfig
from verl.config.model import ModelConfig, PolicyConfig
from verl.data.readers import load_readers
from verl.data.teachers import media_of_teacher
from verl.distributed.device import backend_of, device_name, module_of, set_device, set_seed
from verl.distributed.known_gpus import find_gpu
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.attention.varlen_kernels import select_kernels
from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.single_controller.worker import Worker
from verl.workers.out_of_memory import explained_out_of_memory
from verl.workers.packing.media_inputs import MEDIA_KEYS
from verl.workers.roles.teachers import Teachers
from verl.workers.run_options import ModelRunOptions
from verl.workers.sharded_model import ModelSetup, ShardedModel
from verl.workers.trained_model import TrainedModel


class DeviceWorker(Worker):
    """One process of a group, with one device."""

    def __init__(self, config: Any, options: ModelRunOptions) -> None:
        super().__init__()
        self.config, self.options = config, options  # the config is the section `worker`
        self.device = set_device(options.device, self.local_rank)
        set_seed(options.seed + self.rank)
        dist.init_process_group(backend_of(options.device).groups)

    def execute(self, name: str, phase: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method; profiles, NVTX ranges and out-of-memory errors name its phase."""
        nvtx = getattr(module_of(self.device), "nvtx", None)
        marked = nvtx.range(phase) if nvtx else nullcontext()
        with marked, record_function(phase), explained_out_of_memory(phase, self.config):
            return super().execute(name, phase, *args, **kwargs)

    def stream(self, name: str, phase: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with explained_out_of_memory(phase, self.config):
            for item in super().stream(name, phase, *args, **kwargs):  # noqa: UP028 - Ray sends values into generators
                yield item

    def _load_readers(self, model: ModelConfig) -> None:
        options = self.options
        readers = load_readers(model, options.override_chat_template, options.media, options.media_cache)
        self.tokenizer, self.processor, self.media = readers[:3]


class ModelWorker(DeviceWorker):
    """A worker with models, which are saved if they are trained.

    A subclass calls `_prepare` before it loads transformers models with `_build_model`.
    """

    models: list[Any]  # `TrainedModel`s, the policy first
    tokenizer: Any = None
    processor: Any = None
    reported_media = 0  # media encoded by frozen towers, at the last call of `_encoded_media`

    @property
    def trained(self) -> list[TrainedModel]:
        return [model for model in self.models if model.optimizer is not None]

    @register(Dispatch.ALL, phase="save_checkpoint")
    def save_checkpoint(self, folder: str, model_only: bool, copies: bool) -> None:
        """Start writing this rank's part of a checkpoint: a folder for each trained model.

        With `copies` training can continue; without, call `finish_checkpoint` next.
        """
        files = (self.tokenizer, self.processor) if self.rank == 0 else None
        snapshots = {}
        for model in self.trained:
            snapshots[model.role] = model.snapshot(
                model_only=model_only, copies=copies, extra=self._extra_state(model), files=files
            )
        self.checkpoints.start(Path(folder), snapshots)

    @register(Dispatch.ALL, phase="save_checkpoint")
    def is_checkpoint_written(self) -> bool:
        return self.checkpoints.is_done()

    @register(Dispatch.ALL, phase="save_checkpoint")
    def finish_checkpoint(self) -> str | None:
        """Wait until the checkpoint is written; return an error message, None if all ranks succeeded."""
        return self.checkpoints.finish()

    @register(Dispatch.ALL, phase="profile")
    def start_profiler(self) -> None:
        """Record every operation until `stop_profiler`, for chrome://tracing and Perfetto."""
        self.profiler = profile()  # of all kinds of devices that torch can use
        self.profiler.start()

    @register(Dispatch.ALL, phase="profile")
    def stop_profiler(self, folder: str) -> None:
        """Write the trace to `folder/rank_R.json.gz`, which appears complete."""
        self.profiler.stop()
        path = Path(folder) / f"rank_{self.rank}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{os.getpid()}.{path.name}")  # the suffix selects the compression
        self.profiler.export_chrome_trace(str(partial))
        partial.replace(path)
        del self.profiler

    @register(Dispatch.ALL, phase="load_checkpoint")
    def load_checkpoint(self, folder: str) -> None:
        """Resume from a checkpoint, written by any number of ranks."""
        for model in self.trained:
            self._restore(model, model.load(Path(folder)))

    def _extra_state(self, model: TrainedModel) -> dict[str, Any]:
        return {}

    def _restore(self, model: TrainedModel, extra: dict[str, Any] | None) -> None:
        """Restore `_extra_state`; None if there were other ranks."""

    def _divide(self, actor: PolicyConfig, feature_chunks: int = 1) -> SequenceParallel:
        """Divide rows and sequences over the ranks; collective."""
        tp_size = actor.fsdp.tensor_parallel_size
        sp = SequenceParallel.build(actor.ulysses_size, actor.ring_size, feature_chunks, tp_size)
        self.set_axis("train", sp.dp_index, sp.dp_size, is_first=sp.is_first)
        self.checkpoints, self.models = AsyncWriter(), []
        return sp

    def _prepare(self, actor: PolicyConfig, *, share_prompt: bool = False, feature_chunks: int = 1) -> None:
        """Set up parallelism, tokenizer and media before models are built."""
        sp = self._divide(actor, feature_chunks)
        select_kernels(actor.attention_kernel, self.device)
        self._load_readers(actor.model)
        self.setup = ModelSetup(
            self.device,
            self.world_size,
            self.media,
            share_prompt,
            sp,
            actor.cached_embeds_dir,
            actor.divide_short_sequences,
        )

    def _build_model(
        self, role: str, config: Any, model: ModelConfig, setup: ModelSetup | None = None, **options: Any
    ) -> ShardedModel:
        """Build a model of a section `config`; `options` are those of `ShardedModel`."""
        options["training_steps"] = self.options.training_steps
        sharded = ShardedModel(role, model, config.fsdp, config.offload, setup or self.setup, **options)
        self.models.append(sharded)
        return sharded

    def _build_teacher(self, name: str, config: TeacherConfig) -> ShardedModel:
        setup, model, option = self.setup, config.model, f"{TEACHERS}.{name}"
        if config.num_video_frames is not None:
            seen, template = media_of_teacher(config, self.options.media), self.options.override_chat_template
            media = load_readers(model, template, seen, self.options.media_cache, option=option).media
            assert media is not None, "its data set has media"
            setup = replace(setup, media=media)
        return self._build_model(name, config, model, setup, option=option)

    def _build_teachers(self, config: DistillationConfig) -> None:
        """Build the frozen models that the policy learns from: `teacher_models` by name, and `teachers`."""
        self.teacher_models = {
            name: self._build_teacher(name, teacher) for name, teacher in config.loaded.items()
        }
        forwards = dict.fromkeys(config.teachers) | {
            name: model.forward for name, model in self.teacher_models.items()
        }
        self.teachers = Teachers(forwards, config.distillation_loss, self.device) if forwards else None

    def _encoded_media(self) -> dict[str, float]:
        """Count the images and videos that all frozen towers encoded since the last call; collective."""
        towers = [model.tower for model in self.models if model.tower is not None]
        if not towers:
            return {}
        own = sum(tower.num_encoded for tower in towers) if self.setup.sp.is_first else 0
        count = torch.tensor(own - self.reported_media, device=self.device)
        self.reported_media = own
        dist.all_reduce(count)
        return {"perf/encoded_media": float(count)}

    @contextmanager
    def _utilization(self, role: str) -> Iterator[dict[str, float]]:
        """Measure the model FLOPs utilization of the block, in [0, 1], if the device's peak is known.

        It counts every pass that this rank runs, and is in the yielded dict after the block.
        """
        metrics: dict[str, float] = {}
        start, before = time.perf_counter(), self._operations()
        yield metrics
        gpu = find_gpu(device_name(self.device) or "")
        if gpu is not None:
            seconds = time.perf_counter() - start
            metrics[f"perf/mfu_{role}"] = (self._operations() - before) / (seconds * gpu.peak)

    def _operations(self) -> float:
        return sum(model.flops.done for model in self.models if isinstance(model, ShardedModel))

    @contextmanager
    def _loaded(
        self, batch: DataProto, *models: ShardedModel | None, with_optimizer: bool = False
    ) -> Iterator[None]:
        """Load models onto the device inside the block, and with `with_optimizer` the first one's optimizer.

        Models with a frozen vision tower also hold the features of the batch's media.
        """
        media = [row for key in MEDIA_KEYS for row in batch.non_tensor_batch.get(key, ())]
        with ExitStack() as stack:
            for number, model in enumerate(dict.fromkeys(models)):
                if model is not None:
                    stack.enter_context(model.loaded(with_optimizer and number == 0))
                    stack.enter_context(model.holding(media))
            yield
