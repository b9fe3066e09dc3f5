# SPDX-License-Identifier: Apache-2.0
"""Prompts in, sequences out: samples responses with the engines and has them scored as they finish.

`RolloutCollector` calls `Sampler` until a step has its prompts; validation uses it with other options.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from verl.config.data import DataConfig
from verl.config.worker import WorkerConfig
from verl.protocol import DataProto, objects
from verl.rewards.manager import NoRewardFunction, RewardJob, RewardManager, TurnRewards
from verl.trainer.rollouts.engines import Engines
from verl.trainer.rollouts.scores import Scoring, Values, unscored
from verl.trainer.rollouts.sequences import draft_columns, join_responses
from verl.workers.rollout.interface import FinishedResponse, SamplingOptions

Progress = Callable[[int, int, str], None]  # done, total, unit
OnScored = Callable[[DataProto, Values], None]  # prompts, and the scores of their responses

SAMPLED_FROM = ["uid", "raw_prompt_ids", "multi_modal_data"]


class Sampler:
    """Samples responses to prompts and hands them to the reward function as they finish."""

    shown_columns: ClassVar[tuple[str, ...]] = ()  # columns of the batch that `shown_response` reads

    def __init__(
        self,
        data: DataConfig,
        worker: WorkerConfig,
        engines: Engines,
        reward: RewardManager | NoRewardFunction,
        tokenizer: Any,
        on_progress: Progress | None = None,
        on_scored: OnScored | None = None,
    ) -> None:
        self.engines = engines
        self.reward = reward
        self.tokenizer = tokenizer
        self.on_progress, self.on_scored = on_progress, on_scored
        self.prompt_length, self.response_length = data.max_prompt_length, data.max_response_length
        self.skip_special_tokens = worker.reward.skip_special_tokens
        rollout = worker.rollout
        multi_turn = rollout.multi_turn
        self.converses = multi_turn.enable
        self.counts_drafts = rollout.speculative.is_used
        self.columns = None if self.converses else SAMPLED_FROM  # that engines read; tools may read all
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
        apart: dict[str, Any] = {"n": 1, "is_apart": True}
        self.validation_options = self.options.override(apart | rollout.val_override_config)

    def sample(self, prompts: DataProto, options: SamplingOptions) -> tuple[DataProto, Scoring]:
        """Sample `options.n` responses to every prompt; those to a prompt become adjacent rows."""
        n, job, columns = options.n, self.reward.start(), reward_columns(prompts)
        row_of = {uid: row for row, uid in enumerate(prompts.non_tensor_batch["uid"])}
        total = len(prompts) * n
        responses: dict[int, FinishedResponse] = {}  # by the row of the sequence
        unfinished = dict.fromkeys(row_of, n)
        sampled_from = prompts.select([], self.columns)
        for finished in self.engines.generate(sampled_from, options):
            for response in finished:
                row = row_of[response.uid]
                responses[row * n + response.sample] = response
                unfinished[response.uid] -= 1
                # A `sequential` function gets each response at once, others those to a prompt together.
                if self.reward.reward_type == "sequential":
                    job.submit([row * n + response.sample], [self._inputs(response, columns[row])])
                elif unfinished[response.uid] == 0:
                    group = range(row * n, (row + 1) * n)
                    job.submit(group, [self._inputs(responses[index], columns[row]) for index in group])
            self.report(total - sum(unfinished.values()), total, "responses")
        assert not any(unfinished.values()), f"the engine must finish every response, got {unfinished}"
        in_order = [responses[row] for row in range(total)]
        sequences, scoring = self._join(prompts, in_order, job, options.max_tokens)
        return sequences, scoring if options.is_greedy else self._watched(prompts, scoring)

    def join_group(self, prompt: DataProto, responses: list[FinishedResponse]) -> tuple[DataProto, Scoring]:
        """Join a prompt and its finished responses, in the order of samples, and have them scored."""
        job, rows = self.reward.start(), range(len(responses))
        [columns] = reward_columns(prompt)
        job.submit(rows, [self._inputs(response, columns) for response in responses])
        sequences, scoring = self._join(prompt, responses, job, self.response_length)
        return sequences, self._watched(prompt, scoring)

    def report(self, done: int, total: int, unit: str) -> None:
        """Show progress, if it is shown."""
        if self.on_progress is not None:
            self.on_progress(done, total, unit)

    def shown_response(self, sequences: DataProto, row: int) -> str:
        """Return a response of a batch for people to read."""
        mask = sequences.batch["response_mask"][row].bool()
        return self.decode(sequences.batch["responses"][row][mask].tolist())

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)

    def _join(
        self,
        prompts: DataProto,
        responses: list[FinishedResponse],
        job: RewardJob | TurnRewards,
        max_tokens: int,
    ) -> tuple[DataProto, Scoring]:
        n, pad_token_id = len(responses) // len(prompts), self.tokenizer.pad_token_id
        width = self._width(responses, max_tokens)
        sequences = join_responses(prompts, responses, n, width, pad_token_id)
        if self.counts_drafts:
            sequences = sequences.merge(draft_columns(responses))
        failed = [row for row, one in enumerate(responses) if one.trajectory and one.trajectory.is_masked]
        return sequences, Scoring(partial(unscored, job.result, failed))

    def _watched(self, prompts: DataProto, scoring: Scoring) -> Scoring:
        return scoring if self.on_scored is None else scoring.shown_to(partial(self.on_scored, prompts))

    def _width(self, responses: Sequence[FinishedResponse], max_tokens: int) -> int:
        """Return the number of columns of a batch of responses: more where validation may sample more."""
        return max(self.response_length, max_tokens)

    def _inputs(self, response: FinishedResponse, columns: dict[str, Any]) -> dict[str, Any]:
        """Return what the reward function sees of a response, with the columns of its prompt."""
        own = {"response": self.decode(response.token_ids), "response_length": len(response.token_ids)}
        return columns | own | conversation_columns(response)


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
    turns, prompt = trajectory.plain_turns(), trajectory.prompt
    return ({} if prompt is None else {"prompt": prompt.text}) | {
        "messages": list(trajectory.messages),
        "contexts": [list(context.messages) for context in trajectory.contexts],
        "num_turns": len(turns),
        "tool_calls": [call for turn in turns for call in turn["calls"]],
        "tool_rewards": [turn["reward"] for turn in turns],
    }
