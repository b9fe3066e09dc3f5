# SPDX-License-Identifier: Apache-2.0
"""Seconds and calls of a weight sync of a mixture into vLLM: joint experts, and experts one by one.

python benchmarks/expert_sync.py [--layers 8] [--experts 64] [--hidden 128] [--intermediate 64] [--rounds 5]

Both ways run alternately in one process, from a whole model in bfloat16, and end with equal weights.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from verl.config.rollout import RolloutConfig
from verl.distributed.weights.gathering import full_named_tensors
from verl.models.families.registry import load_config
from verl.models.hub_names import HubNames, auto_class
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.engines import ALONE, build_rollout_engine
from verl.workers.rollout.interface import EngineSetup

JOINT, SINGLE = "joint", "one by one"


class CountedCalls:
    """Counts the calls of the loaders of an engine's experts."""

    def __init__(self, engine: Any) -> None:
        self.count = 0
        for layer in engine.experts.layers.values():
            for param in (layer.w13_weight, layer.w2_weight):
                param.weight_loader = self._counted(param.weight_loader)

    def _counted(self, loader: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return loader(*args, **kwargs)

        return counting


def build(args: argparse.Namespace, folder: str) -> tuple[Any, Any]:
    """Save a model, and return it and an engine of it."""
    os.environ |= ALONE | {"MASTER_PORT": str(get_free_port()), "VLLM_LOGGING_LEVEL": "ERROR"}
    path = save_tiny_model(
        folder, "qwen3_moe", num_hidden_layers=args.layers, num_experts=args.experts,
        hidden_size=args.hidden, moe_intermediate_size=args.intermediate,
    )  # fmt: skip
    config = load_config(path)
    model = auto_class(config).from_pretrained(path, config=config, dtype=torch.bfloat16)
    rollout = RolloutConfig(dtype="bf16", tensor_parallel_size=1)
    return model, build_rollout_engine(rollout, EngineSetup(str(path), max_length=64, device="cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("layers", 8),
        ("experts", 64),
        ("hidden", 128),
        ("intermediate", 64),
        ("rounds", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, engine = build(args, folder)
        names, calls = HubNames(model.config), CountedCalls(engine)
        seconds: dict[str, list[tuple[float, float]]] = {JOINT: [], SINGLE: []}
        found: dict[str, Any] = {}
        for _ in range(args.rounds + 1):  # the first warms up
            for way, stacks in ((JOINT, names.stacks), (SINGLE, {})):
                calls.count, start, cpu = 0, time.perf_counter(), time.process_time()
                engine.sync_weights(names.convert(full_named_tensors(model, stacks=stacks)))
                seconds[way].append((time.perf_counter() - start, time.process_time() - cpu))
                weights = {name: value.clone() for name, value in engine.model.state_dict().items()}
                found[way] = calls.count, weights
        engine.close()
    (_, one), (_, other) = found.values()
    assert all(torch.equal(one[name], other[name]) for name in one)
    result = {}
    for way, values in seconds.items():
        wall, cpu = (round(statistics.median(each), 4) for each in zip(*values[1:], strict=True))
        result[way] = {"seconds": wall, "CPU seconds": cpu, "calls": found[way][0]}
    print(json.dumps(vars(args) | result))


if __name__ == "__main__":
    main()
