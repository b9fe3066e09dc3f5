# SPDX-License-Identifier: Apache-2.0
"""The rollout engine next to the trainer on one device: sync, sleep, wake, and equality of log-probs.

    python -m benchmarks.gpu.engine --case plain --models FOLDER [--tiny --device cpu]

| case | differs from `plain`, which captures graphs, by |
|---|---|
| plain | |
| reserved | memory that an update leaves in torch's cache when the engine wakes |
| head | a head that rounds its logits to the engine's dtype, for comparison |
| top_p | sampling from 95 % of the probability, which other kernels do |
| lora | adapters that the engine serves |
| moe | a mixture of experts |
"""

import time
import unittest.mock
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
import torch
from torch import Tensor

from benchmarks.gpu.part import GB, Place, Report, run_part, token_log_probs
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig, OffloadConfig, OptimConfig
from verl.config.rollout import RolloutConfig
from verl.distributed.device import resident_bytes, synchronize
from verl.distributed.fsdp import local_part, sharded_parameters
from verl.models.hub_names import HubNames
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import (
    EngineSetup,
    FinishedResponse,
    RolloutEngine,
    RolloutRequest,
    SamplingOptions,
)
from verl.workers.rollout.vllm import llm_arguments
from verl.workers.rollout.vllm.lora_sync import engine_adapter
from verl.workers.sharded_model import ModelSetup, ShardedModel

SHAPE = dict(
    hidden_size=1536, intermediate_size=8960, num_hidden_layers=14, num_attention_heads=12,
    num_key_value_heads=2, head_dim=128, vocab_size=151936,
    initializer_range=0.02,  # of real models: with that of tiny ones bf16 moves log-probs by 0.7
)  # fmt: skip
CASES = ("plain", "reserved", "head", "top_p", "lora", "moe")
PROMPTS = [list(range(20, 20 + length)) for length in (3, 40, 200, 7)]
TEMPERATURE = 0.7
MEMORY_SHARE = 0.5  # of the GPU, for the engine
FREED = 0.4  # of its share at least, since what the trainer holds counts as used
RESERVED_GIB = 3  # free memory that `reserved` leaves outside of torch's cache
STEPS = 2
# Mean difference of log-probs in nats: of bfloat16 in different kernels, and of float32.
DIFFERENCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}


@dataclass(frozen=True)
class Pair:
    """A policy and the engine that samples from it."""

    actor: ShardedModel
    engine: RolloutEngine
    place: Place
    top_p: float
    rounds_logits: bool

    def sync(self) -> None:
        if self.engine.takes_adapter:
            self.engine.sync_adapter(self.actor.adapter_tensors())
        else:
            names = HubNames(self.actor.model.config)
            self.engine.sync_weights(names.convert(self.actor.engine_tensors(self.engine.dtype)))
        self.engine.wake()

    def synced_bytes(self) -> int:
        weights = self.actor.model.named_parameters()
        is_synced = (lambda name: "lora_" in name) if self.engine.takes_adapter else (lambda name: True)
        return sum(self.engine.dtype.itemsize * one.numel() for name, one in weights if is_synced(name))

    def sample(self, n: int, max_tokens: int) -> list[FinishedResponse]:
        options = SamplingOptions(
            n=n, temperature=TEMPERATURE, top_p=self.top_p, max_tokens=max_tokens, ignore_eos=True
        )
        requests = [RolloutRequest(number, ids) for number, ids in enumerate(PROMPTS)]
        finished = [one for batch in self.engine.generate(requests, options) for one in batch]
        return sorted(finished, key=lambda one: (one.uid, one.sample))

    def differences(self, responses: Sequence[FinishedResponse]) -> Tensor:
        """Absolute differences between the engine's and the policy's log-probs of all sampled tokens."""
        found = []
        for one in responses:
            sequence = torch.tensor(PROMPTS[one.uid] + one.token_ids, device=self.place.device)
            with torch.no_grad():
                ours = token_log_probs(self.actor.model, sequence, len(PROMPTS[one.uid]), TEMPERATURE)
            found.append((ours.cpu() - torch.tensor(one.log_probs)).abs())
        return torch.cat(found)

    def sample_weights(self) -> Tensor:
        """Some trained weights, to see that an update changed them."""
        weights = sharded_parameters(self.actor.model).items()
        trained = next(param for name, param in weights if param.requires_grad and "layers.0." in name)
        return local_part(trained).detach().flatten()[:1000].clone()

    def update(self) -> None:
        optimizer, _ = self.actor.training
        length = 40 if self.place.tiny else 1000
        sequence = torch.arange(length, device=self.place.device) % self.actor.model.config.vocab_size
        token_log_probs(self.actor.model, sequence, 1, 1.0).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def model_folder(place: Place, case: str) -> Path:
    if case == "moe":
        return place.model("moe", "qwen3_moe")
    return place.model("dense", "qwen2", **({} if place.tiny else SHAPE))


def build_actor(place: Place, folder: Path, case: str) -> ShardedModel:
    model = ModelConfig(model_path=str(folder), lora=LoraConfig(rank=16 if case == "lora" else 0))
    dtype = "bf16" if place.is_gpu else "fp32"
    # The engine reads the base of adapters from its files in its own dtype.
    fsdp = FSDPConfig(mp_param_dtype=dtype, torch_dtype=dtype if case == "lora" else None)
    setup, optim = ModelSetup(place.device, 1, None), OptimConfig(lr=1e-3)
    actor = ShardedModel("actor", model, fsdp, OffloadConfig(), setup, optim=optim, training_steps=STEPS)
    with torch.no_grad():
        for name, param in actor.model.named_parameters():
            if "lora_B" in name:  # zero at the start: the adapter would change nothing
                local_part(param).normal_(0, 0.02)
    return actor


def build_engine(place: Place, folder: Path, case: str, actor: ShardedModel) -> RolloutEngine:
    rollout = RolloutConfig(
        dtype="bf16" if place.is_gpu else "fp32",
        tensor_parallel_size=1,
        gpu_memory_utilization=MEMORY_SHARE,
        enforce_eager=case != "plain",
        lora_sync="adapter" if case == "lora" else "auto",
    )
    adapter = None
    if case == "lora":
        assert actor.adapter is not None, "the actor was built with adapters"
        adapter = engine_adapter(actor.model, actor.adapter, rollout, place.device.type)
    setup = EngineSetup(str(folder), max_length=2048, device=place.device.type, adapter=adapter)
    with rounding_head() if case == "head" else nullcontext():
        return build_rollout_engine(rollout, setup)


def rounding_head() -> AbstractContextManager[Any]:
    """Let the engine compute its logits in its own dtype instead of float32."""
    return unittest.mock.patch.object(llm_arguments, "_head_dtype", lambda device: None)


def timed(report: Report, place: Place, name: str, function: Callable[[], Any]) -> tuple[Any, float]:
    """Report the seconds of a step and the free memory after it; return its result and the seconds."""
    synchronize(place.device.type)
    started = time.perf_counter()
    result = function()
    synchronize(place.device.type)
    seconds = time.perf_counter() - started
    report.figure(f"{name}_s", seconds)
    if place.is_gpu:
        report.figure(f"{name}_free_gib", place.free_gib())
    return result, seconds


def compare(report: Report, pair: Pair, name: str, responses: Sequence[FinishedResponse]) -> None:
    gaps = pair.differences(responses)
    report.figure(f"{name}_99th_percentile", float(gaps.quantile(0.99)))
    report.figure(f"{name}_largest", float(gaps.max()))
    bound = DIFFERENCE[pair.engine.dtype] * (4 if pair.rounds_logits else 1)
    report.figure(f"{name}_mean", float(gaps.mean()))
    report.at_most(f"mean of {name}", float(gaps.mean()), bound)


def first_rollout(report: Report, pair: Pair) -> None:
    """Weights reach the engine, which samples the same again from the same random stream."""
    place, engine = pair.place, pair.engine
    _, seconds = timed(report, place, "first_sync", pair.sync)
    state = engine.rng_state()
    first, _ = timed(report, place, "first_generate", lambda: pair.sample(8, 64 if place.is_gpu else 8))
    compare(report, pair, "log_probs_difference", first)
    engine.sleep()
    pair.sync()  # forgets cached prompts, of which other kernels would compute the tokens
    engine.set_rng_state(state)
    again = pair.sample(8, 64 if place.is_gpu else 8)
    same = [one.token_ids for one in again] == [one.token_ids for one in first]
    report.holds("the same random stream gives the same samples", same)
    length = 256 if place.is_gpu else 4
    many, seconds = timed(report, place, "generate", lambda: pair.sample(64, length))
    report.figure("generate_tokens_per_s", sum(len(one.token_ids) for one in many) / seconds)


def update_and_sync(report: Report, pair: Pair, case: str) -> None:
    """After each update, the engine gets its memory and the new weights."""
    place, engine = pair.place, pair.engine
    awake = place.free_gib()
    timed(report, place, "sleep", engine.sleep)
    if place.is_gpu:
        total = torch.cuda.get_device_properties(place.device).total_memory / 2**30
        report.at_least("GiB freed by sleep", place.free_gib() - awake, FREED * MEMORY_SHARE * total)
    for step in range(STEPS):
        before = pair.sample_weights()
        pair.update()
        report.holds(f"update {step} changed the weights", not torch.equal(before, pair.sample_weights()))
        if case == "reserved" and place.is_gpu:
            torch.empty(
                int((place.free_gib() - RESERVED_GIB) * 2**30), dtype=torch.uint8, device=place.device
            )
        _, seconds = timed(report, place, f"sync_{step}", pair.sync)
        report.figure(f"sync_{step}_gb_per_s", pair.synced_bytes() / seconds / GB)
        compare(report, pair, f"log_probs_difference_after_update_{step}", pair.sample(8, 16))
        timed(report, place, f"sleep_{step}", engine.sleep)


def work(report: Report, place: Place, case: str) -> None:
    folder = model_folder(place, case)
    actor, _ = timed(report, place, "policy", lambda: build_actor(place, folder, case))
    engine, _ = timed(report, place, "engine", lambda: build_engine(place, folder, case, actor))
    timed(report, place, "first_sleep", engine.sleep)
    pair = Pair(actor, engine, place, top_p=0.95 if case == "top_p" else 1.0, rounds_logits=case == "head")
    runner = engine.engine.model_executor.driver_worker.worker.model_runner
    report.figure("runner", type(runner).__module__)
    report.attempt(first_rollout, pair)
    report.attempt(update_and_sync, pair, case)
    report.figure("resident_gb", resident_bytes() / GB)


if __name__ == "__main__":
    run_part(__doc__, work, CASES)
