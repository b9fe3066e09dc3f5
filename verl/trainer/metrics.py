# SPDX-License-Identifier: Apache-2.0
"""The numbers of a step: batch statistics, times, throughput, and how far the engine is from the trainer.

Names are EasyR1's (`critic/score/mean`, `response_length/clip_ratio`, `timing_s/gen`, `perf/throughput` ...).
To add a metric of the batch: one line in `compute_batch_metrics`.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from verl.protocol import DataProto

Metrics = dict[str, float]

PER_RESPONSE_TOKEN = ("gen", "reward")  # stages whose work grows with the responses; others' with all tokens


class StageTimer:
    """Seconds spent in each named stage of a step; stages may nest.

    Example::

        timer = StageTimer()
        with timer("step"), timer("gen"):
            ...
        timer.seconds["gen"]
    """

    def __init__(self, on_enter: Callable[[str], None] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._on_enter = on_enter

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time inside to `stage`; tells `on_enter` the stage's name first."""
        if self._on_enter is not None:
            self._on_enter(stage)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def mean_max_min(name: str, values: Tensor) -> Metrics:
    """`name/mean`, `name/max`, `name/min` of a non-empty tensor."""
    values = values.float()
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def length_metrics(name: str, lengths: Tensor, limit: int) -> Metrics:
    """Statistics of lengths in tokens; `clip_ratio` is the share that reached the limit."""
    return mean_max_min(name, lengths) | {f"{name}/clip_ratio": (lengths >= limit).float().mean().item()}


def compute_batch_metrics(batch: DataProto, step: int) -> Metrics:
    """Statistics of a finished batch: scores, rewards, advantages, returns, values, lengths, mismatch.

    The mismatch of engine and trainer is that of this step's own responses: those that were carried over come
    from other weights, and `training/off_policy/trajectory_staleness/*` says from how many steps before.
    """
    tensors = batch.batch
    mask = tensors["response_mask"].bool()  # (B, R), without what was rejected
    responses = tensors["attention_mask"][:, -mask.shape[-1] :].bool()  # (B, R)
    metrics = mean_max_min("critic/score", tensors["token_level_scores"].sum(-1))
    metrics |= mean_max_min("critic/rewards", tensors["token_level_rewards"].sum(-1))
    for key in ("advantages", "returns", "values"):
        if key in tensors and mask.any():
            metrics |= mean_max_min(f"critic/{key}", tensors[key][mask])
    if "values" in tensors and mask.sum() > 1:
        metrics["critic/vf_explained_var"] = explained_variance(
            tensors["values"][mask], tensors["returns"][mask]
        )
    metrics |= length_metrics("response_length", responses.sum(-1), responses.shape[-1])
    metrics |= length_metrics(
        "prompt_length", tensors["prompt_mask"].sum(-1), tensors["prompt_mask"].shape[-1]
    )
    staleness = step - tensors["rollout_steps"]  # (B,)
    if staleness.any():
        metrics |= mean_max_min("training/off_policy/trajectory_staleness", staleness)
    fresh = responses & (staleness == 0).unsqueeze(-1)  # (B, R)
    if fresh.any():
        metrics |= mismatch_metrics(tensors["rollout_log_probs"], tensors["old_log_probs"], fresh)
    return metrics


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Share of the returns' variance that the values explain: 1 - var(returns - values) / var(returns).

    Below zero for values that are worse than a constant; zero where all returns are equal.

    Args:
        values: (N,), N of at least 2.
        returns: (N,).
    """
    variance = returns.double().var()
    return 0.0 if variance == 0 else (1 - (returns.double() - values).var() / variance).item()


def mismatch_metrics(rollout_log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Metrics:
    """How far the engine's log-probs are from the trainer's under the same weights, over response tokens.

    Right after a sync the two differ by rounding alone; anything more means that the engine samples from
    another policy than the one that is trained.

    Args:
        rollout_log_probs: As the engine reported them, (B, R).
        old_log_probs: As the trainer recomputed them, (B, R).
        mask: Response tokens, (B, R).

    Returns:
        `rollout/log_probs_diff_{mean,max}` (nats), `rollout/probs_diff_{mean,max}`, `rollout/kl`: mean of
        log p_rollout - log p_old, `rollout/k3_kl`, and `rollout/probs_pearson_corr` where the tokens differ
        in probability.
    """
    rollout, old = rollout_log_probs[mask].double(), old_log_probs[mask].double()  # (tokens,)
    log_diff = old - rollout
    prob_diff = (old.exp() - rollout.exp()).abs()
    metrics = {
        "rollout/log_probs_diff_mean": log_diff.abs().mean().item(),
        "rollout/log_probs_diff_max": log_diff.abs().max().item(),
        "rollout/probs_diff_mean": prob_diff.mean().item(),
        "rollout/probs_diff_max": prob_diff.max().item(),
        "rollout/kl": -log_diff.mean().item(),
        "rollout/k3_kl": (log_diff.exp() - 1 - log_diff).mean().item(),
    }
    probs = torch.stack([rollout.exp(), old.exp()])  # (2, tokens)
    if probs.shape[1] > 1 and bool((probs.std(dim=1) > 0).all()):
        metrics["rollout/probs_pearson_corr"] = torch.corrcoef(probs)[0, 1].item()
    return metrics


def compute_timing_metrics(batch: DataProto, seconds: dict[str, float]) -> Metrics:
    """Seconds of each stage, and milliseconds for each token that the stage worked on."""
    response_tokens = int(batch.batch["response_mask"].sum())
    all_tokens = int(batch.batch["attention_mask"].sum())
    metrics = {f"timing_s/{stage}": value for stage, value in seconds.items()}
    for stage in ("gen", "reward", "old", "ref", "values", "adv", "update_critic", "update_actor"):
        if stage in seconds:
            tokens = response_tokens if stage in PER_RESPONSE_TOKEN else all_tokens
            metrics[f"timing_per_token_ms/{stage}"] = 1000 * seconds[stage] / tokens
    return metrics


def compute_throughput_metrics(batch: DataProto, step_seconds: float, num_processes: int) -> Metrics:
    """Tokens of the step, its seconds, and tokens (prompt and response) per second and device."""
    tokens = int(batch.batch["attention_mask"].sum())
    return {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": step_seconds,
        "perf/throughput": tokens / (step_seconds * num_processes),
    }


def compute_reward_metrics(values: dict[str, list[float]], prefix: str = "reward/") -> Metrics:
    """The mean of every value that the reward function returned, as `reward/<key>`.

    A value that it returned for some responses only is nan for the others; they do not count. One that no
    response has is left out.
    """
    present = {key: [value for value in column if not math.isnan(value)] for key, column in values.items()}
    return {f"{prefix}{key}": sum(known) / len(known) for key, known in present.items() if known}
