# SPDX-License-Identifier: Apache-2.0
"""Planned and measured memory of models of different shapes, loaded and trained as by a worker.

    python3 benchmarks/memory_plan.py                  # one process
    python3 benchmarks/memory_plan.py --ranks 2        # sharded over two processes
    python3 benchmarks/memory_plan.py --keep-freed     # glibc's default behavior
    python3 benchmarks/memory_plan.py --sft            # supervised fine-tuning
    python3 benchmarks/memory_plan.py --sft --lora 16  # with adapters
    python3 benchmarks/memory_plan.py --start          # the first rank's start, above its shard
    python3 benchmarks/memory_plan.py --pictures       # starts of both ranks of a diffusion run

Prints the peak resident memory minus that of the process without a model. With two ranks it is the memory of
the first rank, which also reads the files.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
import torch
from step import MODEL

from examples.quickstart.tiny_pipelines import save_tiny_sd3
from tests.helpers.fp8_files import save_in_fp8
from tests.helpers.memory import PPO, SFT, SHAPES, Rows, make_case, measure_phases, planned_phases
from tests.helpers.picture_memory import measure_picture_starts, save_larger_sd3
from tests.helpers.start_memory import RANKS, measure_start, save_as_published
from tests.virtual.shapes import SHAPES as PUBLISHED
from verl.config.files.fp8_files import is_in_fp8
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig
from verl.models.tiny import save_tiny_model
from verl.planning.memory_model import reading
from verl.planning.model_sizes import read_shape

MIB = 1 << 20
WORDS = 4096  # of the vocabulary, which is not what is measured
LAYERS = {"7b": 2, "30b-a3b": 1}
# The last one, the model of `step.py`, was not used to calibrate any formula.
MODELS: dict[str, dict[str, Any]] = SHAPES | {"step": MODEL}


def main() -> None:
    """Measure each shape with and without gradient checkpointing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--keep-freed", action="store_true", help="let the allocator keep freed memory")
    parser.add_argument("--shapes", nargs="*", choices=MODELS, default=list(SHAPES))
    parser.add_argument("--sft", action="store_true", help="supervised fine-tuning instead of GRPO")
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapters; 0 trains all weights")
    parser.add_argument("--start", action="store_true", help="read one layer of 30B-A3B and two of 7B")
    parser.add_argument("--pictures", action="store_true", help="start a Stable Diffusion 3 of 280 MiB")
    arguments = parser.parse_args()
    if arguments.pictures:
        measure_pictures()
        return
    if arguments.start:
        measure_starts()
        return
    out, ranks, kind = sys.stdout.write, arguments.ranks, SFT if arguments.sft else PPO
    out(f"{'model':12}{'checkpointing':15}{'phase':14}{'planned MiB':>12}{'measured MiB':>14}{'ratio':>8}\n")
    for name in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            model = save_tiny_model(folder, "qwen2", **MODELS[name])
            cases = [
                make_case(kind, model, Rows(), checkpointing=on, world_size=ranks, rank=arguments.lora)
                for on in (True, False)
            ]
            measured = measure_phases(cases, ranks, keeps_freed=arguments.keep_freed)
            for case, peaks in zip(cases, measured, strict=True):
                planned = planned_phases(case, ranks)
                is_on = "on" if case.actor.model.enable_gradient_checkpointing else "off"
                for phase in kind.phases:
                    plan, peak = planned[phase] / MIB, peaks[phase] / MIB
                    out(f"{name:12}{is_on:15}{phase:14}{plan:12.0f}{peak:14.0f}{plan / peak:8.2f}\n")


def measure_starts() -> None:
    """Measure starts of two ranks with layers of published sizes, and print MiB of the first one."""
    sys.stdout.write(
        f"{'model':10}{'stored in':>10}{'kept in':>8}{'shard':>8}"
        f"{'reads, planned':>16}{'measured':>10}{'ratio':>8}\n"
    )
    for name, layers in LAYERS.items():
        kind, fields = PUBLISHED[name]
        with tempfile.TemporaryDirectory() as folder:
            tiny = save_tiny_model(Path(folder) / "tiny", kind)
            sizes = fields | {"num_hidden_layers": layers, "vocab_size": WORDS}
            path = save_as_published(Path(folder) / name, kind, **sizes)
            model = ModelConfig(model_path=str(path))
            for stored, dtype in itertools.product(("bf16", "fp8"), ("fp32", "bf16")):
                if stored == "fp8" and not is_in_fp8(str(path)):
                    save_in_fp8(path)
                fsdp = FSDPConfig(torch_dtype=dtype)
                shape = read_shape(model, fsdp, option="worker.actor.model", is_trained=True)
                shard, reads = shape.stored / RANKS / MIB, reading(shape) / MIB
                above, held = (size / MIB for size in measure_start(model, fsdp, tiny))
                cells = f"{shard:8.0f}{reads:16.0f}{above:10.0f}{(shard + reads) / (held + above):8.2f}"
                sys.stdout.write(f"{name:10}{stored:>10}{dtype:>8}{cells}\n")


def measure_pictures() -> None:
    """Print private MiB of two ranks above their shards: at most in a start, after it, after use."""
    sys.stdout.write(
        f"{'stored in':12}{'trained':>10}{'rank':>6}{'shard':>8}{'peak':>8}{'held':>8}{'used':>8}\n"
    )
    trained = {
        "weights": LoraConfig(),
        "adapters": LoraConfig(rank=4),
        "DoRA": LoraConfig(rank=4, use_dora=True),
    }
    for dtype in (torch.bfloat16, torch.float16):
        with tempfile.TemporaryDirectory() as name:
            tiny, folder = save_tiny_sd3(Path(name) / "tiny"), save_larger_sd3(Path(name) / "larger", dtype)
            for rank, starts in enumerate(measure_picture_starts(folder, tiny, list(trained.values()))):
                for kind, start in zip(trained, starts, strict=True):
                    sizes = "".join(f"{size / MIB:8.0f}" for size in start)
                    sys.stdout.write(f"{str(dtype)[6:]:12}{kind:>10}{rank:6}{sizes}\n")


if __name__ == "__main__":
    main()
