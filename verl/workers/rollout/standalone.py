# SPDX-License-Identifier: Apache-2.0
"""A rollout engine without workers, with the weights of a model on disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.utils.distributed import get_free_port

from verl.config.rollout import RolloutConfig
from verl.distributed.fsdp import torch_dtype
from verl.models.families.registry import load_config
from verl.models.hub_names import HubNames, auto_class
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import EngineSetup, RolloutEngine

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


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
    model = auto_class(config).from_pretrained(path, config=config, dtype=torch_dtype(dtype), **trust)
    return HubNames(model.config, trust_remote_code).convert(model.state_dict().items())
