# SPDX-License-Identifier: Apache-2.0
"""Prompts in, sequences out: samples responses on the worker group and has them scored as they finish.

`RolloutCollector` calls `Sampler` until a step has its prompts; validation uses it with other options.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl.config.ppo import PPOConfig
from verl.models.position_ids import continue_positions
from verl.protocol import DataProto, objects
from verl.rewards.manager import NoRewardFunction, RewardJob, RewardManager, ZeroScores
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.rollouts.scores import Scoring
from verl.workers.rollout.base import FinishedResponse, SamplingOptions

Progress = Callable[[int, int, str], None]  # done, total, what

SAMPLED_FROM = ["uid", "raw_prompt_ids", "multi_modal_data"]
PROMPT_ONLY = ["prompt_position_ids", "raw_prompt_ids"]  # needed to sample, of no use afterwards


class Sampler:
    """Samples responses to prompts on the workers and hands them to the reward function as they finish.

    A `sequential` reward function gets each response at once, the others get a prompt's responses together.
    """

    def __init__(
        self,
        config: PPOConfig,
        workers: RayWorkerGroup,
        reward: RewardManager | NoRewardFunction,
        tokenizer: Any,
        on_progress: Progress | None = None,
    ) -> None:
        """Put the parts together; `on_progress` is told how many responses are finished, of how many."""
        self.workers = workers
        self.reward = reward
        self.tokenizer = tokenizer
        self.on_progress = on_progress
        self.response_length = config.data.max_response_length
        self.encodes_first = config.worker.actor.model.freeze_vision_tower
        self.skip_special_tokens = config.worker.reward.skip_special_tokens

    def sample(self, prompts: DataProto, options: SamplingOptions) -> tuple[DataProto, Scoring]:
        """Sample `options.n` responses to every prompt.

        Args:
            prompts: Rows of the loader with their `uid`.
            options: How to sample.

        Returns:
            The sequences, the n responses to a prompt next to each other, and their scores, still under way.
        """
        n, job, columns = options.n, self.reward.start(), reward_columns(prompts)
        row_of = {uid: row for row, uid in enumerate(prompts.non_tensor_batch["uid"])}
        total = len(prompts) * n
        responses: dict[int, FinishedResponse] = {}  # by the row of the sequence
        unfinished = dict.fromkeys(row_of, n)
        if self.encodes_first and any(prompts.non_tensor_batch["multi_modal_data"]):
            list(self.workers.encode_media(prompts.select([], ["multi_modal_data"])))
        for finished in self.workers.generate(prompts.select([], SAMPLED_FROM), options):
            for response in finished:
                row = row_of[response.uid]
                responses[row * n + response.sample] = response
                unfinished[response.uid] -= 1
                if self.reward.reward_type == "sequential":
                    self._score(job, [row * n + response.sample], [response], columns[row])
                elif unfinished[response.uid] == 0:
                    group = range(row * n, (row + 1) * n)
                    self._score(job, group, [responses[place] for place in group], columns[row])
            if self.on_progress is not None:
                self.on_progress(total - sum(unfinished.values()), total, "responses")
        assert not any(unfinished.values()), (
            f"the engine must finish every response; unfinished are {unfinished}"
        )
        in_order = [responses[row] for row in range(total)]
        sequences = join_responses(prompts, in_order, n, self.response_length, self.tokenizer.pad_token_id)
        return sequences, Scoring([job])

    def decode(self, token_ids: list[int]) -> str:
        """The text of a response."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)

    def _score(
        self,
        job: RewardJob | ZeroScores,
        index: Sequence[int],
        responses: list[FinishedResponse],
        columns: dict[str, Any],
    ) -> None:
        texts = [self.decode(response.token_ids) for response in responses]
        lengths = [len(response.token_ids) for response in responses]
        inputs = [
            columns | {"response": text, "response_length": length}
            for text, length in zip(texts, lengths, strict=True)
        ]
        job.submit(index, inputs)


def with_uids(prompts: DataProto, prefix: str) -> DataProto:
    """Give every prompt an id of its own: its responses are a group."""
    return prompts.merge(
        DataProto.from_dict(non_tensors={"uid": objects([f"{prefix}-{i}" for i in range(len(prompts))])})
    )


def sampling_options(config: PPOConfig) -> SamplingOptions:
    """How training samples responses."""
    rollout = config.worker.rollout
    return SamplingOptions(
        n=rollout.n,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=config.data.max_response_length,
        ignore_eos=rollout.ignore_eos,
    )


def greedy_options(config: PPOConfig) -> SamplingOptions:
    """How the one response is sampled that `remax` compares the others with: always the likeliest token."""
    return sampling_options(config).override({"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": -1})


def reward_columns(prompts: DataProto) -> list[dict[str, Any]]:
    """What the reward function sees of each prompt: its text as `prompt`, and every column of its row."""
    hidden = {"raw_prompt_ids", "prompt_text", "prompt_messages"}
    columns = {key: values for key, values in prompts.non_tensor_batch.items() if key not in hidden}
    texts = prompts.non_tensor_batch["prompt_text"]
    return [
        {key: values[row] for key, values in columns.items()} | {"prompt": texts[row]}
        for row in range(len(prompts))
    ]


def join_responses(
    prompts: DataProto, responses: list[FinishedResponse], n: int, response_length: int, pad_token_id: int
) -> DataProto:
    """Put prompts and their responses together as sequences.

    Args:
        prompts: B prompts, left-padded: `prompts`, `prompt_mask` (B, P), `prompt_position_ids` (B, P) or (B,
            4, P).
        responses: B * n responses, those of a prompt next to each other.
        n: Responses to a prompt.
        response_length: R; responses are padded on the right.
        pad_token_id: What fills the padding.

    Returns:
        B * n sequences with the keys that `rollout` writes in `BATCH_KEYS`. Positions go on from the
        prompt's last one, on every axis of M-RoPE.
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
    response_positions = continue_positions(position_ids[..., -1], response_length)  # (B, R) or (B, 4, R)
    kept = sorted(set(sequences.batch.keys()) - set(PROMPT_ONLY))
    kept_objects = sorted(set(sequences.non_tensor_batch) - set(PROMPT_ONLY))
    written = {
        "responses": tokens,
        "response_mask": mask,
        "input_ids": torch.cat([sequences.batch["prompts"], tokens], dim=-1),  # (B, P + R)
        "attention_mask": torch.cat([sequences.batch["prompt_mask"], mask], dim=-1),  # (B, P + R)
        "position_ids": torch.cat([position_ids, response_positions], dim=-1),
        "rollout_log_probs": log_probs,
    }
    finish_reasons = {"finish_reason": objects([response.finish_reason for response in responses])}
    joined = sequences.select(batch_keys=kept, non_tensor_batch_keys=kept_objects)
    return joined.merge(DataProto.from_dict(written, non_tensors=finish_reasons))
