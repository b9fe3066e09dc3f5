# SPDX-License-Identifier: Apache-2.0
"""Time and memory saved by sharing prompts and by sharing sequences over ranks, on CPU with a tiny model.

    python benchmarks/long.py [--prompt 1024] [--response 128] [--n 8] [--rounds 3]

First, the time of a log-prob pass and of an update's forward and backward, for n responses that share one
copy of the prompt, and for n responses with a copy each; medians of rounds in one process with one thread.
Then the activations that a forward pass saves for backward, on each of 1, 2 and 4 ranks that share the
sequences. With `--long-prompt TOKENS`, instead the memory of a log-prob pass over one prompt of that length,
on 1 and on 4 ranks: the rise of a process's peak above its peak after a short pass. The last line is JSON.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from verl.config.model import ModelConfig
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.hub_names import auto_class
from verl.models.registry import prepare_model
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto
from verl.workers.model_builder import load_model_config
from verl.workers.packing.forward import PackedForward

MESHES = {"sp 1": (1, 1), "sp 2, ulysses": (2, 1), "sp 2, ring": (1, 2), "sp 4, ulysses 2 x ring 2": (2, 2)}
PORT = "29531"
LARGE = {"intermediate_size": 680, "num_key_value_heads": 1}  # close to Qwen2.5-7B: 5.3 and 1/7 of its width
WARM_UP = 256  # tokens of a first pass that loads kernels and opens connections


def load(folder: Path) -> nn.Module:
    """Load the tiny model in float32 and prepare it for packed passes."""
    config = load_model_config(ModelConfig(model_path=str(folder)))
    model = auto_class(config).from_pretrained(folder, dtype=torch.float32)
    prepare_model(model)
    return model


def one_group(options: argparse.Namespace, prompt: int | None = None) -> DataProto:
    """Build random responses to one random prompt of `prompt` tokens (default: `options.prompt`)."""
    generator = torch.Generator().manual_seed(0)
    length = options.prompt if prompt is None else prompt
    prompts = torch.randint(8, 300, (1, length), generator=generator).expand(options.n, -1)
    responses = torch.randint(8, 300, (options.n, options.response), generator=generator)
    ids = torch.cat([prompts, responses], 1)
    tensors = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(ids.shape[1]).expand_as(ids),
        "responses": responses,
        "loss_mask": torch.ones_like(responses),
    }
    return DataProto.from_dict(tensors, {"uid": np.array(["prompt"] * options.n, dtype=object)})


def seconds(forward: PackedForward, batch: DataProto) -> float:
    """Time a log-prob pass, and forward and backward of an update."""
    start = time.perf_counter()
    with torch.no_grad():
        forward.log_probs(batch, 1.0)
    forward.log_probs(batch, 1.0).log_probs.sum().backward()
    forward.model.zero_grad()
    return time.perf_counter() - start


def measure_sharing(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return median times with and without sharing, measured alternately."""
    model, batch = load(folder), one_group(options)
    ways = {share: PackedForward(model, share_prompt=share) for share in (False, True)}
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(options.rounds + 1):
        for share, forward in ways.items():
            times[share].append(seconds(forward, batch))
    repeated, shared = (statistics.median(times[share][1:]) for share in (False, True))
    return {
        "repeated_tokens": options.n * (options.prompt + options.response),
        "shared_tokens": options.prompt + options.n * options.response,
        "repeated_s": round(repeated, 3),
        "shared_s": round(shared, 3),
        "speed_up": round(repeated / shared, 2),
    }


def saved_mib(forward: PackedForward, batch: DataProto) -> float:
    """Return the MiB that a forward pass saves for backward, without the parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in forward.model.parameters()}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward.log_probs(batch, 1.0).log_probs
    result.sum().backward()
    return sum(sizes.values()) / 2**20


def peak_mib(forward: PackedForward, batch: DataProto) -> float:
    """Return the MiB by which a log-prob pass raises the peak memory of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.no_grad():
        forward.log_probs(batch, 1.0)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


def measure_rank(
    rank: int, ulysses: int, ring: int, folder: Path, options: argparse.Namespace, results: list[float]
) -> None:
    """Run one rank of a mesh; writes its result to `results`."""
    size = ulysses * ring
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT, GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.set_num_threads(1)
    sp = SequenceParallel.build(ulysses, ring)
    model = load(folder)
    forward = PackedForward(model, share_prompt=True, sp=sp)
    if options.long_prompt:
        peak_mib(forward, one_group(options, prompt=WARM_UP))
        results[rank] = peak_mib(forward, one_group(options))
    else:
        results[rank] = saved_mib(forward, one_group(options))
    dist.destroy_process_group()


def measure_mesh(ulysses: int, ring: int, folder: Path, options: argparse.Namespace) -> float:
    """Return the largest result of the ranks."""
    with mp.Manager() as manager:
        results = manager.list([0.0] * (ulysses * ring))
        arguments = (ulysses, ring, folder, options, results)
        mp.start_processes(measure_rank, arguments, nprocs=ulysses * ring, start_method="spawn")
        return max(results)


def measure_long_prompt(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure the peak of one process, and the largest peak of four that share the prompt."""
    options.prompt, options.n = options.long_prompt, 1
    found: dict[str, dict[str, float]] = {}
    for name in ("sp 4, ulysses 2 x ring 2", "sp 1"):
        start = time.perf_counter()
        mib = measure_mesh(*MESHES[name], folder, options)
        found[name] = {"peak_mib": round(mib, 1), "seconds": round(time.perf_counter() - start, 1)}
        print(f"{name}: {found[name]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--response", type=int, default=128, help="tokens per response")
    parser.add_argument("--n", type=int, default=8, help="number of responses")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds after a warm-up round")
    parser.add_argument("--long-prompt", type=int, metavar="TOKENS", help="measure a log-prob pass over it")
    options = parser.parse_args()
    os.environ |= {"PYTHONWARNINGS": "ignore", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # inherited by the ranks
    os.environ["MALLOC_MMAP_THRESHOLD_"] = (
        "65536"  # freed memory is returned at once, so that peaks show memory in use
    )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        proportions = LARGE if options.long_prompt else {}
        folder = Path(save_tiny_model(Path(directory) / "model", "qwen2", **proportions))
        if options.long_prompt:
            print(json.dumps({"tokens": options.long_prompt, **measure_long_prompt(folder, options)}))
            return
        sharing = measure_sharing(folder, options)
        print("shared and repeated prompts:", sharing, flush=True)
        saved: dict[str, dict[str, float]] = {}
        for name, (ulysses, ring) in MESHES.items():
            mib = measure_mesh(ulysses, ring, folder, options)
            alone = saved.get("sp 1", {"mib": mib})["mib"]
            saved[name] = {"mib": round(mib, 1), "of_linear": round(alone / mib / (ulysses * ring), 3)}
            print(f"{name}: {saved[name]}", flush=True)
    print(json.dumps({"sharing": sharing, "saved_activations": saved}))


if __name__ == "__main__":
    main()
