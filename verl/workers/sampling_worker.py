# SPDX-License-Identifier: Apache-2.0
"""The part of a worker that samples, in processes that also train and in others."""

from collections.abc import Iterator

from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.workers.base_worker import DeviceWorker
from verl.workers.engine_host import EngineHost, EnginePlace
from verl.workers.rollout.interface import FinishedResponse, SamplingOptions


class SamplingWorker(DeviceWorker):
    """A worker with a rollout engine."""

    host: EngineHost  # from the engine's start on
    place: EnginePlace

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
        """Drop all prompts, and return what each unfinished response has; see `EngineHost.interrupt`."""
        return self._led(self.host.interrupt())

    @register(Dispatch.ALL, phase="gen")
    def forget(self) -> None:
        """Have interrupted conversations begin again when their prompts come."""
        self.host.forget()

    def _led(self, responses: list[FinishedResponse]) -> list[FinishedResponse]:
        return responses if self.place.leads else []  # all ranks of an engine have the same

    def close(self) -> None:
        super().close()
        if hasattr(self, "host"):
            self.host.close()
