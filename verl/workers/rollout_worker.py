# SPDX-License-Identifier: Apache-2.0
"""Sampling workers, in training processes or in separate ones that receive weights from them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from verl.config.worker import WorkerConfig
from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.single_controller.ray.published_weights import PublishedWeights
from verl.workers.base_worker import DeviceWorker
from verl.workers.engine_check import SampledRow
from verl.workers.engine_host import EngineHost, EnginePlace
from verl.workers.model_builder import load_model_config
from verl.workers.rollout.interface import EngineAdapter, FinishedResponse, SamplingOptions
from verl.workers.run_options import RunOptions
from verl.workers.weight_transport import make_reader


class SamplingWorker(DeviceWorker):
    """A worker with a rollout engine."""

    config: WorkerConfig
    options: RunOptions
    host: EngineHost  # from the engine's start on
    place: EnginePlace

    def _build_engine(self, model_config: Any, **options: Any) -> None:
        """Build the engine of this rank's place; `options` are those of `EngineHost`."""
        arguments = self.config, self.options, self.place, self.tokenizer, self.media
        self.host = EngineHost(*arguments, model_config, **options)
        self.engine = self.host.engine

    @register(Dispatch.SHARD, phase="gen", axis="rollout", streaming=True)
    def generate(self, prompts: DataProto, sampling: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        """Sample responses to this engine's prompts as they finish; see `EngineHost.generate`."""
        return self.host.generate(prompts, sampling)

    @register(Dispatch.ALL, phase="gen")
    def sample(
        self, prompts: DataProto | None, sampling: SamplingOptions, at_most: int
    ) -> list[FinishedResponse]:
        """Continue sampling with more prompts; see `EngineHost.sample`."""
        return self._led(self.host.sample(prompts, sampling, at_most))

    @register(Dispatch.ALL, phase="gen")
    def interrupt(self) -> list[FinishedResponse]:
        """Drop all prompts of `sample`, and return what each unfinished response has.

        Conversations are parked instead: they continue when their prompts come again.
        """
        return self._led(self.host.joining.interrupt())

    @register(Dispatch.ALL, phase="gen")
    def forget(self) -> None:
        """Have interrupted conversations begin again when their prompts come."""
        if self.host.conversations is not None:
            self.host.conversations.forget()

    def _led(self, responses: list[FinishedResponse]) -> list[FinishedResponse]:
        return responses if self.place.leads else []  # all ranks of an engine have the same

    def close(self) -> None:
        super().close()
        if hasattr(self, "host") and self.host.conversations is not None:
            self.host.conversations.close()  # ends the processes of tools and agents


class RolloutWorker(SamplingWorker):
    """One process of an engine, given by its number among all; the engine is its own group."""

    def __init__(self, config: WorkerConfig, options: RunOptions, engine: int) -> None:
        # each engine has the random numbers that it has in a process that also trains
        tp_size = config.rollout.tensor_parallel_size
        super().__init__(config, replace(options, seed=options.seed + engine * tp_size))
        self.place = EnginePlace(engine, leads=self.rank == 0)

    @register(Dispatch.ALL, phase="init_engine")
    def init_engine(self, adapter: EngineAdapter | None) -> None:
        """Build the engine; it takes the weights of `adapter`, or whole ones."""
        self.set_axis("rollout", 0, 1, is_first=self.place.leads)
        model = self.config.actor.model
        self._load_readers(model)
        self._build_engine(load_model_config(model), adapter=adapter)
        self.reader = make_reader(self.config.rollout, self.rank, self.world_size, self.device)

    @register(Dispatch.ALL, phase="sync_weights")
    def load_weights(self, weights: PublishedWeights) -> None:
        """Take the weights or adapters of a version; unfinished responses continue with them."""
        named_tensors = self.reader.named_tensors(weights.version, weights.shares)
        with self.host.continued.interrupted(weights.version):
            if self.engine.takes_adapter:
                self.engine.sync_adapter(dict(named_tensors))
            else:
                self.engine.sync_weights(named_tensors)
            self.engine.wake()

    @register(Dispatch.ALL, phase="sync_weights")
    def rows_to_compare(self) -> tuple[list[SampledRow], torch.dtype] | None:
        """Sample rows for `TrainingWorker.compare_engine`; None for a model that is known."""
        if not self.host.must_be_compared:
            return None
        return self.host.rows_to_compare(), self.engine.dtype

    @register(Dispatch.ALL, phase="save_checkpoint")
    def rng_state(self) -> dict[str, Any]:
        return self.engine.rng_state()

    @register(Dispatch.ALL, phase="load_checkpoint")
    def set_rng_state(self, state: dict[str, Any]) -> None:
        self.engine.set_rng_state(state)

    def close(self) -> None:
        super().close()
        if hasattr(self, "reader"):
            self.reader.close()
