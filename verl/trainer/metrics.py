# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step: batch statistics, times, throughput, and the mismatch of engine and trainer.

Names are EasyR1's (`critic/score/mean`, `response_length/clip_ratio`, `timing_s/gen`, `perf/throughput` ...).
To add a metric of the batch: one line in `compute_batch_metrics`.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.rewards.turns import is_reward_of_turn

Metrics = dict[str, float]

STAGES = ("gen", "reward", "old", "ref", "teacher", "values", "adv", "update_critic", "update_actor")
PER_RESPONSE_TOKEN = ("gen", "reward")  # stages whose work grows with the responses; others' with all tokens


class StageTimer:
    """Measures the seconds spent in each named stage of a step: `with timer("step"), timer("gen"):`."""

    def __init__(self, on_enter: Callable[[str], None] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._on_enter = on_enter
        self._running: list[str] = []

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._running.append(stage)
        self._announce()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
            self._running.pop()
            self._announce()  # the stage around it goes ahead

    def _announce(self) -> None:
        if self._on_enter is not None and self._running:
            self._on_enter(self._running[-1])


def mean_max_min(name: str, values: Tensor) -> Metrics:
    values = values.float()
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def length_metrics(name: str, lengths: Tensor, limit: int) -> Metrics:
    """Statistics of lengths in tokens; `clip_ratio` is the share that reached the limit."""
    return mean_max_min(name, lengths) | {f"{name}/clip_ratio": (lengths >= limit).float().mean().item()}


def sampled_mask(batch: DataProto) -> Tensor:
    """Return which tokens of the responses were sampled, (B, R) bool: all but those of observations."""
    responses = batch.batch["response_mask"].bool()  # (B, R)
    observed = batch.batch.get("observation_mask")  # (B, R), of conversations
    return responses if observed is None else responses & ~observed.bool()


def compute_batch_metrics(batch: DataProto, step: int) -> Metrics:
    """Statistics of a finished batch: scores, rewards, advantages, returns, values, lengths, mismatch."""
    tensors = batch.batch
    mask, responses = tensors["loss_mask"].bool(), tensors["response_mask"].bool()  # (B, R)
    sampled = sampled_mask(batch)  # (B, R)
    counted, metrics = mask.any(-1), Metrics()  # (B,): a masked response has no score
    if counted.any():
        metrics |= mean_max_min("critic/score", tensors["token_level_scores"][counted].sum(-1))
        metrics |= mean_max_min("critic/rewards", tensors["token_level_rewards"][counted].sum(-1))
    for key in ("advantages", "returns", "values"):
        if key in tensors and mask.any():
            metrics |= mean_max_min(f"critic/{key}", tensors[key][mask])
    if "values" in tensors and mask.sum() > 1:
        values, returns = tensors["values"][mask], tensors["returns"][mask]
        metrics["critic/vf_explained_var"] = explained_variance(values, returns)
    metrics |= length_metrics("response_length", responses.sum(-1), responses.shape[-1])
    prompt_mask = tensors["prompt_mask"]
    metrics |= length_metrics("prompt_length", prompt_mask.sum(-1), prompt_mask.shape[-1])
    staleness = step - tensors["rollout_steps"]  # (B,)
    if staleness.any():
        metrics |= mean_max_min("training/off_policy/trajectory_staleness", staleness)
    # Carried responses were sampled by other weights, so they say nothing about the mismatch.
    fresh = sampled & (counted & (staleness == 0)).unsqueeze(-1)  # (B, R)
    if fresh.any():
        metrics |= mismatch_metrics(tensors["rollout_log_probs"], tensors["old_log_probs"], fresh)
    if "route_matches" in tensors:
        metrics["moe/route_agreement"] = share_of(*tensors["route_matches"].double().sum(0).tolist())
    if "drafted_tokens" in tensors:
        metrics |= draft_metrics(tensors["drafted_tokens"], tensors["accepted_tokens"], int(sampled.sum()))
    if "turns" in batch.non_tensor_batch:
        metrics |= agent_metrics(batch.non_tensor_batch["turns"])
    return metrics


def metrics_by_source(batch: DataProto, column: str) -> Metrics:
    """Statistics of each source: of its responses, and its shares of all and of the trained tokens."""
    names, metrics = batch.non_tensor_batch[column], Metrics()
    scores = batch.batch["token_level_scores"].sum(-1)  # (B,)
    responses, trained = (batch.batch[key].bool().sum(-1) for key in ("response_mask", "loss_mask"))  # (B,)
    for name in sorted(set(names)):
        rows = torch.from_numpy(names == name)  # (B,)
        counted = rows & (trained > 0)
        if counted.any():
            metrics[f"source/{name}/score"] = scores[counted].mean().item()
        metrics[f"source/{name}/response_length"] = responses[rows].float().mean().item()
        metrics[f"source/{name}/share"] = rows.float().mean().item()
        metrics[f"source/{name}/token_share"] = share_of(int(trained[rows].sum()), int(trained.sum()))
    return metrics


def share_of(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def draft_metrics(drafted: Tensor, accepted: Tensor, num_sampled: int) -> Metrics:
    """Share of the responses' drafted tokens (B,) that were accepted, and of sampled tokens from drafts."""
    num_accepted = int(accepted.sum())
    return {
        "rollout/draft_acceptance": num_accepted / max(1, int(drafted.sum())),
        "rollout/drafted_frac": num_accepted / max(1, num_sampled),
    }


def agent_metrics(conversations: Iterable[Sequence[Mapping[str, Any]]]) -> Metrics:
    """Statistics of conversations, each the plain data of its turns: turns, calls, failures, seconds.

    `agent/tool_calls` is the mean of a conversation, `agent/tool_failures` the share of the calls and of an
    environment's answers, `agent/tool_s` the mean time between a turn and what follows. `agent/tool/NAME/...`
    are of the calls that reached a tool: their number, the share that failed, and the mean time of the tool's
    work.
    """
    turns = [list(conversation) for conversation in conversations]
    calls = sum(len(turn["calls"]) for each in turns for turn in each)
    answered = [turn for each in turns for turn in each if turn["observations"]]  # else it ended before
    steps = sum(len(turn["observations"]) for turn in answered if not turn["calls"])
    failures = sum(one["failed"] for turn in answered for one in turn["observations"])
    made: dict[str, list[Mapping[str, Any]]] = {}
    for turn in answered:
        if len(turn["calls"]) != len(turn["observations"]):
            continue  # an environment's one answer to the whole turn
        for call, one in zip(turn["calls"], turn["observations"], strict=True):
            if one["seconds"] is not None:
                made.setdefault(call["name"], []).append(one)
    return {
        "agent/turns_mean": sum(map(len, turns)) / len(turns),
        "agent/turns_max": float(max(map(len, turns))),
        "agent/tool_calls": calls / len(turns),
        "agent/tool_failures": failures / max(1, calls + steps),
        "agent/tool_s": sum(turn["seconds"] for turn in answered) / max(1, len(answered)),
    } | {name: value for tool, ones in sorted(made.items()) for name, value in _tool_metrics(tool, ones)}


def _tool_metrics(name: str, observations: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    calls = len(observations)
    yield f"agent/tool/{name}/calls", float(calls)
    yield f"agent/tool/{name}/failures", sum(one["failed"] for one in observations) / calls
    yield f"agent/tool/{name}/s", sum(one["seconds"] for one in observations) / calls


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Share of the returns' variance that the values explain: 1 - var(returns - values) / var(returns).

    Below zero for values that are worse than a constant; zero if all of the N >= 2 returns are equal.
    """
    variance = returns.double().var()
    return 0.0 if variance == 0 else (1 - (returns.double() - values).var() / variance).item()


def mismatch_metrics(rollout_log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Metrics:
    """Distance of the engine's log-probs from the trainer's under the same weights, over a mask (B, R).

    Right after a sync they differ only by rounding; anything more means that the engine samples from another
    policy than the one that is trained. `rollout/kl` is the mean of log p_rollout - log p_old.
    """
    rollout, old = rollout_log_probs[mask].double(), old_log_probs[mask].double()  # (tokens,)
    log_diff = old - rollout
    prob_diff = (old.exp() - rollout.exp()).abs()
    metrics = {
        "rollout/log_probs_diff_mean": log_diff.abs().mean().item(),  # nats
        "rollout/log_probs_diff_max": log_diff.abs().max().item(),
        "rollout/probs_diff_mean": prob_diff.mean().item(),
        "rollout/probs_diff_max": prob_diff.max().item(),
        "rollout/kl": -log_diff.mean().item(),
        "rollout/k3_kl": (log_diff.exp() - 1 - log_diff).mean().item(),
    }
    probs = torch.stack([rollout.exp(), old.exp()])  # (2, tokens)
    if probs.shape[1] > 1 and bool((probs.std(dim=1) > 0).all()):  # else the correlation is undefined
        metrics["rollout/probs_pearson_corr"] = torch.corrcoef(probs)[0, 1].item()
    return metrics


def compute_timing_metrics(batch: DataProto, seconds: dict[str, float]) -> Metrics:
    """Seconds of each stage, and milliseconds for each token that the stage processed, if there were any."""
    response_tokens = int(batch.batch["loss_mask"].sum())
    all_tokens = int(batch.batch["attention_mask"].sum())
    metrics = {f"timing_s/{stage}": value for stage, value in seconds.items()}
    for stage in filter(seconds.__contains__, STAGES):
        tokens = response_tokens if stage in PER_RESPONSE_TOKEN else all_tokens
        if tokens:  # else no response counts
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
    """The mean of every value of the reward function, over the responses that have it (not nan).

    Rewards of turns are left out: `overall` has their sum.
    """
    whole = {key: column for key, column in values.items() if not is_reward_of_turn(key)}
    means = {f"{prefix}{key}": known_mean(column) for key, column in whole.items()}
    return {key: mean for key, mean in means.items() if mean is not None}


def known_mean(values: Iterable[float]) -> float | None:
    """Return the mean of the values that are not nan; None without any."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None
