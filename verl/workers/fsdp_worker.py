# SPDX-License-Identifier: Apache-2.0
"""The colocated worker: one device with the models and a rollout engine, which train and sample in turn.

Its remote methods and those of `TrainingWorker` are the whole interface between the controller and the
devices.
"""

from collections.abc import Iterator
from typing import Any

from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.workers.engine_host import EnginePlace
from verl.workers.rollout_worker import SamplingWorker
from verl.workers.trained_model import TrainedModel
from verl.workers.training_worker import TrainingWorker


class FSDPWorker(SamplingWorker, TrainingWorker):
    """One process of the colocated worker group."""

    must_check_engine = False

    @register(Dispatch.ALL, phase="init_model")
    def init_model(self) -> None:
        tp_size = self.config.rollout.tensor_parallel_size
        self.place = EnginePlace(self.rank // tp_size, leads=self.rank % tp_size == 0)
        engines = self.world_size // tp_size
        self.set_axis("rollout", self.place.engine, engines, is_first=self.place.leads)
        super().init_model()
        tower, adapter = self.policy.engine_tower, self.engine_adapter()
        self._build_engine(self.policy.model.config, tower=tower, adapter=adapter)
        self.must_check_engine = self.host.must_be_compared
        self.engine.sleep()  # training has the device until the first `sync_weights`
        self.tower_is_synced = False

    @register(Dispatch.ALL, phase="sync_weights")
    def sync_weights(self, version: int) -> None:
        """Load the trained weights or adapters, of a version, into the engine, and wake it."""
        self.host.continued.version = version
        self._sync_weights()
        if self.must_check_engine:
            self.must_check_engine = False
            with self.policy.loaded():
                rows = self.host.rows_to_compare()
            self.engine.sleep()
            self.compare_engine(rows, self.engine.dtype)
            self._sync_weights()

    def _sync_weights(self) -> None:
        if self.policy.tower is None and self.policy.engine_tower is not None:
            self.policy.engine_tower.forget()
        with self.policy.loaded():
            if self.engine.takes_adapter:
                self.engine.sync_adapter(self.policy.adapter_tensors())
            else:
                # a frozen tower does not change: the engine has it since the first sync, if sleep keeps it
                with_tower = not (self.engine.keeps_weights and self.tower_is_synced)
                self.engine.sync_weights(self._hub_tensors(with_tower=with_tower))
                self.tower_is_synced = True
        self.engine.wake()

    @register(Dispatch.ALL, phase="sleep")
    def sleep_engine(self) -> None:
        self.engine.sleep()

    @register(Dispatch.ALL, phase="encode")
    def encodes_media(self) -> bool:
        """Return whether the engine reads features of the policy's tower: if it is frozen, or has none."""
        return self.policy.engine_tower is not None

    @register(Dispatch.SHARD, phase="encode", streaming=True)
    def encode_media(self, prompts: DataProto) -> Iterator[None]:
        """Encode the media (`multi_modal_data`) of the prompts of a step with the policy's vision tower.

        Yields nothing; it is a stream because prompts need not divide evenly over the ranks.
        """
        assert self.policy.engine_tower is not None, "asked for with `encodes_media`"
        with self.policy.loaded():
            self.policy.engine_tower.encode(prompts.non_tensor_batch["multi_modal_data"])
        yield from ()

    def _extra_state(self, model: TrainedModel) -> dict[str, Any]:
        return {"engine_rng": self.engine.rng_state()} if model is self.policy else {}

    def _restore(self, model: TrainedModel, extra: dict[str, Any] | None) -> None:
        self.tower_is_synced = False
        if model is self.policy and extra is not None:
            self.engine.set_rng_state(extra["engine_rng"])
