# SPDX-License-Identifier: Apache-2.0
"""The rollout engines by name.

To add one: a module with a class that implements `RolloutEngine`, and one entry here, which imports that
module only when `worker.rollout.name` selects it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.utils.distributed import get_free_port

from verl.config.rollout import RolloutConfig
from verl.distributed.fsdp import torch_dtype
from verl.models.families.registry import load_config
from verl.models.fp8_weights import drop_quantization, weights_in_fp8
from verl.models.hub_names import HubNames, auto_class
from verl.utils.registry import Registry
from verl.workers.rollout.interface import EngineSetup, RolloutEngine

ROLLOUT_ENGINES: Registry[Any] = Registry("worker.rollout.name")
TAKES_STACKS = {"vllm"}  # engines whose `sync_weights` reads joint weights of experts, in slices
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@ROLLOUT_ENGINES.register("vllm")
def _build_vllm(config: Any, setup: EngineSetup) -> RolloutEngine:
    # vLLM takes 5 to 12 seconds to import and reads its environment while it does
    from verl.workers.rollout.vllm.rollout import VLLMRollout  # noqa: PLC0415

    return VLLMRollout(config, setup)


@ROLLOUT_ENGINES.register("hf")
def _build_hf(config: Any, setup: EngineSetup) -> RolloutEngine:
    from verl.workers.rollout.hf.rollout import HFRollout  # noqa: PLC0415 - reads torchvision for VL processors

    return HFRollout(config, setup)


@ROLLOUT_ENGINES.register("sglang")
def _build_sglang(config: Any, setup: EngineSetup) -> RolloutEngine:
    from verl.workers.rollout.sglang.sglang_rollout import SGLangRollout  # noqa: PLC0415 - as above

    return SGLangRollout(config, setup)


def import_rollout_engine(name: str, device: str) -> None:
    """Import the packages of an engine ahead of building it, if they take seconds."""
    if name == "vllm":
        from verl.workers.rollout.vllm import rollout  # noqa: PLC0415

        assert rollout.vllm_import.import_vllm(device).LLM is not None  # imported when it is first asked for


def build_rollout_engine(config: Any, setup: EngineSetup) -> RolloutEngine:
    """Build the engine that `worker.rollout` names; its weights are undefined until `sync_weights`."""
    return ROLLOUT_ENGINES[config.name](config, setup)


@contextmanager
def standalone_engine(
    name: str,
    model: str,
    *,
    device: str,
    dtype: str,
    max_length: int,
    seed: int,
    trust_remote_code: bool = False,
) -> Iterator[RolloutEngine]:
    """Open an engine of `worker.rollout.name` on a model's folder or hub name; it samples at once."""
    config = RolloutConfig(
        name=name, dtype=dtype, seed=seed, tensor_parallel_size=1, max_model_len=max_length,
        max_num_batched_tokens=max(8192, max_length), enforce_eager=device == "cpu",
    )  # fmt: skip
    setup = EngineSetup(model, max_length, device, trust_remote_code=trust_remote_code)
    if name != "hf":  # reads the weights itself, and needs no process group
        os.environ |= ALONE | {"MASTER_PORT": str(get_free_port())}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    engine = build_rollout_engine(config, setup)
    try:
        if name != "hf":
            engine.sync_weights(_hub_weights(model, dtype, trust_remote_code))
        engine.wake()
        yield engine
    finally:
        engine.close()


def _hub_weights(path: str, dtype: str, trust_remote_code: bool) -> Iterator[tuple[str, Any]]:
    trust: Any = {"trust_remote_code": trust_remote_code}
    config = load_config(path, **trust)
    drop_quantization(config)
    with weights_in_fp8(path):
        model = auto_class(config).from_pretrained(path, config=config, dtype=torch_dtype(dtype), **trust)
    return HubNames(model.config, trust_remote_code).convert(model.state_dict().items())
