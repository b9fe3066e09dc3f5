# SPDX-License-Identifier: Apache-2.0
"""Time that a checkpoint costs: written in the background (`trainer.async_save`) or waited for.

    python3 benchmarks/checkpoints.py --million 100

Two processes hold a sharded model of that many weights and its optimizer. The benchmark prints the seconds
for which training is paused, and the seconds until the checkpoint is complete. Until then, the copy for a
background write takes as much memory as the state.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
from tests.helpers.distributed import run_distributed
from verl.checkpoint.sharded import AsyncWriter, load_shards, take_snapshot
from verl.distributed.fsdp import make_mesh

WIDTH = 1024  # a layer has 2**20 weights


def make_model(millions: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build sharded layers with a million weights each, and an optimizer with its moments."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(millions)))
    for layer in model:
        fully_shard(layer, mesh=make_mesh(dist.get_world_size(), -1, "cpu"))
    fully_shard(model, mesh=make_mesh(dist.get_world_size(), -1, "cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def measure(rank: int, world_size: int, target: Path, millions: int, repeats: int) -> list[dict[str, float]]:
    """Save, alternating between both ways, and load each checkpoint."""
    model, optimizer = make_model(millions)
    writer, found = AsyncWriter(), []
    for number in range(2 * repeats):
        copies, folder = number % 2 == 0, target / str(number)
        start = time.perf_counter()
        writer.start(folder, {"actor": take_snapshot(model, optimizer, copies=copies)})
        handed_over = time.perf_counter() - start
        problem = writer.finish()
        written = time.perf_counter() - start
        assert problem is None, problem
        start = time.perf_counter()
        load_shards(folder / "actor", model, optimizer)
        loaded = time.perf_counter() - start
        held = handed_over if copies else written
        found.append({"copies": copies, "held": held, "written": written, "loaded": loaded})
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--million", type=int, default=50, help="weights, in millions")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run_distributed(measure, 2, Path(folder), arguments.million, arguments.repeats)[0]
    state = arguments.million * 2**20 * 12 / 2**20  # float32 weights and two moments
    out = sys.stdout.write
    out(f"{arguments.million} M weights with optimizer: {state:.0f} MiB on two processes; medians\n")
    for copies, name in ((True, "in the background"), (False, "waited for")):
        rows = [row for row in found if row["copies"] is copies]
        medians = {key: statistics.median(row[key] for row in rows) for key in ("held", "written", "loaded")}
        out(
            f"{name:20} training paused {medians['held']:6.2f} s   complete after {medians['written']:6.2f} s"
            f"   loaded in {medians['loaded']:6.2f} s\n"
        )


if __name__ == "__main__":
    main()
