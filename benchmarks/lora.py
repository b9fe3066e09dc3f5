# SPDX-License-Identifier: Apache-2.0
"""Memory of a LoRA step compared with full training, and time of both ways to sync adapters to the engine.

    python3 benchmarks/lora.py [--rank 16] [--rounds 5]

The 35-million-parameter Qwen2 of `step.py` in one process on CPU. Memory is the peak resident memory minus
that of the process without a model. Full training with a KL also holds a reference in bf16, which adapters do
not need. Times are medians; `generate` samples 64 x 64 tokens.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
from step import MODEL

from tests.helpers.distributed import run_distributed
from tests.helpers.memory import PPO, Rows, make_case, measure_phases
from verl.config.model import PolicyConfig
from verl.config.rollout import RolloutConfig
from verl.models.hub_names import HubNames
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import EngineSetup, RolloutRequest, SamplingOptions
from verl.workers.rollout.vllm.lora_sync import engine_adapter
from verl.workers.sharded_model import ModelSetup, ShardedModel

MIB = 1 << 20
PROMPTS, TOKENS = 64, 64
WAYS = ("adapter", "merged")


def timed(work: Callable[[], Any], rounds: int) -> float:
    """Return the median seconds of calls after a warm-up call."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def time_way(
    process: int, processes: int, config: PolicyConfig, way: str, rounds: int
) -> tuple[float, float]:
    """Return the seconds of a sync, and of sampling with the synced weights."""
    place = ModelSetup(torch.device("cpu"), processes, None)
    hosted = ShardedModel(
        "actor", config.model, config.fsdp, config.offload, place, optim=config.optim, training_steps=1
    )
    rollout = RolloutConfig(tensor_parallel_size=1, lora_sync=way)
    assert hosted.adapter is not None and config.model.model_path is not None
    setup = EngineSetup(
        config.model.model_path,
        256,
        "cpu",
        adapter=engine_adapter(hosted.model, hosted.adapter, rollout, "cpu"),
    )
    engine = build_rollout_engine(rollout, setup)
    names = HubNames(hosted.model.config)

    def sync() -> None:
        if engine.takes_adapter:
            engine.sync_adapter(hosted.adapter_tensors())
        else:
            engine.sync_weights(names.convert(hosted.engine_tensors(torch.bfloat16)))

    requests = [RolloutRequest(number, list(range(10 + number, 32 + number))) for number in range(PROMPTS)]
    sampling = SamplingOptions(max_tokens=TOKENS, ignore_eos=True)
    seconds = timed(sync, rounds), timed(lambda: list(engine.generate(requests, sampling)), rounds)
    engine.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    out = sys.stdout.write
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(folder, "qwen2", **MODEL)
        full, lora = (
            make_case(PPO, model, Rows(), checkpointing=True, rank=rank) for rank in (0, arguments.rank)
        )
        whole, part = measure_phases([full, lora])
        out(f"{'peak MiB':16}{'all weights':>14}{'adapters':>12}{'ratio':>8}\n")
        for phase in PPO.phases:
            peaks = whole[phase] / MIB, part[phase] / MIB
            out(f"{phase:16}{peaks[0]:14.0f}{peaks[1]:12.0f}{peaks[1] / peaks[0]:8.2f}\n")
        out(f"\n{'median seconds':16}{'sync':>14}{'generate':>12}\n")
        for way in WAYS:
            [(sync, generate)] = run_distributed(time_way, 1, lora.actor, way, arguments.rounds)
            out(f"{way:16}{sync:14.3f}{generate:12.2f}\n")


if __name__ == "__main__":
    main()
