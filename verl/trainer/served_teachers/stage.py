# SPDX-License-Identifier: Apache-2.0
"""The stage of a step that asks teachers behind servers about the responses."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from verl.batch_keys import TEACHER_IDS, TEACHER_LOG_PROBS, TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS
from verl.config.distillation import TEACHERS, DistillationLossConfig
from verl.protocol import DataProto
from verl.trainer.served_teachers.answers import TokenAnswers

MEDIA = ("multi_modal_data", "observation_media")


class Teacher(Protocol):
    """Answers about tokens; see `TeacherModel`."""

    name: str

    async def ask(self, ids: Sequence[int], start: int, k: int) -> TokenAnswers: ...


class ServedTeachers:
    """Adds the answers of served teachers about each response token to a batch.

    Args:
        teachers: By their numbers in `distillation.teacher_models`; the rows of others stay as they are.
    """

    def __init__(self, teachers: Mapping[int, Teacher], loss: DistillationLossConfig) -> None:
        self.teachers, self.loss = teachers, loss
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
            for name, values in self._values(given).items():
                columns[name][row, : len(values)] = values
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

    def _values(self, given: TokenAnswers) -> dict[str, Tensor]:
        if not self.k:
            return {TEACHER_LOG_PROBS: torch.from_numpy(given.log_probs)}
        return {
            TEACHER_TOP_IDS: torch.from_numpy(given.top_ids),
            TEACHER_TOP_LOG_PROBS: torch.from_numpy(given.top_log_probs),
        }

    async def _ask(self, batch: DataProto, own: Mapping[int, Teacher]) -> list[TokenAnswers]:
        tensors, width = batch.batch, batch.batch["responses"].shape[1]
        masks = tensors["attention_mask"].bool()  # (B, T)
        starts = masks[:, :-width].sum(-1).tolist()  # lengths of the prompts
        return await asyncio.gather(
            *(
                teacher.ask(tensors["input_ids"][row][masks[row]].tolist(), starts[row], self.k)
                for row, teacher in own.items()
            )
        )


def check_text(batch: DataProto, row: int, teacher: Teacher) -> None:
    """Raise a ValueError if a row shows media: a server is sent tokens, and these do not carry them."""
    shown = [name for name in MEDIA if name in batch.non_tensor_batch and batch.non_tensor_batch[name][row]]
    if shown:
        raise ValueError(
            f"`{TEACHERS}.{teacher.name}.server` is asked about text only, and a row has images, videos or"
            f" audio (`{shown[0]}`): load the teacher instead, `{TEACHERS}.{teacher.name}.model_path`, or"
            " leave such rows out of the data"
        )
