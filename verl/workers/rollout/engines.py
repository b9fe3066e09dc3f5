# SPDX-License-Identifier: Apache-2.0
"""The rollout engines by name.

To add one: a module with a class that implements `RolloutEngine`, and one entry here, which imports that
module only when `worker.rollout.name` selects it.
"""

from typing import Any

from verl.utils.registry import Registry
from verl.workers.rollout.interface import EngineSetup, RolloutEngine

ROLLOUT_ENGINES: Registry[Any] = Registry("worker.rollout.name")


@ROLLOUT_ENGINES.register("vllm")
def _build_vllm(config: Any, setup: EngineSetup) -> RolloutEngine:
    # vLLM takes 5 to 12 seconds to import and reads its environment while it does
    from verl.workers.rollout.vllm.rollout import VLLMRollout  # noqa: PLC0415

    return VLLMRollout(config, setup)


@ROLLOUT_ENGINES.register("hf")
def _build_hf(config: Any, setup: EngineSetup) -> RolloutEngine:
    from verl.workers.rollout.hf.rollout import HFRollout  # noqa: PLC0415 - reads torchvision for VL processors

    return HFRollout(config, setup)


def import_rollout_engine(name: str, device: str) -> None:
    """Import the packages of an engine ahead of building it, if they take seconds."""
    if name == "vllm":
        from verl.workers.rollout.vllm import rollout  # noqa: PLC0415

        assert rollout.vllm_import.import_vllm(device).LLM is not None  # imported when it is first asked for


def build_rollout_engine(config: Any, setup: EngineSetup) -> RolloutEngine:
    """Build the engine that `worker.rollout` names; its weights are undefined until `sync_weights`."""
    return ROLLOUT_ENGINES[config.name](config, setup)
