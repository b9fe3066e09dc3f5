# SPDX-License-Identifier: Apache-2.0
"""A part of `scripts/gpu_check.sh`: its options, its device and its problems."""

import argparse
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.report import Report
from verl.distributed.device import backend_of, is_gpu, set_device, synchronize

GB = 1e9
GIB = 2**30


@dataclass(frozen=True)
class Place:
    """The device of a part, and the kind of its problems."""

    device: torch.device
    tiny: bool
    models: Path  # folder for generated models, which parts share

    @property
    def is_gpu(self) -> bool:
        return is_gpu(self.device)

    @property
    def half(self) -> torch.dtype:
        """The dtype of training: bfloat16 on a GPU; float32 on the CPU, which has other kernels for it."""
        return torch.bfloat16 if self.is_gpu else torch.float32

    @property
    def tolerance(self) -> float:
        """Difference relative to the largest value that rounding explains."""
        return 2e-2 if self.is_gpu else 1e-5

    def random(self, *size: int, seed: int = 0, scale: float = 1.0) -> Tensor:
        """Normal numbers in `half`, the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(size, generator=generator) * scale).to(self.device, self.half)

    def model(self, name: str, family: str, **overrides: Any) -> Path:
        """Folder of a generated model, which is whole if it exists."""
        from verl.models.tiny import save_tiny_model  # noqa: PLC0415 - kernels need neither models nor tokenizers

        folder, new = self.models / name, self.models / f"{name}.new"
        if not folder.exists():
            shutil.rmtree(new, ignore_errors=True)  # of a part that was stopped
            save_tiny_model(new, family, **overrides).rename(folder)
        return folder

    def seconds(self, function: Callable[[], Any], repeats: int = 5) -> float:
        """Mean of several runs after a warm-up run."""
        if self.tiny:
            repeats = 1
        function()
        synchronize(self.device.type)
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        synchronize(self.device.type)
        return (time.perf_counter() - start) / repeats

    def allocated_gib(self) -> float:
        return torch.cuda.memory_allocated() / GIB if self.device.type == "cuda" else 0.0

    def free_gib(self) -> float:
        """Memory of the GPU that no program has taken; 0 on the CPU."""
        if self.device.type != "cuda":
            return 0.0
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0] / GIB


def token_log_probs(model: nn.Module, sequence: Tensor, prompt: int, temperature: float) -> Tensor:
    """Log-probs of a sequence's tokens after its prompt."""
    rows = torch.arange(prompt - 1, len(sequence) - 1, device=sequence.device)
    return model(
        input_ids=sequence[None],
        position_ids=torch.arange(len(sequence), device=sequence.device)[None],
        cu_seqlens=torch.tensor([0, len(sequence)], dtype=torch.int32),
        read=lambda logits: logits.log_probs(sequence[rows + 1], rows, temperature),
    ).log_probs


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Maximum over the pairs of the largest difference, relative to the largest expected value."""
    return max(
        float((one.float() - other.float()).abs().max() / other.float().abs().max())
        for one, other in zip(found, expected, strict=True)
    )


def run_part(
    description: str | None, work: Callable[[Report, Place, str], None], cases: Sequence[str]
) -> None:
    """Run a part's program: parse its options, join a process group of one rank, work."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="test that it runs, in seconds; also on CPU")
    parser.add_argument("--case", choices=cases, default=cases[0])
    parser.add_argument("--models", type=Path, required=True, help="folder for generated models")
    options = parser.parse_args()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", GLOO_SOCKET_IFNAME="lo")
    device = set_device(options.device, local_rank=0)
    torch.manual_seed(0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))  # the engine joins by these
    dist.init_process_group(backend_of(options.device).groups, store=store, rank=0, world_size=1)
    work(Report(), Place(device, options.tiny, options.models), options.case)
