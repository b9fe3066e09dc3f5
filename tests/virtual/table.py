# SPDX-License-Identifier: Apache-2.0
"""Steps of published models on virtual clusters, as a table.

python -m tests.virtual.table [NAME ...]
"""

import sys

from tests.virtual.checks import problems
from tests.virtual.measure import Cluster
from tests.virtual.shapes import Setup, video

STEP = dict(updates=1, prompts=1)
PAIR = STEP | dict(images=(1,))
STEPS: dict[str, tuple[str, Setup, int]] = {
    "7B": ("7b", Setup(reference=True, **STEP), 8),
    "Mixture of 30B": ("30b-a3b", Setup(**STEP), 64),
    "72B, hybrid shards": ("72b", Setup(fsdp_size=64, optimizer="adamw_bf16", dtype="bf16", **STEP), 256),
    "VL 7B, images": ("vl-7b", Setup(**PAIR), 32),
    "14B, Ulysses 4 x ring 2": ("14b", Setup(ulysses=4, ring=2, **STEP), 64),
    "32B, adapters": ("32b", Setup(lora_rank=64, reference=True, **STEP), 16),
    "3B, fine-tuning": ("3b", Setup(fine_tuning=True, **STEP), 8),
    "0.5B, every role": (
        "0.5b",
        Setup(reference=True, critic=True, prime=True, reward_model=True, **STEP),
        8,
    ),
    "1.5B, Muon": ("1.5b", Setup(optimizer="muon", **STEP), 8),
    "7B, offloaded": ("7b", Setup(reference=True, offload=True, **STEP), 8),
    "7B, 1,024 ranks": ("7b", Setup(**STEP), 1024),
    "Mixture of 235B": ("235b-a22b", Setup(**STEP), 256),
    "Mixture of 671B": ("671b", Setup(expert_parallel=8, **STEP), 256),
    "Mixture of 1T": ("1t", Setup(expert_parallel=8, **STEP), 384),
    "VL 72B, images": ("vl-72b", Setup(**PAIR), 128),
    "72B, 1,024 ranks": ("72b", Setup(**STEP), 1024),
    **{
        f"LongVILA 7B, {frames:,} frames": ("longvila-7b", Setup(**video(frames)), 8)
        for frames in (64, 512, 1024, 3600)
    },
}
HEADER = """\
| step | ranks | peak, GiB | of the phase | operations, TFLOP | of frames | sent, GiB | seconds |
|---|---|---|---|---|---|---|---|"""
GIB = 1 << 30


def row(cluster: Cluster, name: str) -> str:
    shape, setup, ranks = STEPS[name]
    phases = cluster.measure(shape, setup, ranks)
    found = problems(phases)
    assert not found, found
    work = {name: phase for name, phase in phases.items() if name != "init_model"}
    largest = max(work, key=lambda name: work[name].peak)
    operations = sum(phase.total_flops for phase in work.values()) / 1e12
    sent = sum(phase.collective_bytes for phase in work.values()) / GIB
    of_frames = work["encode"].total_flops / 1e12 if "encode" in work else 0
    cells = (
        f"{work[largest].peak / GIB:.1f}", f"`{largest}`", f"{operations:,.0f}", f"{of_frames:,.0f}",
        f"{sent:,.0f}",
    )  # fmt: skip
    return f"| {name} | {ranks:,} | {' | '.join(cells)} | {cluster.seconds:.0f} |"


def main() -> None:
    print(HEADER)
    with Cluster() as cluster:
        for name in sys.argv[1:] or STEPS:
            print(row(cluster, name), flush=True)


if __name__ == "__main__":
    main()
