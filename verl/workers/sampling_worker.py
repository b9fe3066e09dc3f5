# SPDX-License-Identifier: Apache-2.0
"""The part of a worker that samples, in processes that also train and in others."""

from collections.abc import Iterator

from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.workers.base_worker import DeviceWorker
from verl.workers.rollout.base import FinishedResponse, SamplingOptions
from verl.workers.rollout.engine_host import EngineHost


class SamplingWorker(DeviceWorker):
    """A worker with a rollout engine."""

    host: EngineHost  # from the engine's start on

    @register(Dispatch.SHARD, phase="gen", axis="rollout", streaming=True)
    def generate(self, prompts: DataProto, sampling: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        """Sample responses to this engine's prompts as they finish; see `EngineHost.generate`."""
        return self.host.generate(prompts, sampling)

    def close(self) -> None:
        if hasattr(self, "host"):
            self.host.close()
