# SPDX-License-Identifier: Apache-2.0
"""Prompts in, sequences out: samples responses on the worker group and has them scored as they finish.

`RolloutCollector` calls `Sampler` until a step has its prompts; validation uses it with other options.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.agents.interface import Trajectory
from verl.config.data import DataConfig
from verl.config.worker import WorkerConfig
from verl.models.families.mrope import continue_positions
from verl.protocol import DataProto, objects
from verl.rewards.manager import NoRewardFunction, RewardJob, RewardManager, ZeroScores
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.rollouts.scores import Scoring
from verl.workers.rollout.base import FinishedResponse, SamplingOptions

Progress = Callable[[int, int, str], None]  # done, total, unit

SAMPLED_FROM = ["uid", "raw_prompt_ids", "multi_modal_data"]
PROMPT_ONLY = {"prompt_position_ids", "raw_prompt_ids"}  # needed to sample, unused afterwards


class Sampler:
    """Samples responses to prompts and hands them to the reward function as they finish."""

    def __init__(
        self,
        data: DataConfig,
        worker: WorkerConfig,
        workers: RayWorkerGroup,
        reward: RewardManager | NoRewardFunction,
        tokenizer: Any,
        on_progress: Progress | None = None,
    ) -> None:
        self.workers = workers
        self.reward = reward
        self.tokenizer = tokenizer
        self.on_progress = on_progress
        self.prompt_length, self.response_length = data.max_prompt_length, data.max_response_length
        self.encodes_first = worker.actor.model.freeze_vision_tower
        self.skip_special_tokens = worker.reward.skip_special_tokens
        rollout = worker.rollout
        self.converses = rollout.multi_turn.enable  # tools may read every column
        self.options = SamplingOptions(
            n=rollout.n,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=data.max_response_length,
            ignore_eos=rollout.ignore_eos,
            # Tools answer in any order, which must not decide the random numbers of each conversation.
            seed=rollout.seed if self.converses else None,
        )
        # For the one response that `remax` compares the others with.
        self.greedy_options = self.options.override({"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": -1})
        self.validation_options = self.options.override({"n": 1} | rollout.val_override_config)

    def sample(self, prompts: DataProto, options: SamplingOptions) -> tuple[DataProto, Scoring]:
        """Sample `options.n` responses to every prompt; those to a prompt become adjacent rows."""
        n, job, columns = options.n, self.reward.start(), reward_columns(prompts)
        row_of = {uid: row for row, uid in enumerate(prompts.non_tensor_batch["uid"])}
        total = len(prompts) * n
        responses: dict[int, FinishedResponse] = {}  # by the row of the sequence
        unfinished = dict.fromkeys(row_of, n)
        if self.encodes_first and any(prompts.non_tensor_batch["multi_modal_data"]):
            list(self.workers.encode_media(prompts.select([], ["multi_modal_data"])))
        sampled_from = prompts.select([], None if self.converses else SAMPLED_FROM)
        for finished in self.workers.generate(sampled_from, options):
            for response in finished:
                row = row_of[response.uid]
                responses[row * n + response.sample] = response
                unfinished[response.uid] -= 1
                # A `sequential` function gets each response at once, others those to a prompt together.
                if self.reward.reward_type == "sequential":
                    self._score(job, [row * n + response.sample], [response], columns[row])
                elif unfinished[response.uid] == 0:
                    group = range(row * n, (row + 1) * n)
                    self._score(job, group, [responses[index] for index in group], columns[row])
            if self.on_progress is not None:
                self.on_progress(total - sum(unfinished.values()), total, "responses")
        assert not any(unfinished.values()), f"the engine must finish every response, got {unfinished}"
        in_order = [responses[row] for row in range(total)]
        sequences = join_responses(prompts, in_order, n, self.response_length, self.tokenizer.pad_token_id)
        return sequences, Scoring([job.result])

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)

    def _score(
        self,
        job: RewardJob | ZeroScores,
        index: Sequence[int],
        responses: list[FinishedResponse],
        columns: dict[str, Any],
    ) -> None:
        inputs = [
            columns
            | {"response": self.decode(response.token_ids), "response_length": len(response.token_ids)}
            | conversation_columns(response)
            for response in responses
        ]
        job.submit(index, inputs)


def with_uids(prompts: DataProto, prefix: str) -> DataProto:
    """Give every prompt its own id, which its responses share."""
    return prompts.merge({"uid": objects([f"{prefix}-{row}" for row in range(len(prompts))])})


def reward_columns(prompts: DataProto) -> list[dict[str, Any]]:
    """The reward function's view of each prompt: its text as `prompt`, and every column of its row."""
    hidden = {"raw_prompt_ids", "prompt_text", "prompt_messages"}
    columns = {key: values for key, values in prompts.non_tensor_batch.items() if key not in hidden}
    texts = prompts.non_tensor_batch["prompt_text"]
    return [
        {key: values[row] for key, values in columns.items()} | {"prompt": texts[row]}
        for row in range(len(prompts))
    ]


def conversation_columns(response: FinishedResponse) -> dict[str, Any]:
    """The reward function's view of a conversation; nothing for a response of one turn without tools."""
    trajectory = response.trajectory
    if trajectory is None:
        return {}
    turns = trajectory.plain_turns()
    return {
        "messages": list(trajectory.messages),
        "num_turns": len(turns),
        "tool_calls": [call for turn in turns for call in turn["calls"]],
        "tool_rewards": [turn["reward"] for turn in turns],
    }


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

    sequences = prompts.repeat(n, interleave=True)
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
    trajectories = [response.trajectory for response in responses]
    if not any(trajectories):
        return joined
    return joined.merge(join_conversations(trajectories, joined), replace=["loss_mask", "position_ids"])


def join_conversations(
    trajectories: Sequence[Trajectory | None], joined: DataProto
) -> dict[str, Tensor | np.ndarray]:
    """Mask the observations of conversations, and add their media, positions and turns."""
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
        "turns": objects([one.plain_turns() if one else [] for one in trajectories]),
        "conversation_messages": objects([list(one.messages) if one else [] for one in trajectories]),
        "stop_reason": objects([one.stop_reason if one else None for one in trajectories]),
    }
