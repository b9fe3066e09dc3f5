# SPDX-License-Identifier: Apache-2.0
"""The stage of served teachers: asks them for the log-probs of responses."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.batch_keys import TEACHER_IDS, TEACHER_LOG_PROBS, TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS
from verl.config.distillation import TEACHERS, DistillationLossConfig
from verl.protocol import DataProto, prompt_lengths
from verl.rewards.graders.endpoint import Endpoint
from verl.rewards.turns import MAX_FLOAT32

MAX_ID = 2**31 - 1  # of int32
ROUNDING = 1e-3  # a log-prob of 0 that was computed in low precision may be above it
# In the order of `TokenAnswers`.
ANSWERED: tuple[str, ...] = (TEACHER_LOG_PROBS, TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS)
MEDIA = ("multi_modal_data", "observation_media")


class TokenAnswers(NamedTuple):
    """Answers about n tokens of a text."""

    log_probs: np.ndarray  # (n,) float32: of these tokens
    top_ids: np.ndarray  # (n, k) int32: the most likely tokens, by falling probability
    top_log_probs: np.ndarray  # (n, k) float32


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
        found = [self._log_probs(token, given, k) for token, given in pairs]
        return TokenAnswers(
            np.array([value for value, _, _ in found], np.float32),
            np.array([ids for _, ids, _ in found], np.int32).reshape(len(found), k),
            np.array([values for _, _, values in found], np.float32).reshape(len(found), k),
        )

    def text_of(self, answer: Any) -> str:
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

    def _log_probs(self, token: int, given: Any, k: int) -> tuple[float, list[int], list[float]]:
        """Return the log-prob of a position's token, the k most likely tokens and their log-probs."""
        try:
            found = {int(one): float(entry["logprob"]) for one, entry in given.items()}
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise RuntimeError(f"{self} gave no log-probs at token {token}, but {given!r:.200}") from error
        for one, value in found.items():
            if not (0 <= one <= MAX_ID and -MAX_FLOAT32 <= value <= ROUNDING):
                raise RuntimeError(
                    f"{self} gave the log-prob {value} of token {one} at token {token}: it must be a finite"
                    f" number of at most 0, of a token from 0 to {MAX_ID}"
                )
        if token not in found or len(found) < k:
            raise RuntimeError(
                f"{self} gave {len(given)} log-probs at token {token}, which must be among them, as well as"
                f" the {k} most likely tokens"
            )
        ids = sorted(found, key=lambda one: -found[one])[:k]
        return found[token], ids, [found[one] for one in ids]

    def _remedy(self, status: int) -> str:
        if status in (401, 403, 404):
            return super()._remedy(status)
        return "its `--max-model-len` must exceed prompt and response, and its `--max-logprobs` reach `topk`"


class ServedTeachers:
    """Adds the answers of served teachers about each response token to a batch.

    They are given by number in `distillation.teacher_models`; the rows of others stay as they are.
    """

    def __init__(self, teachers: Mapping[int, TeacherModel], loss: DistillationLossConfig) -> None:
        self.teachers = teachers
        self.k = loss.topk if loss.is_top else 0

    def add_to(self, batch: DataProto) -> DataProto:
        """Add `teacher_log_probs` (B, R), or of a `topk` mode `teacher_top_ids` and `teacher_top_log_probs`.

        Raises:
            ValueError: A row shows media.
            RuntimeError, TimeoutError, ConnectionError: See `TeacherModel.ask`.
        """
        numbers = batch.batch.get(TEACHER_IDS, torch.zeros(len(batch), dtype=torch.int64)).tolist()
        own = {row: self.teachers[number] for row, number in enumerate(numbers) if number in self.teachers}
        for row, teacher in own.items():
            check_text(batch, row, teacher)
        columns = self._columns(batch)
        answers = asyncio.run(self._ask(batch, own))
        for row, given in zip(own, answers, strict=True):
            found = dict(zip(ANSWERED, map(torch.from_numpy, given), strict=True))
            for name, column in columns.items():
                column[row, : len(found[name])] = found[name]
        return batch.merge(columns, replace=list(columns))

    def _columns(self, batch: DataProto) -> dict[str, Tensor]:
        shape = batch.batch["responses"].shape  # (B, R)
        if not self.k:
            others = batch.batch.get(TEACHER_LOG_PROBS)
            return {TEACHER_LOG_PROBS: torch.zeros(shape) if others is None else others.clone()}
        return {
            TEACHER_TOP_IDS: torch.zeros(*shape, self.k, dtype=torch.int32),
            TEACHER_TOP_LOG_PROBS: torch.zeros(*shape, self.k),
        }

    async def _ask(self, batch: DataProto, own: Mapping[int, TeacherModel]) -> list[TokenAnswers]:
        ids, masks = batch.batch["input_ids"], batch.batch["attention_mask"].bool()  # (B, T)
        starts = prompt_lengths(batch)
        return await asyncio.gather(
            *(teacher.ask(ids[row][masks[row]].tolist(), starts[row], self.k) for row, teacher in own.items())
        )


def check_text(batch: DataProto, row: int, teacher: TeacherModel) -> None:
    """Raise a ValueError if a row shows media: a server is sent tokens, and these do not carry them."""
    shown = [name for name in MEDIA if name in batch.non_tensor_batch and batch.non_tensor_batch[name][row]]
    if shown:
        raise ValueError(
            f"`{TEACHERS}.{teacher.name}.server` is asked about text only, and a row has images, videos or"
            f" audio (`{shown[0]}`): load the teacher instead, `{TEACHERS}.{teacher.name}.model_path`, or"
            " leave such rows out of the data"
        )
