# SPDX-License-Identifier: Apache-2.0
"""What worker processes that hold models have in common: their models, their checkpoints, their profiles."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from verl.checkpoint.async_writer import AsyncWriter
from verl.checkpoint.sharded import Restored
from verl.config.model import ModelConfig, OptimConfig, PolicyConfig
from verl.data.media.loader import MediaLoader
from verl.data.tokenizer import load_processor, load_tokenizer
from verl.distributed.device import backend_of, set_device, set_seed
from verl.distributed.sequence_parallel import SequenceParallel, data_parallel_group
from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.single_controller.worker import Worker
from verl.workers.out_of_memory import explained_out_of_memory
from verl.workers.run_options import ModelRunOptions
from verl.workers.sharded_model import Place, ShardedModel
from verl.workers.step_profiler import StepProfiler


class ModelWorker(Worker):
    """One process of a group that owns one device and shards of models.

    A subclass calls `_prepare` where it loads its models, and `_hosted` for each of them; those that have an
    optimizer are saved.
    """

    def __init__(self, options: ModelRunOptions) -> None:
        super().__init__()
        self.options = options
        self.device = set_device(options.device, self.local_rank)
        set_seed(options.seed + self.rank)
        dist.init_process_group(backend_of(options.device))

    def execute(self, name: str, phase: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method under the name of its phase in profiles."""
        with record_function(phase), explained_out_of_memory(phase):
            return super().execute(name, phase, *args, **kwargs)

    @register(Dispatch.ALL, phase="save_checkpoint")
    def save_checkpoint(self, folder: str, model_only: bool, copies: bool) -> None:
        """Begin to write this rank's part of a checkpoint: a folder for each model that is trained.

        Args:
            folder: Of the checkpoint.
            model_only: Leave out what trains the models.
            copies: Write copies, so that training may go on; without, `finish_checkpoint` is called next.
        """
        files = (self.tokenizer, self.processor) if self.rank == 0 else None
        snapshots = {}
        for hosted in self.trained:
            snapshots[hosted.role] = hosted.snapshot(
                model_only=model_only, copies=copies, extra=self._extra_state(hosted), files=files
            )
        self.checkpoints.start(Path(folder), snapshots)

    @register(Dispatch.ALL, phase="save_checkpoint")
    def is_checkpoint_written(self) -> bool:
        """Whether this rank has nothing left to write."""
        return self.checkpoints.is_done()

    @register(Dispatch.ALL, phase="save_checkpoint")
    def finish_checkpoint(self) -> str | None:
        """Wait until the checkpoint is written; returns what kept the ranks from it, None if nothing did."""
        return self.checkpoints.finish()

    @register(Dispatch.ALL, phase="profile")
    def start_profiler(self) -> None:
        """Begin to record every operation of this process."""
        self.profiler.start()

    @register(Dispatch.ALL, phase="profile")
    def stop_profiler(self, folder: str) -> None:
        """Write what was recorded to `folder/rank_R.json.gz`."""
        self.profiler.stop(Path(folder) / f"rank_{self.rank}.json.gz")

    @register(Dispatch.ALL, phase="load_checkpoint")
    def load_checkpoint(self, folder: str) -> None:
        """Go on from a checkpoint, of any number of ranks."""
        for hosted in self.trained:
            self._restore(hosted, hosted.load(Path(folder)))

    def _extra_state(self, hosted: ShardedModel) -> dict[str, Any]:
        """What this rank saves beside a model."""
        return {}

    def _restore(self, hosted: ShardedModel, restored: Restored) -> None:
        """Take up what this rank saved beside a model."""

    def _prepare(self, actor: PolicyConfig, *, share_prompt: bool = False, pieces: int = 1) -> None:
        """Say which rows are this rank's, and get ready to hold models.

        Args:
            actor: How ranks share sequences, and whose tokenizer it is.
            share_prompt: Run a prompt once for all of its responses.
            pieces: In which features of media are gathered over the ranks of a sequence.
        """
        sp_size = actor.sp_size
        self.set_axis(
            "train", self.rank // sp_size, self.world_size // sp_size, is_first=self.rank % sp_size == 0
        )
        self._load_tokenizer(actor.model)
        sp = SequenceParallel.build(range(self.world_size), actor.ulysses_size, actor.ring_size, pieces)
        self.group = data_parallel_group(sp)
        self.place = Place(
            self.device,
            self.world_size,
            self.media,
            share_prompt,
            sp,
            actor.cached_embeds_dir,
            actor.divide_short_sequences,
        )
        self.hosted: list[ShardedModel] = []
        self.checkpoints = AsyncWriter()
        self.profiler = StepProfiler()
        self.num_encoded = 0  # media that frozen towers had encoded when it was last said

    def _load_tokenizer(self, model: ModelConfig) -> None:
        options = self.options
        assert model.tokenizer_path is not None, "it is the model's, and the config was checked"
        arguments = (model.tokenizer_path, options.override_chat_template, model.trust_remote_code)
        self.tokenizer, self.processor = load_tokenizer(*arguments), load_processor(*arguments)
        self.media = None
        if self.processor is not None:
            self.media = MediaLoader(self.processor, options.media, options.media_cache)

    def _hosted(
        self,
        role: str,
        config: Any,
        model: ModelConfig,
        *,
        optim: OptimConfig | None = None,
        head: str = "causal",
    ) -> ShardedModel:
        """A model of the run; with an optimizer it is updated and saved."""
        hosted = ShardedModel(
            role,
            model,
            config.fsdp,
            config.offload,
            self.place,
            optim=optim,
            training_steps=self.options.training_steps,
            head=head,
        )
        self.hosted.append(hosted)
        return hosted

    @property
    def trained(self) -> list[ShardedModel]:
        """The models that are updated and saved, the policy first."""
        return [hosted for hosted in self.hosted if hosted.optimizer is not None]

    def _encoded_media(self) -> dict[str, float]:
        """How many images and videos were encoded since the last call, by all frozen towers together."""
        towers = [hosted.tower for hosted in self.hosted if hosted.tower is not None]
        if not towers:
            return {}
        own = sum(tower.num_encoded for tower in towers) if self.place.sp.index == 0 else 0
        count = torch.tensor(own - self.num_encoded, device=self.device)
        self.num_encoded = own
        dist.all_reduce(count)
        return {"perf/encoded_media": float(count)}

    def _mfu(
        self, hosted: ShardedModel, batch: DataProto, seconds: float, *, num_response_tokens: int
    ) -> dict[str, float]:
        """The share of the device's peak that an update of these sequences reached, if known."""
        lengths = batch.batch["attention_mask"].sum(-1).tolist()
        mfu = hosted.flops.mfu(lengths, seconds, num_response_tokens=num_response_tokens)
        return {} if mfu is None else {f"perf/mfu_{hosted.role}": mfu / self.place.sp.size}

    @contextmanager
    def _loaded(
        self, batch: DataProto, *models: ShardedModel | None, with_optimizer: bool = False
    ) -> Iterator[None]:
        """Have these models on the device inside the block, and the first one's optimizer if asked for.

        The media of the batch are at hand as features where a model's vision tower is frozen.
        """
        media = batch.non_tensor_batch.get("multi_modal_data", ())
        with ExitStack() as stack:
            for number, hosted in enumerate(dict.fromkeys(models)):
                if hosted is not None:
                    stack.enter_context(hosted.loaded(with_optimizer and number == 0))
                    stack.enter_context(hosted.holding(media))
            yield
