# SPDX-License-Identifier: Apache-2.0
"""An hour of video through the whole system, and a row of it as long as 256k tokens, on CPU with a tiny VILA.

    python benchmarks/hour.py frames [--frames 3600] [--steps 6]
    python benchmarks/hour.py tokens [--tokens 262144] [--frames 3600]

`frames` trains on real encoded files of one hour: decoding, vision tower, sampling with vLLM, log-probs of
the policy and of a reference, and updates, in two processes that share each sequence (Ulysses). It prints the
peak memory of every process after each step, and fails if one still rises after an epoch or is above the
limit, or if more media were encoded than there are prompts.

`tokens` runs the log-probs of one row, forward and backward, in one process and in four (Ulysses x ring), and
compares their gradients and how far the pass raises the peak memory of a process. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
import numpy as np
import psutil
import torch
import torch.distributed as dist
from long import peak_mib
from soak import finished_steps, role_of
from video import FPS, repeat, save_minute

from tests.helpers.distributed import run_distributed
from tests.helpers.families import Clip, open_tiny
from tests.helpers.family_training import batch_of, load_model
from verl.distributed.sequence_parallel import SequenceParallel
from verl.logger.file import METRICS_FILE, read_log
from verl.models.tiny import TINY_MODELS, save_tiny_model
from verl.protocol import DataProto
from verl.workers.packing.forward import PackedForward

QUICKSTART = ROOT / "examples" / "quickstart"
MIB = 1 << 20
PROMPTS, HOURS = 2, 4  # in a step, and in an epoch
MOST_MIB = 4096  # of a process
MOST_RISE = 1.05  # of a peak, after the first epoch
JUDGED = ("controller", "worker", "worker 2", "media reader", "loader")
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
RESPONSE = 128  # tokens
TIMEOUT_S = 3600.0
SMALL = 2000  # tokens of a first pass that loads kernels and opens connections
MESHES = {"4 processes, ulysses 2 x ring 2": (2, 2), "1 process": (1, 1)}


# --- frames


def write_rows(folder: Path) -> None:
    """Write the model, four hours of video and a question about each."""
    save_tiny_model(folder / "model", "vila", max_position_embeddings=1 << 16)
    rows = []
    for number in range(HOURS):
        minute, hour = folder / f"minute_{number}.mp4", folder / f"hour_{number}.mp4"
        save_minute(minute, (2 + number) * FPS, 128, 96)
        repeat(minute, hour, 60)
        rows.append({"problem": "<video>What colour is the shape?", "answer": "red", "videos": [hour.name]})
    for name in ("train", "val"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def command(folder: Path, frames: int, steps: int) -> list[str]:
    """Return the command of the run: a frame has four tokens and a newline."""
    length = 5 * frames + 64
    return [
        sys.executable, "-m", "verl.trainer.main", f"config={QUICKSTART / 'demo.yaml'}",
        f"data.train_files={folder / 'train.jsonl'}", f"data.val_files={folder / 'val.jsonl'}",
        "data.video_key=videos", f"data.video_dir={folder}", f"data.max_prompt_length={length}",
        "data.max_response_length=8", f"data.rollout_batch_size={PROMPTS}",
        "algorithm.disable_kl=false", "algorithm.use_kl_loss=true",
        f"worker.actor.model.model_path={folder / 'model'}", "worker.actor.model.freeze_vision_tower=true",
        "worker.actor.model.enable_gradient_checkpointing=true", "worker.actor.ulysses_size=2",
        "worker.actor.divide_short_sequences=true", "worker.actor.global_batch_size=1",
        "worker.actor.micro_batch_size_per_device_for_update=2",
        "worker.actor.micro_batch_size_per_device_for_experience=2",
        "worker.rollout.n=2", "worker.rollout.tensor_parallel_size=2",
        f"worker.rollout.num_video_frames={frames}", f"worker.rollout.max_num_batched_tokens={length + 8}",
        f"worker.reward.reward_function={QUICKSTART / 'reward.py'}:compute_score",
        "trainer.logger=[file]", "trainer.val_before_train=false", "trainer.val_freq=-1",
        f"trainer.max_steps={steps}", f"trainer.save_checkpoint_path={folder / 'out'}",
        "trainer.find_last_checkpoint=false",
    ]  # fmt: skip


def peaks(controller: int) -> dict[str, float]:
    """Return the MiB of the largest memory that each process of a run has had, by role."""
    root, found, number = psutil.Process(controller), {}, Counter()
    for process in sorted([root, *root.children(recursive=True)], key=lambda each: each.pid):
        try:
            role = role_of(process, controller)
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
        number[role] += 1
        high = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        found[f"{role} {number[role]}" if number[role] > 1 else role] = int(high.split()[1]) / 1024
    return found


def measure_frames(folder: Path, frames: int, steps: int) -> dict[str, Any]:
    """Train, and return the peaks after each step with the metrics that count media and time."""
    write_rows(folder)
    log = folder / "run.log"
    with log.open("w") as file:
        run = subprocess.Popen(
            command(folder, frames, steps), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        seen = {step: peaks(run.pid) for step in finished_steps(run, folder / "out" / METRICS_FILE)}
    finally:
        run.terminate()  # no effect on a finished run
        code = run.wait()
    if code:
        raise RuntimeError(f"the run ended with exit status {code}:\n{log.read_text()[-4000:]}")
    metrics = {entry["step"]: entry for entry in read_log(folder / "out")}
    parts = ("encode", "gen", "old", "ref", "update_actor", "step")
    return {
        "frames": frames,
        "tokens": round(metrics[1]["prompt_length/mean"]),
        "peaks_mib": {step: {name: round(one) for name, one in each.items()} for step, each in seen.items()},
        "encoded_media": [metrics[step]["perf/encoded_media"] for step in range(1, steps + 1)],
        "mismatch": max(metrics[step]["rollout/log_probs_diff_max"] for step in range(1, steps + 1)),
        "seconds": {
            step: {part: round(metrics[step].get(f"timing_s/{part}", 0.0), 1) for part in parts}
            for step in range(1, steps + 1)
        },
    }


def broken_laws(found: dict[str, Any]) -> list[str]:
    """Describe what is exceeded."""
    steps = sorted(step for step in found["peaks_mib"] if step > 0)
    epoch = HOURS // PROMPTS
    first, last = (found["peaks_mib"][step] for step in (steps[epoch], steps[-1]))
    problems = [f"{name} had {last[name]} MiB" for name in last if last[name] > MOST_MIB]
    problems += [
        f"{name} rose from {first[name]} to {last[name]} MiB"
        for name in JUDGED
        if name in first and name in last and last[name] > MOST_RISE * first[name]
    ]
    if found["encoded_media"] != [PROMPTS] * epoch + [0] * (len(found["encoded_media"]) - epoch):
        problems.append(f"media encoded in each step: {found['encoded_media']}")
    return problems


# --- tokens


def row_of(folder: Path, frames: int, tokens: int) -> tuple[DataProto, Any]:
    """Build a row of a film, of text up to a number of tokens, and of a response; return it and its media."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (frames, 56, 56, 3), dtype=np.uint8)
    meta = {
        "total_num_frames": frames, "fps": 1.0, "duration": float(frames),
        "frames_indices": list(range(frames)), "video_backend": "pyav", "do_sample_frames": False,
    }  # fmt: skip
    tiny = open_tiny(folder)
    film = len(tiny.family.video_shape(tiny.processor, frames, 56, 56, meta).tokens)
    text = "red " * ((tokens - film - RESPONSE) // len(tiny.processor.encode("red ")))
    return batch_of(tiny, [([Clip(pixels, meta), text], (RESPONSE,))])


def pass_of_rank(
    rank: int, world_size: int, folder: Path, ulysses: int, ring: int, frames: int, tokens: int
) -> dict[str, Any]:
    """Run forward and backward of a row on one rank; return its peak and the gradients of all ranks."""
    sp = SequenceParallel.build(ulysses, ring)
    found: dict[str, Any] = {}
    for length, count in ((SMALL, 8), (tokens, frames)):
        tiny = open_tiny(folder)
        model = load_model(tiny, prepared=True)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        batch, held = row_of(folder, count, length)
        forward = PackedForward(model, held, share_prompt=True, sp=sp)
        start = time.perf_counter()
        found["peak_mib"] = peak_mib(Training(forward), batch)
        found["seconds"] = time.perf_counter() - start
        found["tokens"] = int(batch.batch["attention_mask"].sum())
    gradients: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(total)
        gradients[name] = total.double().numpy()
    return found | ({"gradients": gradients} if rank == 0 else {})


class Training:
    """A log-prob pass with its backward pass, for `peak_mib`."""

    def __init__(self, forward: PackedForward) -> None:
        self.forward, self.model = forward, forward.model

    def log_probs(self, batch: DataProto, temperature: float) -> None:
        """Run forward and backward."""
        with torch.enable_grad():
            self.forward.log_probs(batch, temperature).log_probs.sum().backward()


def measure_tokens(folder: Path, frames: int, tokens: int) -> dict[str, Any]:
    """Compare one process with four."""
    tiny = TINY_MODELS["vila"]
    assert tiny.vision is not None, "it reads videos"
    # 8 x 8 patches, each of them a feature
    fine = replace(tiny, vision={**tiny.vision, "patch_size": 7}, options={"projector_type": "linear"})
    TINY_MODELS["vila_fine"] = fine
    save_tiny_model(folder, "vila_fine", **LAYERS)
    found: dict[str, Any] = {}
    gradients: list[dict[str, np.ndarray]] = []
    for name, (ulysses, ring) in MESHES.items():
        arguments = folder, ulysses, ring, frames, tokens
        ranks = run_distributed(pass_of_rank, ulysses * ring, *arguments, timeout_s=TIMEOUT_S)
        gradients.append(ranks[0]["gradients"])
        found[name] = {
            "tokens": ranks[0]["tokens"],
            "peak_mib": round(max(rank["peak_mib"] for rank in ranks)),
            "seconds": round(max(rank["seconds"] for rank in ranks)),
        }
        print(f"{name}: {found[name]}", flush=True)
    four, one = gradients
    apart = sum(np.square(four[name] - one[name]).sum() for name in one)
    size = sum(np.square(one[name]).sum() for name in one)
    found["gradient_error"] = float((apart / size) ** 0.5)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("frames", "tokens"))
    parser.add_argument("--frames", type=int, default=3600, help="of a video")
    parser.add_argument("--steps", type=int, default=6, help="of the run; an epoch has two")
    parser.add_argument("--tokens", type=int, default=1 << 18, help="of the row")
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed memory is returned: peaks show memory in use
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        if options.part == "tokens":
            print(json.dumps(measure_tokens(folder / "model", options.frames, options.tokens)))
            return 0
        found = measure_frames(folder, options.frames, options.steps)
    problems = broken_laws(found)
    for problem in problems:
        print(problem)
    print(json.dumps(found | {"problems": problems}))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
