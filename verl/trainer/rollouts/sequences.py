# SPDX-License-Identifier: Apache-2.0
"""Join prompts and responses into the padded rows of a batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl.agents.interface import OwnPrompt, Trajectory
from verl.batch_keys import ENGINE_ROUTES
from verl.models.families.mrope import continue_positions
from verl.models.mixture.routes import extend_routes
from verl.protocol import DataProto, objects
from verl.workers.rollout.interface import Drafts, FinishedResponse

PROMPT_ONLY = {"prompt_position_ids", "raw_prompt_ids"}  # needed to sample, unused afterwards
# Columns of a row that an own prompt replaces, by its attribute.
OWN_COLUMNS = {"multi_modal_data": "media", "prompt_text": "text", "prompt_messages": "messages"}


def join_responses(
    prompts: DataProto, responses: list[FinishedResponse], n: int, response_length: int, pad_token_id: int
) -> DataProto:
    """Join prompts and their n responses each into sequences, with the keys that `rollout` writes.

    Prompts are padded on the left, responses on the right, to `response_length`. Conversations also have the
    keys of `join_conversations`.
    """
    shape = (len(responses), response_length)
    tokens = torch.full(shape, pad_token_id, dtype=torch.int64)  # (B, R)
    mask = torch.zeros(shape, dtype=torch.int64)  # (B, R)
    log_probs = torch.zeros(shape, dtype=torch.float32)  # (B, R)
    for row, response in enumerate(responses):
        length = len(response.token_ids)
        tokens[row, :length] = torch.tensor(response.token_ids, dtype=torch.int64)
        log_probs[row, :length] = torch.tensor(response.log_probs, dtype=torch.float32)
        mask[row, :length] = 1

    sequences = with_own_prompts(prompts.repeat(n, interleave=True), responses, pad_token_id)
    position_ids = sequences.batch["prompt_position_ids"]  # (B, P) or (B, 4, P)
    # Positions continue from the prompt's last one, on every axis of M-RoPE.
    response_positions = continue_positions(position_ids[..., -1], response_length)  # (B, R) or (B, 4, R)
    kept = sorted(set(sequences.batch.keys()) - PROMPT_ONLY)
    kept_objects = sorted(set(sequences.non_tensor_batch) - PROMPT_ONLY)
    joined = sequences.select(kept, kept_objects).merge({
        "responses": tokens,
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "input_ids": torch.cat([sequences.batch["prompts"], tokens], dim=-1),  # (B, P + R)
        "attention_mask": torch.cat([sequences.batch["prompt_mask"], mask], dim=-1),  # (B, P + R)
        "position_ids": torch.cat([position_ids, response_positions], dim=-1),
        "rollout_log_probs": log_probs,
        "finish_reason": objects([response.finish_reason for response in responses]),
    })  # fmt: skip
    if any(response.versions for response in responses):
        joined = joined.merge({"rollout_versions": versions_of(responses, response_length)})
    if any(response.routes is not None for response in responses):
        joined = joined.merge({ENGINE_ROUTES: routes_of(responses, joined.batch["attention_mask"])})
    trajectories = [response.trajectory for response in responses]
    if not any(trajectories):
        return joined
    return joined.merge(join_conversations(trajectories, joined), replace=["loss_mask", "position_ids"])


def draft_columns(responses: Sequence[FinishedResponse]) -> dict[str, Tensor]:
    """Return the numbers of drafted and of accepted tokens, (B,) int64; 0 of an agent without a turn."""
    drafts = [response.drafts or Drafts() for response in responses]
    drafted, accepted = torch.tensor(drafts, dtype=torch.int64).unbind(-1)  # (B,)
    return {"drafted_tokens": drafted, "accepted_tokens": accepted}


def versions_of(responses: Sequence[FinishedResponse], response_length: int) -> Tensor:
    """Return the version of the weights that sampled each token, (B, R) int64; 0 after the last one."""
    versions = torch.zeros(len(responses), response_length, dtype=torch.int64)
    for row, response in enumerate(responses):
        versions[row, : len(response.versions)] = torch.tensor(response.versions, dtype=torch.int64)
    return versions


def routes_of(responses: Sequence[FinishedResponse], mask: Tensor) -> np.ndarray:
    """Return the experts of each row's tokens, (tokens, L, k) objects; None where the engine has none."""
    lengths = mask.sum(-1).tolist()
    return objects(
        None if response.routes is None else extend_routes(response.routes, length)
        for response, length in zip(responses, lengths, strict=True)
    )


def with_own_prompts(
    sequences: DataProto, responses: Sequence[FinishedResponse], pad_token_id: int
) -> DataProto:
    """Replace the prompts of conversations that began with another one than that of their row."""
    found = [response.trajectory.prompt if response.trajectory else None for response in responses]
    own = {row: prompt for row, prompt in enumerate(found) if prompt is not None}
    if not own:
        return sequences
    tensors = {key: sequences.batch[key].clone() for key in ("prompts", "prompt_mask", "prompt_position_ids")}
    columns = {key: sequences.non_tensor_batch[key].copy() for key in OWN_COLUMNS}
    for row, prompt in own.items():
        _set_prompt({key: tensor[row] for key, tensor in tensors.items()}, prompt, pad_token_id)
        for key, attribute in OWN_COLUMNS.items():
            columns[key][row] = getattr(prompt, attribute)
    return sequences.merge({**tensors, **columns}, replace=[*tensors, *columns])


def _set_prompt(row: dict[str, Tensor], prompt: OwnPrompt, pad_token_id: int) -> None:
    width, length = len(row["prompts"]), len(prompt.token_ids)
    assert 0 < length <= width, f"an own prompt has 1 to {width} tokens, got {length}"
    values = {
        "prompts": (torch.tensor(prompt.token_ids), pad_token_id),
        "prompt_mask": (torch.ones(length, dtype=torch.int64), 0),
        "prompt_position_ids": (prompt.position_ids, 0),
    }
    for key, (value, padding) in values.items():
        row[key][..., : width - length] = padding
        row[key][..., width - length :] = value


def join_conversations(
    trajectories: Sequence[Trajectory | None], joined: DataProto
) -> dict[str, Tensor | np.ndarray]:
    """Mask the observations of conversations, and add their media, positions, contexts and turns."""
    mask = joined.batch["response_mask"]  # (B, R)
    observed, position_ids = torch.zeros_like(mask), joined.batch["position_ids"].clone()
    loss_mask, start = mask.clone(), position_ids.shape[-1] - mask.shape[-1]
    for row, trajectory in enumerate(trajectories):
        if trajectory is None:
            continue
        length = len(trajectory.is_sampled)
        observed[row, :length] = 1 - torch.tensor(trajectory.is_sampled, dtype=torch.int64)
        if trajectory.is_masked:
            loss_mask[row] = 0
        if trajectory.position_ids is not None:
            position_ids[row, ..., start : start + length] = trajectory.position_ids
            after = continue_positions(trajectory.position_ids[..., -1], mask.shape[-1] - length)
            position_ids[row, ..., start + length :] = after
    return {
        "observation_mask": observed,
        "loss_mask": loss_mask * (1 - observed),
        "position_ids": position_ids,
        "observation_media": objects([dict(one.media) if one else {} for one in trajectories]),
        "context_starts": objects([one.context_starts if one else () for one in trajectories]),
        "turns": objects([one.plain_turns() if one else [] for one in trajectories]),
        "contexts": objects([one.plain_contexts() if one else [] for one in trajectories]),
        "stop_reason": objects([one.stop_reason.value if one else None for one in trajectories]),
    }
