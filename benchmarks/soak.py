# SPDX-License-Identifier: Apache-2.0
"""Check a long run for growth of memory, object store, descriptors, threads and processes.

    python benchmarks/soak.py [--steps 200] [--warmup 50] [--rows 120] [--json FILE] [a.b=c ...]

A real run of the trainer on CPU with two worker processes, each with its vLLM engine, a reference in bf16, a
reward process and a loader. Model and questions are those of the quickstart, with zero to two images of
random size, prompts of random length, and responses of at most 16 tokens. The run saves every 20 steps and
validates every 40. All rows are seen within the warm-up, so that later growth does not come from the data.

All values are read after every step from outside the processes (`/proc`). The heap of a process is its
anonymous memory. Mapped files and shared memory (media cache, object store) are counted separately: they have
their own bound, or the kernel can reclaim them. Growth is the median of the slopes between all pairs of steps
after the warm-up (Theil-Sen), which is robust to outliers. The limits are the constants of this file; the
last line of the output is JSON, and the exit status is 1 if a limit is exceeded.
"""

import argparse
import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
from verl.data.media.cache import PREFIX, SHARED_MEMORY
from verl.logger.file import METRICS_FILE
from verl.models.tiny import save_tiny_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
QUICKSTART = ROOT / "examples" / "quickstart"
FOLDER = ROOT / "outputs" / "soak"
MIB = 1 << 20

# Limits after the warm-up. In addition, descriptors, threads and processes must not keep rising.
MAX_GROWTH = 4 * MIB  # of a heap or of the media cache in 100 steps, or
MAX_GROWTH_SHARE = 0.02  # this fraction of it, whichever is larger
MAX_GCS_GROWTH = 10 * MIB  # of Ray's `gcs_server`, which stores up to 100,000 calls
MAX_OBJECT_STORE = 64 * MIB  # a step's batch takes one MiB; batches that are not freed add up

JUDGED = ("controller", "worker", "worker 2", "reward", "loader", "raylet")  # must exist in every step

POLL_S = 0.05  # interval of polling the log; a step takes about a second
BATCH = 8  # prompts in a step
FILLER = ("Let", "me", "think", "step", "by", "First", "we", "add", "the", "numbers", "then")
OPTIONS = (
    f"data.rollout_batch_size={BATCH}",
    "data.val_batch_size=16",
    "data.max_prompt_length=320",
    "data.max_response_length=16",
    "algorithm.disable_kl=false",
    "algorithm.use_kl_loss=true",
    "worker.actor.global_batch_size=4",
    "worker.actor.micro_batch_size_per_device_for_update=8",
    "worker.actor.micro_batch_size_per_device_for_experience=8",
    "worker.actor.optim.lr=1e-4",
    "worker.actor.optim.lr_scheduler_type=constant",
    "worker.rollout.n=8",
    "worker.rollout.limit_images=2",
    f"worker.reward.reward_function={QUICKSTART / 'reward.py'}:compute_score",
    "trainer.logger=[file]",
    "trainer.save_freq=20",
    "trainer.save_limit=2",
    "trainer.val_freq=40",
    "trainer.find_last_checkpoint=false",
)


class Usage(NamedTuple):
    """Resources of one process: bytes, then counts."""

    heap: int  # anonymous memory, including swap and pages shared with a forked child
    shared: int  # mapped shared memory
    rss: int
    uss: int  # memory that no other process shares
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Sample:
    """Resources of the run at the end of a step."""

    step: int  # the last step in the log
    processes: dict[str, Usage]  # by role, numbered if several have the same: `worker 2`
    object_store: int  # bytes of Ray's shared memory that were written to and not released
    media_cache: int  # bytes


Points = Sequence[tuple[int, float]]  # (step, value) in the order of steps


def prepare(folder: Path, rows: int) -> None:
    """Write the random model, `rows` training questions and 32 held-out ones."""
    save_tiny_model(folder / "model", "qwen2_5_vl")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, count in (("train", rows), ("val", 32)):
        rng = random.Random(name)
        lines = [json.dumps(question(rng, folder / "images", f"{name}_{row}")) for row in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def question(rng: random.Random, images: Path, name: str) -> dict[str, Any]:
    """Build a row of random length, with zero, one or two images of random size."""
    shapes = runpy.run_path(str(QUICKSTART / "shapes.py"))
    color, shape = rng.choice(list(shapes["COLORS"])), rng.choice(shapes["SHAPES"])
    files = [f"{name}_{number}.png" for number in range(rng.choice((0, 1, 1, 2)))]
    for file in files:
        size = (rng.randint(28, 280), rng.randint(28, 280))
        shapes["draw"](rng, color, shape).resize(size).save(images / file)
    words = " ".join(rng.choices(FILLER, k=rng.randint(0, 40)))
    text = f"{'<image>' * len(files)}{words} What colour is the {shape}?"
    return {"problem": text, "answer": color, "images": files}


def soak(folder: Path, steps: int, rows: int, overrides: Sequence[str]) -> list[Sample]:
    """Run the trainer in the empty `folder` and return a sample of each step except the last."""
    prepare(folder, rows)
    output, log = folder / "checkpoints", folder / "run.log"
    command = [
        sys.executable, "-m", "verl.trainer.main", f"config={QUICKSTART / 'demo.yaml'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'val.jsonl'}",
        f"data.image_dir={folder / 'images'}",
        f"worker.actor.model.model_path={folder / 'model'}",
        f"trainer.save_checkpoint_path={output}",
        f"trainer.max_steps={steps}",
        *OPTIONS,
        *overrides,
    ]  # fmt: skip
    with log.open("w") as file:
        run = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    try:
        samples = [take_sample(run.pid, step) for step in finished_steps(run, output / METRICS_FILE)]
    finally:
        run.terminate()  # no effect on a finished run
        code = run.wait()
    if code:
        raise RuntimeError(f"the run ended with exit status {code}:\n{log.read_text()[-4000:]}")
    return [sample for sample in samples if 0 < sample.step < steps]  # after the last step the run shuts down


def finished_steps(run: subprocess.Popen, log: Path) -> Iterator[int]:
    """Yield the number of each new step in the log until the run ends."""
    seen = -1
    while run.poll() is None:
        time.sleep(POLL_S)
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        step = json.loads(lines[-1])["step"] if lines else seen
        if step != seen:
            seen = step
            yield step


def take_sample(controller: int, step: int) -> Sample:
    """Read the current resources of a run's processes."""
    root = psutil.Process(controller)
    usages: dict[str, Usage] = {}
    number: Counter[str] = Counter()
    object_store = 0
    for process in sorted([root, *root.children(recursive=True)], key=lambda process: process.pid):
        try:
            role, usage = role_of(process, controller), usage_of(process)
            object_store += plasma_bytes(process.pid) if role == "raylet" else 0
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
        number[role] += 1
        usages[f"{role} {number[role]}" if number[role] > 1 else role] = usage
    return Sample(step, usages, object_store, media_cache_bytes(controller))


def role_of(process: psutil.Process, controller: int) -> str:
    """Return the role of a process, as shown in the table."""
    command = process.cmdline() or [process.name()]
    scripts = [Path(part).name for part in command if part.endswith(".py")]
    if process.pid == controller:
        return "controller"
    if command[0].startswith("ray::WorkerProcess"):
        return "worker"
    if "verl.rewards.worker_process" in " ".join(command):
        return "reward"
    if "resource_tracker" in command[-1]:
        return "resource tracker"
    if process.name() == "pt_data_worker":
        return "loader" if process.ppid() == controller else "media reader"
    return scripts[0] if command[0].endswith("python") and scripts else Path(command[0]).name


def usage_of(process: psutil.Process) -> Usage:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)

    def size(name: str) -> int:
        return 1024 * int(status[name].split()[0])

    return Usage(
        heap=size("RssAnon") + size("VmSwap"),
        shared=size("RssShmem"),
        rss=size("VmRSS"),
        uss=process.memory_full_info().uss,
        descriptors=process.num_fds(),
        threads=int(status["Threads"]),
    )


def plasma_bytes(raylet: int) -> int:
    """Return the bytes that a raylet's object store uses."""
    # Its file is unnamed, and sparse: its size is the limit of the store, only its blocks are in use.
    files = Path(f"/proc/{raylet}/fd").iterdir()
    return sum(512 * file.stat().st_blocks for file in files if "/plasma" in os.readlink(file))


def media_cache_bytes(controller: int) -> int:
    roots = (SHARED_MEMORY, Path(tempfile.gettempdir()))
    folders = [folder for root in roots for folder in root.glob(f"{PREFIX}-{os.getuid()}-{controller}-*")]
    files = [file for folder in folders for file in folder.rglob("*.safetensors")]
    return sum(file.stat().st_size for file in files)


def slope(points: Points) -> float:
    """Return the growth per step: the median of the slopes between all pairs of points (Theil-Sen)."""
    return median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))


def thirds(points: Points) -> list[list[float]]:
    """Split the values into the first, the middle and the last third of the steps."""
    values, size = [value for _, value in points], -(-len(points) // 3)
    return [values[:size], values[size:-size], values[-size:]]


def ends(points: Points) -> tuple[float, float]:
    """Return the medians of the first and of the last third."""
    first, _, last = thirds(points)
    return median(first), median(last)


def keeps_rising(points: Points) -> bool:
    """Check whether a number rises from third to third, and the last third lies entirely above the first.

    False for a value that fluctuates around one level, and for a pool that once starts another thread.
    """
    first, middle, last = thirds(points)
    return median(first) < median(middle) < median(last) and min(last) > max(first)


def lasting(samples: Sequence[Sample]) -> list[str]:
    """Return the names of the processes that exist in all samples, in the order of the first."""
    return [name for name in samples[0].processes if all(name in sample.processes for sample in samples)]


def points_of(samples: Sequence[Sample], name: str, field: str) -> Points:
    return [(sample.step, getattr(sample.processes[name], field)) for sample in samples]


def broken_laws(samples: Sequence[Sample]) -> list[str]:
    """Describe the exceeded limits, for samples after the warm-up; an empty list means success."""
    found = [f"{name}: not there in every step" for name in JUDGED if name not in lasting(samples)]
    for name in lasting(samples):
        allowed = MAX_GCS_GROWTH if name == "gcs_server" else MAX_GROWTH
        found += unbounded(f"{name}: heap", points_of(samples, name, "heap"), allowed)
        for field in ("descriptors", "threads"):
            found += risen(f"{name}: {field}", points_of(samples, name, field))
    found += risen("processes", [(sample.step, len(sample.processes)) for sample in samples])
    found += unbounded("media cache", [(sample.step, sample.media_cache) for sample in samples])
    most = max(sample.object_store for sample in samples)
    if most > MAX_OBJECT_STORE:
        found.append(f"object store: {most / MIB:.1f} MiB, at most {MAX_OBJECT_STORE / MIB:.0f} are allowed")
    return found


def unbounded(what: str, points: Points, allowed: float = MAX_GROWTH) -> list[str]:
    """Return a sentence if memory grows in 100 steps by more than both limits."""
    growth, allowed = 100 * slope(points), max(allowed, MAX_GROWTH_SHARE * ends(points)[0])
    if growth <= allowed:
        return []
    return [f"{what} grew by {growth / MIB:.1f} MiB in 100 steps, at most {allowed / MIB:.1f} are allowed"]


def risen(what: str, points: Points) -> list[str]:
    """Return a sentence if a number keeps rising."""
    if not keeps_rising(points):
        return []
    return ["{} rose from {:.0f} to {:.0f}".format(what, *ends(points))]


def table(samples: Sequence[Sample]) -> list[str]:
    """Build a row for each lasting process and for shared memory: MiB, growth in 100 steps, counts."""
    rows = ["| | heap at first | at last | growth | shared | rss | uss | descriptors | threads |"]
    rows.append("|---" * 9 + "|")
    for name in lasting(samples):
        heap = points_of(samples, name, "heap")
        last = [ends(points_of(samples, name, field))[1] / MIB for field in ("shared", "rss", "uss")]
        counts = [ends(points_of(samples, name, field)) for field in ("descriptors", "threads")]
        numbers = [f"{value / MIB:.1f}" for value in ends(heap)] + [f"{100 * slope(heap) / MIB:+.2f}"]
        numbers += [f"{value:.0f}" for value in last] + ["{:.0f} to {:.0f}".format(*pair) for pair in counts]
        rows.append(f"| {name} | {' | '.join(numbers)} |")
    for name in ("object_store", "media_cache"):
        points = [(sample.step, getattr(sample, name)) for sample in samples]
        numbers = [f"{value / MIB:.1f}" for value in ends(points)] + [f"{100 * slope(points) / MIB:+.2f}"]
        rows.append(f"| {name.replace('_', ' ')} | {' | '.join(numbers)} | | | | | |")
    return rows


def save(samples: Sequence[Sample], path: Path) -> None:
    """Write the samples as a JSON list."""
    entries = [
        vars(sample) | {"processes": {name: usage._asdict() for name, usage in sample.processes.items()}}
        for sample in samples
    ]
    path.write_text(json.dumps(entries))


def main() -> int:
    """Run, print the table and the exceeded limits; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of the run")
    parser.add_argument("--warmup", type=int, default=50, help="first steps, which no limit applies to")
    parser.add_argument("--rows", type=int, default=120, help=f"training rows; a step takes {BATCH}")
    parser.add_argument("--json", type=Path, help="file for all samples, including the warm-up")
    arguments, overrides = parser.parse_known_args()

    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        samples = soak(Path(folder), arguments.steps, arguments.rows, overrides)
    if arguments.json:
        save(samples, arguments.json)
    judged = [sample for sample in samples if sample.step > arguments.warmup]
    problems = broken_laws(judged)
    print("\n".join([*table(judged), "", *problems]))
    print(json.dumps({"steps": arguments.steps, "judged": len(judged), "problems": problems}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
