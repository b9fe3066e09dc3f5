# SPDX-License-Identifier: Apache-2.0
"""The column of the data that names the teacher of a row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.batch_keys import TEACHER_IDS
from verl.config.distillation import DistillationConfig
from verl.data.bad_rows import BadRowError
from verl.data.plain_files import Row


@dataclass(frozen=True)
class TeacherColumn:
    """Assigns each row to a teacher by the value of a column."""

    column: str
    numbers: Mapping[str, int]  # of each teacher in the order of the options, by the column's value

    @classmethod
    def of(cls, distillation: DistillationConfig) -> "TeacherColumn | None":
        """Return None without teachers, or with one, which teaches every row."""
        if len(distillation.teachers) < 2:
            return None
        return cls(distillation.teacher_key, {key: number for number, key in enumerate(distillation.keys)})

    def number(self, row: Row) -> int:
        """Return the number of a row's teacher.

        Raises:
            BadRowError: The row names no teacher.
        """
        value = row.get(self.column)
        if not isinstance(value, str) or value not in self.numbers:
            raise BadRowError(
                f"`{self.column}` must name a teacher, one of {list(self.numbers)}, got {value!r}: set"
                " `distillation.teacher_key` to the column that does, or `key` of a teacher to the value"
            )
        return self.numbers[value]

    def tensors(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        return {TEACHER_IDS: torch.tensor([item[TEACHER_IDS] for item in items])}  # (B,)
