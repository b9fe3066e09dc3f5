# SPDX-License-Identifier: Apache-2.0
"""A whole run of the command in one process: a tiny vision-language model with random weights learns colors.

    python -m benchmarks.gpu.command --case steps --models FOLDER [--tiny --device cpu]

| case | run |
|---|---|
| steps | three steps that use many options: offloading, a reference, mini batches, a validation with top-p |
| learning | the quickstart, until the model names the colors of shapes in held-out images |
"""

import math
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
from benchmarks.gpu.part import Place, Report, run_part
from verl.logger.file import read_log
from verl.models.tiny import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
STEPS = (
    "data.rollout_batch_size=4", "data.max_response_length=16",
    "worker.actor.global_batch_size=2", "worker.actor.micro_batch_size_per_device_for_update=4",
    "worker.actor.micro_batch_size_per_device_for_experience=4",
    "worker.actor.offload.offload_params=true", "worker.actor.offload.offload_optimizer=true",
    "worker.rollout.n=4", "worker.rollout.val_override_config={temperature: 0.6, top_p: 0.95, n: 1}",
    "algorithm.disable_kl=false", "algorithm.use_kl_loss=true", "trainer.max_steps=3", "trainer.val_freq=2",
)  # fmt: skip
LEARNING = ("trainer.max_steps=100", "trainer.val_freq=25")
TINY_LEARNING = ("trainer.max_steps=2", "trainer.val_freq=2")
ASKED_RISE = 0.3  # of the accuracy; one answer for all questions is right one time in four
FIGURES = {  # of the last step
    "step_s": "timing_s/step",
    "gen_s": "timing_s/gen",
    "sync_weights_s": "timing_s/sync_weights",
    "update_actor_s": "timing_s/update_actor",
    "log_probs_difference": "rollout/log_probs_diff_mean",
    "tokens_per_s": "perf/throughput",
    "mfu": "perf/mfu_actor",  # of GPUs
    "max_memory_allocated_gb": "perf/max_memory_allocated_gb",
    "max_memory_reserved_gb": "perf/max_memory_reserved_gb",
}


def arguments(place: Place, folder: Path) -> list[str]:
    """Write a model and questions about images; return the options that all cases share."""
    write_questions = runpy.run_path(str(QUICKSTART / "shapes.py"))["write_questions"]
    train = write_questions(folder, "train", 256, seed=1, with_images=True)
    held_out = write_questions(folder, "val", 8 if place.tiny else 64, seed=2, with_images=True)
    model = save_tiny_model(folder / "model", "qwen2_5_vl")
    dtype = "bf16" if place.is_gpu else "fp32"
    return [
        f"config={QUICKSTART / 'demo.yaml'}",
        f"data.train_files={train}", f"data.val_files={held_out}", f"data.image_dir={folder / 'images'}",
        "data.val_batch_size=-1", "data.num_workers=0",
        f"worker.actor.model.model_path={model}", f"worker.actor.fsdp.mp_param_dtype={dtype}",
        f"worker.rollout.dtype={dtype}", "worker.rollout.gpu_memory_utilization=0.3",
        f"worker.reward.reward_function={QUICKSTART / 'reward.py'}:compute_score",
        f"trainer.device={place.device.type}", "trainer.n_gpus_per_node=1", "trainer.logger=[file]",
        f"trainer.save_checkpoint_path={folder / 'run'}",
    ]  # fmt: skip


def run(report: Report, place: Place, options: Sequence[str]) -> list[dict[str, float]]:
    """Train; return what each step logged. Every step trains, and the engine agrees with the trainer."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        started = time.perf_counter()
        command = [sys.executable, "-m", "verl.trainer.main", *arguments(place, folder), *options]
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if finished.returncode:
            raise RuntimeError(f"exit status {finished.returncode}: {finished.stderr[-3000:]}")
        report.figure("run_s", time.perf_counter() - started)
        log = read_log(folder / "run")
    steps = [entry for entry in log if "actor/grad_norm" in entry]
    report.holds("all gradients are finite", all(math.isfinite(entry["actor/grad_norm"]) for entry in steps))
    differences = [entry["rollout/log_probs_diff_mean"] for entry in steps]
    report.at_most("largest log_probs_difference of a step", max(differences), 0.05 if place.is_gpu else 1e-4)
    for name, metric in FIGURES.items():
        if metric in steps[-1]:
            report.figure(name, steps[-1][metric])
    return log


def few_steps(report: Report, place: Place) -> None:
    log = run(report, place, STEPS)
    report.at_least("steps", max(entry["step"] for entry in log), 3)


def learning(report: Report, place: Place) -> None:
    """The curves, and the accuracy on held-out questions before and after."""
    log = run(report, place, TINY_LEARNING if place.tiny else LEARNING)
    report.figure(
        "rewards", [round(entry["reward/overall"], 3) for entry in log if "reward/overall" in entry]
    )
    accuracies = [entry["val/accuracy_reward"] for entry in log if "val/accuracy_reward" in entry]
    report.figure("accuracies", [round(accuracy, 3) for accuracy in accuracies])
    report.figure("accuracy_before", accuracies[0])
    report.figure("accuracy_after", accuracies[-1])
    if not place.tiny:
        report.at_least("rise of the accuracy", accuracies[-1] - accuracies[0], ASKED_RISE)


CASES = {"steps": few_steps, "learning": learning}


def work(report: Report, place: Place, case: str) -> None:
    report.attempt(CASES[case], place)


if __name__ == "__main__":
    run_part(__doc__, work, tuple(CASES))
