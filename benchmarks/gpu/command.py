# SPDX-License-Identifier: Apache-2.0
"""A whole run of the command on a tiny model: one process, three steps, a validation with top-p.

python -m benchmarks.gpu.command --models FOLDER [--tiny --device cpu]
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
from benchmarks.gpu.part import Place, Report, run_part
from verl.logger.file import read_log
from verl.models.tiny import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
QUESTIONS = ("Which color has the red circle?", "Which color has the blue square?")
STEPS = 3
FIGURES = {  # of the last step
    "step_s": "timing_s/step",
    "gen_s": "timing_s/gen",
    "sync_weights_s": "timing_s/sync_weights",
    "update_actor_s": "timing_s/update_actor",
    "log_probs_difference": "rollout/log_probs_diff_mean",
    "max_memory_allocated_gb": "perf/max_memory_allocated_gb",
    "max_memory_reserved_gb": "perf/max_memory_reserved_gb",
}


def arguments(place: Place, folder: Path) -> list[str]:
    data = folder / "questions.jsonl"
    rows = [{"problem": QUESTIONS[number % 2], "answer": ("red", "blue")[number % 2]} for number in range(8)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    model = save_tiny_model(folder / "model", "qwen2")
    dtype = "bf16" if place.is_gpu else "fp32"
    return [
        f"config={QUICKSTART / 'demo.yaml'}",
        f"data.train_files={data}", f"data.val_files={data}", "data.image_key=null",
        "data.rollout_batch_size=4", "data.max_response_length=16", "data.val_batch_size=-1",
        "data.num_workers=0",
        f"worker.actor.model.model_path={model}",
        "worker.actor.global_batch_size=2", "worker.actor.micro_batch_size_per_device_for_update=4",
        "worker.actor.micro_batch_size_per_device_for_experience=4",
        "worker.actor.offload.offload_params=true", "worker.actor.offload.offload_optimizer=true",
        f"worker.actor.fsdp.mp_param_dtype={dtype}", f"worker.rollout.dtype={dtype}",
        "worker.rollout.n=4", "worker.rollout.gpu_memory_utilization=0.3",
        "worker.rollout.val_override_config={temperature: 0.6, top_p: 0.95, n: 1}",
        "algorithm.disable_kl=false", "algorithm.use_kl_loss=true",
        f"worker.reward.reward_function={QUICKSTART / 'reward.py'}:compute_score",
        f"trainer.device={place.device.type}", "trainer.n_gpus_per_node=1", f"trainer.max_steps={STEPS}",
        "trainer.val_freq=2", "trainer.logger=[file]", f"trainer.save_checkpoint_path={folder / 'run'}",
    ]  # fmt: skip


def tiny_run(report: Report, place: Place) -> None:
    """Every step trains, and the engine agrees with the trainer."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        started = time.perf_counter()
        command = [sys.executable, "-m", "verl.trainer.main", *arguments(place, folder)]
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if finished.returncode:
            raise RuntimeError(f"exit status {finished.returncode}: {finished.stderr[-3000:]}")
        report.figure("run_s", time.perf_counter() - started)
        metrics = {entry["step"]: entry for entry in read_log(folder / "run")}
    for step in range(1, STEPS + 1):
        found = metrics[step]
        report.holds(f"the gradient of step {step} is finite", math.isfinite(found["actor/grad_norm"]))
        difference = found["rollout/log_probs_diff_mean"]
        report.at_most(f"log_probs_difference of step {step}", difference, 0.05 if place.is_gpu else 1e-4)
    for name, metric in FIGURES.items():
        report.figure(name, metrics[STEPS][metric])


def work(report: Report, place: Place, case: str) -> None:
    report.attempt(tiny_run, place)


if __name__ == "__main__":
    run_part(__doc__, work, ("all",))
