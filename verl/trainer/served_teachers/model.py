# SPDX-License-Identifier: Apache-2.0
"""A teacher behind vLLM's OpenAI-compatible server, which gives log-probs of a text that it is sent."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from verl.rewards.graders.endpoint import Endpoint
from verl.trainer.served_teachers.answers import TokenAnswers

Entries = Mapping[str, Mapping[str, Any]]  # of a position, by token: `logprob` and `rank`


@dataclass(eq=False)
class TeacherModel(Endpoint):
    """A model that is asked for the log-probs of prompts; concurrency and retries are those of a judge.

    Example::

        teacher = TeacherModel("http://host:8000/v1", "served-name", "math")
        answers = await teacher.ask(prompt_ids + response_ids, start=len(prompt_ids), k=0)
        answers.log_probs  # (len(response_ids),) at temperature 1
    """

    name: str  # in `distillation.teacher_models`

    eases: ClassVar[str] = "`max_concurrency`"

    def __str__(self) -> str:
        return f"the teacher `{self.name}` ({self.model!r} at {self.base_url})"

    async def ask(self, ids: Sequence[int], start: int, k: int) -> TokenAnswers:
        """Return the log-probs of the tokens from `start` on, and the `k` most likely ones at each.

        Raises:
            RuntimeError: The server failed on every attempt, or does not give log-probs of prompts.
            ValueError: It refuses the request.
            TimeoutError, ConnectionError: It did not answer, or cannot be reached.
        """
        body = {
            "model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0,
            "prompt_logprobs": k,
        }  # fmt: skip
        entries = json.loads(await self.cached([body], "completions", body))
        if len(entries) != len(ids):
            raise RuntimeError(f"{self} answered about {len(entries)} tokens, and was asked about {len(ids)}")
        pairs = list(zip(ids[start:], entries[start:], strict=True))
        top = [self._top(token, given, k) for token, given in pairs]
        return TokenAnswers(
            np.array([given[str(token)]["logprob"] for token, given in pairs], np.float32),
            np.array([[int(one) for one in ids] for ids, _ in top], np.int32).reshape(len(top), k),
            np.array([values for _, values in top], np.float32).reshape(len(top), k),
        )

    def text_of(self, answer: Any) -> str:
        """Return the log-probs of an answer as text."""
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
        except (KeyError, IndexError, TypeError):
            entries = None
        if not isinstance(entries, list):
            raise RuntimeError(
                f"{self} answered without `prompt_logprobs`: serve it with vLLM, whose `/v1/completions`"
                " gives them"
            )
        return json.dumps(entries)

    def _top(self, token: int, given: Entries, k: int) -> tuple[list[str], list[float]]:
        """Return the k most likely tokens of a position and their log-probs."""
        if str(token) not in given or len(given) < k:
            raise RuntimeError(
                f"{self} gave {len(given)} log-probs at token {token}, which must be among them, as well as"
                f" the {k} most likely tokens"
            )
        ids = sorted(given, key=lambda one: -given[one]["logprob"])[:k]
        return ids, [given[one]["logprob"] for one in ids]

    def _remedy(self, status: int) -> str:
        if status in (401, 403, 404):
            return super()._remedy(status)
        return "its `--max-model-len` must exceed prompt and response, and its `--max-logprobs` reach `topk`"
