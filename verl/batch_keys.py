# SPDX-License-Identifier: Apache-2.0
"""Table of the keys that a batch may hold. To add one, add a row to `TABLE`.

Shape letters, throughout the project:

    B  sequences in the batch      V  vocabulary            S  tokens on this rank under sequence parallelism
    P  prompt length, padded       H  attention heads       G  prompts (groups)
    R  response length, padded     D  head dimension        L  layers
    T  P + R                       N  packed tokens of all sequences
    K  separate values of the reward function      E  experts of a mixture
    Q  prompt length of teachers that see other media, padded
    Z  most likely tokens of a teacher
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

# Columns that several stages read: importing a name from here pulls in no stage.
BEGUN = "begun"  # unfinished responses of each prompt, by sample; engines continue them
SAMPLED_ROW = "sampled_row"  # index of the row that a sampler drew
TEACHER_IDS = "teacher_ids"
TEACHER_LOG_PROBS = "teacher_log_probs"  # (B, R): of the sampled tokens
TEACHER_TOP_IDS = "teacher_top_ids"  # (B, R, Z) int32: the most likely tokens, from a server
TEACHER_TOP_LOG_PROBS = "teacher_top_log_probs"  # (B, R, Z)
TEACHER_PROMPTS = ("teacher_prompts", "teacher_prompt_mask", "teacher_prompt_position_ids")
TEACHER_MEDIA = "teacher_media"
TEACHER_KEYS = (TEACHER_IDS, TEACHER_LOG_PROBS, TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS, *TEACHER_PROMPTS)
ENGINE_ROUTES = "rollout_routes"  # of the engine that sampled the response
OLD_ROUTES = "old_routes"  # of the pass that computes `old_log_probs`
ROUTES = (ENGINE_ROUTES, OLD_ROUTES)
ROUTE_MATCHES = "route_matches"  # (B, 2) float32: choices of the trainer equal to the engine's, and all


class BatchError(ValueError, AssertionError):
    """An invalid batch; also an `AssertionError`, which EasyR1's users catch."""


class BatchKey(NamedTuple):
    """One row of the table of batch keys."""

    name: str
    shapes: str  # in the letters above: `B R`, or several as `B T or B 4 T`
    kind: str  # "int64", "int32", "float32", "mask" (int64, zeros and ones) or "object"
    writer: str
    readers: str

    @property
    def dims(self) -> list[list[str]]:
        """The letters and numbers of each allowed shape."""
        return [shape.split() for shape in self.shapes.split(" or ")]


TABLE = (
    BatchKey("prompts", "B P", "int64", "loader", "rollout, reward"),
    BatchKey("prompt_mask", "B P", "mask", "loader", "rollout, reward"),
    BatchKey("prompt_position_ids", "B P or B 4 P", "int64", "loader", "rollout"),
    BatchKey("raw_prompt_ids", "B", "object", "loader", "rollout"),
    BatchKey("prompt_text", "B", "object", "loader", "reward"),
    BatchKey("prompt_messages", "B", "object", "loader", "reward model"),
    BatchKey("ground_truth", "B", "object", "loader", "reward"),
    BatchKey("multi_modal_data", "B", "object", "loader", "rollout, log-probs, values, update"),
    BatchKey("sampled_row", "B", "object", "loader (`data.sampler`)", "loader"),
    BatchKey("uid", "B", "object", "collector", "collector, advantage"),
    BatchKey("responses", "B R", "int64", "rollout", "reward, log-probs, values, update"),
    BatchKey("response_mask", "B R", "mask", "rollout", "reward, reward model, metrics, rollout log"),
    BatchKey(
        "loss_mask",
        "B R",
        "mask",
        "rollout, reward, advantage",
        "reward, log-probs, values, process rewards, KL penalty, correction, advantage, update, metrics,"
        " rollout log",
    ),
    BatchKey("observation_mask", "B R", "mask", "rollout (conversations)", "metrics"),
    BatchKey(
        "observation_media",
        "B",
        "object",
        "rollout (conversations)",
        "log-probs, values, update, rollout log",
    ),
    BatchKey(
        "context_starts", "B", "object", "rollout (conversations)", "log-probs, values, update, rollout log"
    ),
    BatchKey("turns", "B", "object", "rollout (conversations)", "reward, advantage, metrics, rollout log"),
    BatchKey("contexts", "B", "object", "rollout (conversations)", "rollout log"),
    BatchKey("stop_reason", "B", "object", "rollout (conversations)", "rollout log"),
    BatchKey("input_ids", "B T", "int64", "rollout", "log-probs, values, update"),
    BatchKey("attention_mask", "B T", "mask", "rollout", "log-probs, values, update"),
    BatchKey("position_ids", "B T or B 4 T", "int64", "rollout", "log-probs, values, update"),
    BatchKey("rollout_log_probs", "B R", "float32", "rollout", "mismatch metrics, correction"),
    BatchKey("rollout_versions", "B R", "int64", "rollout (stream, partial)", "metrics"),
    BatchKey("drafted_tokens", "B", "int64", "rollout (speculative)", "metrics"),
    BatchKey("accepted_tokens", "B", "int64", "rollout (speculative)", "metrics"),
    BatchKey("row_ids", "B", "int64", "collector", "balancing, resampling, update"),
    BatchKey("rollout_steps", "B", "int64", "collector", "metrics"),
    BatchKey("sequence_weights", "B", "float32", "collector (early stop)", "update"),
    BatchKey("reward_baselines", "B", "float32", "collector", "advantage (remax)"),
    BatchKey("token_level_scores", "B R", "float32", "reward", "KL penalty, metrics"),
    BatchKey("reward_components", "B K", "float32", "reward", "advantage (gdpo)"),
    BatchKey("reward_values", "B", "object", "reward", "rollout log"),
    BatchKey("accuracies", "B", "float32", "reward", "advantage (prime), update"),
    BatchKey("old_log_probs", "B R", "float32", "actor", "KL penalty, update"),
    BatchKey("sum_squared_probs", "B R", "float32", "actor", "advantage (token baselines)"),
    BatchKey("expert_choices", "B E", "float32", "actor", "update (router's balance)"),
    BatchKey("rollout_routes", "B", "object", "rollout (mixtures)", "log-probs, update"),
    BatchKey("old_routes", "B", "object", "actor (`router_replay=r2`)", "update"),
    BatchKey("route_matches", "B 2", "float32", "actor (mixtures)", "update, metrics"),
    BatchKey("ref_log_probs", "B R", "float32", "reference", "KL penalty, update"),
    BatchKey("teacher_ids", "B", "int64", "loader", "teachers, update (distillation)"),
    BatchKey("teacher_prompts", "B Q", "int64", "loader", "teachers, update (distillation)"),
    BatchKey("teacher_prompt_mask", "B Q", "mask", "loader", "teachers, update (distillation)"),
    BatchKey(
        "teacher_prompt_position_ids", "B Q or B 4 Q", "int64", "loader", "teachers, update (distillation)"
    ),
    BatchKey("teacher_media", "B", "object", "loader", "teachers, update (distillation)"),
    BatchKey("teacher_log_probs", "B R", "float32", "teachers", "advantage, update (distillation)"),
    BatchKey("teacher_top_ids", "B R Z", "int32", "served teachers", "update (distillation)"),
    BatchKey("teacher_top_log_probs", "B R Z", "float32", "served teachers", "update (distillation)"),
    BatchKey("full_kl", "B R", "float32", "actor and reference", "KL penalty"),
    BatchKey("values", "B R", "float32", "critic", "advantage, update"),
    BatchKey("prime_ref_log_probs", "B R", "float32", "prime", "process rewards, update"),
    BatchKey("process_rewards", "B R", "float32", "prime", "advantage (prime)"),
    BatchKey("reward_model_scores", "B", "float32", "reward model", "reward"),
    BatchKey("kept_mask", "B R", "mask", "correction", "advantage"),
    BatchKey("rollout_is_weights", "B R", "float32", "correction", "advantage, update"),
    BatchKey("token_level_rewards", "B R", "float32", "KL penalty", "advantage, metrics"),
    BatchKey("advantages", "B R", "float32", "advantage", "update, metrics"),
    BatchKey("returns", "B R", "float32", "advantage", "update, metrics"),
)
BATCH_KEYS: dict[str, BatchKey] = {row.name: row for row in TABLE}


def check_columns(columns: Mapping[str, Tensor | np.ndarray], num_rows: int) -> None:
    """Raise unless the columns of a batch match `BATCH_KEYS`; keys outside of the table pass."""
    sizes: dict[str, tuple[int, str]] = {"B": (num_rows, "the batch")}
    rows = [row for name, row in BATCH_KEYS.items() if name in columns]
    rows.sort(key=lambda row: "T" in row.shapes)  # after the keys that define P and R
    for row in rows:
        value = columns[row.name]
        _check_dtype(row, value)
        _check_shape(row, tuple(value.shape), sizes)
        _check_values(row, value)


def _check_dtype(row: BatchKey, value: Tensor | np.ndarray) -> None:
    expected = {"mask": "int64"}.get(row.kind, row.kind)
    found = str(value.dtype).removeprefix("torch.")
    if expected == "object" and isinstance(value, np.ndarray):
        return
    if isinstance(value, np.ndarray) or found != expected:
        kind = "an object array" if expected == "object" else f"a tensor of {expected}"
        holder = "an array" if isinstance(value, np.ndarray) else "a tensor"
        raise BatchError(f"`{row.name}` must be {kind}, got {holder} of {found}")


def _check_shape(row: BatchKey, shape: tuple[int, ...], sizes: dict[str, tuple[int, str]]) -> None:
    """Check a shape; `sizes` collects the size of each letter and the key that defined it."""
    if "P" in sizes and "R" in sizes:
        sizes["T"] = (sizes["P"][0] + sizes["R"][0], f"{sizes['P'][1]} and {sizes['R'][1]}")
    shown = " or ".join(f"({', '.join(dims)})" for dims in row.dims)
    expected = f"`{row.name}` must have shape {shown}"
    fitting = [dims for dims in row.dims if len(dims) == len(shape)]
    if not fitting:
        raise BatchError(f"{expected}, got {shape}")
    for dim, size in zip(fitting[0], shape, strict=True):
        if dim.isdigit():
            if size != int(dim):
                raise BatchError(f"{expected}, got {shape}")
            continue
        wanted, source = sizes.setdefault(dim, (size, f"`{row.name}`"))
        if size != wanted:
            raise BatchError(f"{expected} with {dim} = {wanted} from {source}, got {shape}")


def _check_values(row: BatchKey, value: Tensor | np.ndarray) -> None:
    if not isinstance(value, Tensor):
        return
    if row.kind == "mask" and not ((value == 0) | (value == 1)).all():
        wrong = value[(value != 0) & (value != 1)].unique().tolist()
        raise BatchError(f"`{row.name}` must hold zeros and ones only, got {wrong[:5]}")
    if row.kind == "float32" and not value.isfinite().all():
        rows = (~value.isfinite()).reshape(len(value), -1).any(1).nonzero().flatten().tolist()
        raise BatchError(f"`{row.name}` must be finite, got inf or nan in rows {rows[:10]}")
