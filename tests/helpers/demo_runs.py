# SPDX-License-Identifier: Apache-2.0
"""Run folders with the metrics and configs of whole runs, written by the file logger, without training."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from verl.logger.base import Run
from verl.logger.file import FileLogger

PHASES = {
    "gen": 9.0, "reward": 0.6, "old": 1.4, "ref": 1.3, "values": 1.1, "adv": 0.12, "update_critic": 2.3,
    "update_actor": 4.2, "validation": 3.0,
    "save_checkpoint": 0.8, "sync_weights": 0.5, "keep_rollouts": 0.05,
}  # fmt: skip


def write_run(
    folder: Path, steps: int = 120, seed: int = 0, best: float = 0.9, pace: float = 25.0, **options: Any
) -> Path:
    """Write a run whose reward rises to `best` around step 1.5 `pace`; options are `section__name=value`."""
    config: dict[str, Any] = {
        "trainer": {"project_name": "demo", "experiment_name": folder.name, "max_steps": steps},
        "worker": {"actor": {"optim": {"lr": 1e-6}, "kl_loss_coef": 0.0}, "rollout": {"n": 8}},
        "data": {"train_files": "train.parquet", "rollout_batch_size": 64},
    }
    for path, value in options.items():
        *sections, name = path.split("__")
        section = config
        for one in sections:
            section = section[one]
        section[name] = value
    logger = FileLogger(Run("demo", folder.name, folder, config))
    logger.log({"val/reward_score": 0.02, "val/accuracy": 0.02}, 0)
    random = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        logger.log(metrics_of(step, random, best, pace), step)
    logger.close()
    return folder


def metrics_of(step: int, random: np.random.Generator, best: float, pace: float) -> dict[str, float]:
    """Metrics of one step: a logistic reward with noise, and what usually goes with it."""
    learned = 1 / (1 + math.exp(-(step - 1.5 * pace) / (0.4 * pace)))
    reward = float(np.clip(best * learned + random.normal(0, 0.035), 0, 1))
    length = 180 + 240 * learned + random.normal(0, 14)
    metrics = {
        "reward/overall": reward,
        "reward/accuracy": reward,
        "reward/format": float(min(1.0, 0.4 + 0.05 * step)),
        "critic/score/mean": reward,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "response_length/mean": length,
        "response_length/max": 1024.0,
        "response_length/clip_ratio": 0.1 * (1 - learned),
        "prompt_length/mean": 87.0,
        "actor/ppo_kl": abs(random.normal(3e-4, 1e-4)),
        "actor/entropy": 1.4 - 0.9 * learned + random.normal(0, 0.02),
        "actor/grad_norm": abs(random.normal(0.6 - 0.3 * learned, 0.08)),
        "actor/pg_loss": random.normal(0, 0.01),
        "actor/pg_clipfrac": 0.0,
        "actor/lr": 1e-6,
        "rollout/log_probs_diff_mean": abs(random.normal(2.4e-7, 4e-8)),
        "rollout/log_probs_diff_max": abs(random.normal(8e-6, 2e-6)),
        "perf/throughput": 21_500 + random.normal(0, 700),
        "perf/total_num_tokens": 512 * (87 + length),
        "perf/max_memory_allocated_gb": 0.0,
    }
    seconds = {name: abs(random.normal(mean, mean / 12)) for name, mean in PHASES.items()}
    if step % 10:
        del seconds["validation"], seconds["save_checkpoint"]
    else:
        score = best * learned + random.normal(0, 0.01)
        metrics |= {"val/reward_score": score, "val/accuracy": score}
    seconds["step"] = sum(seconds.values())
    return metrics | {f"timing_s/{name}": value for name, value in seconds.items()}
