# SPDX-License-Identifier: Apache-2.0
"""Copies between host and device, a model at rest, and offloading between updates.

python -m benchmarks.gpu.memory --models FOLDER [--tiny --device cpu]
"""

import time

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.gpu.part import GB, GIB, Place, Report, run_part, token_log_probs
from verl.config.model import FSDPConfig, ModelConfig, OffloadConfig, OptimConfig
from verl.distributed.device import empty_cache, synchronize
from verl.distributed.fsdp import local_part, sharded_parameters
from verl.workers.sharded_model import ModelSetup, ShardedModel

SHAPE = dict(
    hidden_size=2048, intermediate_size=11008, num_hidden_layers=6, num_attention_heads=16,
    num_key_value_heads=2, head_dim=128, vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip
RATE = 1e-3
STEPS = 3  # the first allocates the optimizer's state, and pinned memory if there is any


def copies(report: Report, place: Place) -> None:
    """Speed of copies from and to pageable and pinned host memory."""
    size = 1 << 20 if place.tiny else 1 << 30
    on_device = torch.empty(size, dtype=torch.uint8, device=place.device)
    for name in ("pageable", "pinned") if place.is_gpu else ("pageable",):
        on_host = torch.empty(size, dtype=torch.uint8, pin_memory=name == "pinned")
        loading = place.seconds(lambda host=on_host: on_device.copy_(host, non_blocking=True))
        offloading = place.seconds(lambda host=on_host: host.copy_(on_device, non_blocking=True))
        report.figure(f"load_{name}_gb_per_s", size / loading / GB)
        report.figure(f"offload_{name}_gb_per_s", size / offloading / GB)


def held(place: Place, fsdp: FSDPConfig, offload: OffloadConfig, *, role: str = "actor") -> ShardedModel:
    """A model of a worker; the reference, `ref`, is not trained."""
    optim = OptimConfig(lr=RATE) if role == "actor" else None
    folder = place.model("held", "qwen2", **({} if place.tiny else SHAPE))
    model = ModelConfig(model_path=str(folder))
    setup = ModelSetup(place.device, 1, None)
    return ShardedModel(role, model, fsdp, offload, setup, optim=optim, training_steps=2 * STEPS)


def log_probs(held: ShardedModel, length: int) -> Tensor:
    """Log-probs of a row of some token ids."""
    sequence = torch.arange(10, 10 + length, device=held.setup.device)
    return token_log_probs(held.model, sequence, 1, 1.0)


def reference_at_rest(report: Report, place: Place) -> None:
    """After a pass, a frozen model whose shards are on the host leaves nothing on the device."""
    before = place.allocated_gib()
    reference = held(place, FSDPConfig(enable_cpu_offload=True), OffloadConfig(), role="ref")
    with reference.loaded(), torch.no_grad():
        log_probs(reference, 40)
    empty_cache(place.device)
    gathered = [name for name, param in reference.model.named_parameters() if not isinstance(param, DTensor)]
    report.at_most("weights that a reference leaves gathered", len(gathered), 0)
    if place.is_gpu:
        report.at_most("GiB that a reference leaves on the device", place.allocated_gib() - before, 0.1)


def offloaded_updates(report: Report, place: Place) -> None:
    """Updates with weights and moments on the host in between: equal weights, seconds, memory at rest."""
    both = OffloadConfig(offload_params=True, offload_optimizer=True)
    weights: dict[str, dict[str, Tensor]] = {}
    for name, fsdp, offload in (
        ("held", FSDPConfig(), OffloadConfig()),
        ("repeated", FSDPConfig(), OffloadConfig()),
        ("moved", FSDPConfig(), both),
        ("streamed", FSDPConfig(enable_cpu_offload=True), both),
    ):
        weights[name] = updated(report, place, name, held(place, fsdp, offload))
        empty_cache(place.device)
    # Kernels that add in any order move weights of small gradients; lost moments move all by the rate.
    gaps = {name: mean_gap(weights["held"], weights[name]) for name in ("repeated", "moved", "streamed")}
    for name in ("moved", "streamed"):
        bound = 2 * gaps["repeated"] + RATE / 100
        report.at_most(f"weights after {STEPS} updates, {name} and held", gaps[name], bound)


def mean_gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    total = sum(float((other[name] - value).abs().sum()) for name, value in one.items())
    return total / sum(value.numel() for value in one.values())


def updated(report: Report, place: Place, name: str, actor: ShardedModel) -> dict[str, Tensor]:
    """Weights after some updates of `actor`; reports the seconds of the last one and of its copies."""
    optimizer, _ = actor.training
    clock = time.perf_counter
    load = update = offload = 0.0
    for _ in range(STEPS):
        started = clock()
        with actor.loaded(with_optimizer=True):
            synchronize(place.device.type)
            loaded = clock()
            log_probs(actor, 40 if place.tiny else 2048).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            synchronize(place.device.type)
            ended = clock()
        synchronize(place.device.type)
        load, update, offload = loaded - started, ended - loaded, clock() - ended
    report.figure(f"{name}_update_s", update)
    report.figure(f"{name}_at_rest_gib", place.allocated_gib())
    if name == "moved":
        num_bytes = 3 * 4 * sum(param.numel() for param in actor.model.parameters())  # with two moments
        report.figure("moved_gib", num_bytes / GIB)
        report.figure("moved_load_gb_per_s", num_bytes / load / GB)
        report.figure("moved_offload_gb_per_s", num_bytes / offload / GB)
    return {
        key: local_part(param).detach().cpu().clone()
        for key, param in sharded_parameters(actor.model).items()
    }


def work(report: Report, place: Place, case: str) -> None:
    for step in (copies, reference_at_rest, offloaded_updates):
        report.attempt(step, place)


if __name__ == "__main__":
    run_part(__doc__, work, ("all",))
