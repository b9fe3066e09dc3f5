# SPDX-License-Identifier: Apache-2.0
"""Prompts as teachers see them: with other frames of the same videos, by their own processor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.batch_keys import TEACHER_MEDIA, TEACHER_PROMPTS
from verl.config.data import DataConfig
from verl.config.distillation import DistillationConfig, TeacherConfig
from verl.data.media.sizes import MediaOptions
from verl.utils.plain_data import objects

PREFIX = "teacher_"


def media_of_teacher(teacher: TeacherConfig, options: MediaOptions) -> MediaOptions:
    """Return the options of the media that a teacher sees."""
    if teacher.num_video_frames is None:
        return options
    tokens = teacher.tokens_per_frame or options.tokens_per_frame
    return replace(options, num_video_frames=teacher.num_video_frames, tokens_per_frame=tokens)


def data_of_teacher(teacher: TeacherConfig, data: DataConfig) -> DataConfig:
    return replace(data, max_prompt_length=teacher.max_prompt_length or data.max_prompt_length)


@dataclass(frozen=True)
class TeacherPrompts:
    """The prompts of a data set as its teachers see them.

    Args:
        views: Data sets of the same rows, by the number of the teacher; others see the policy's prompt.
    """

    views: Mapping[int, Any]
    width: int  # of the longest prompts of all teachers

    @property
    def unusable(self) -> set[int]:
        """Rows that a teacher cannot use; of views, as a row does not know its teacher here."""
        return {row for view in self.views.values() for row in set(range(len(view.rows))) - set(view.indices)}

    def item(self, number: int, row_index: int, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a row's prompt for its teacher."""
        view = self.views.get(number)
        seen = item if view is None else view.item_of(row_index)
        return {
            f"{PREFIX}{name}": _left_pad(torch.as_tensor(seen[name]), self.width).numpy()
            for name in ("prompts", "prompt_mask", "prompt_position_ids")
        } | {TEACHER_MEDIA: seen["multi_modal_data"]}

    @staticmethod
    def columns(items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | np.ndarray]:
        stacked = {
            name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in TEACHER_PROMPTS
        }
        return {**stacked, TEACHER_MEDIA: objects(item[TEACHER_MEDIA] for item in items)}


def has_views(distillation: DistillationConfig) -> bool:
    return any(teacher.num_video_frames is not None for teacher in distillation.teachers.values())


def _left_pad(values: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(values, (length - values.shape[-1], 0))
