# SPDX-License-Identifier: Apache-2.0
"""Teachers of the rows: the column that names them, the prompts that they see, and their tokenizers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.batch_keys import TEACHER_IDS, TEACHER_MEDIA, TEACHER_PROMPTS
from verl.config.distillation import TEACHERS, DistillationConfig, TeacherConfig
from verl.data.bad_rows import BadRowError
from verl.data.media.sizes import MediaOptions
from verl.data.plain_files import Row
from verl.data.readers import load_tokenizer
from verl.utils.plain_data import objects

PREFIX = "teacher_"
MAX_SHOWN = 3
TEXTS = (  # whose tokens show the rules by which tokenizers divide texts
    "What is 12,345 + 6.78? Let me think step by step.\n\n",
    "def f(x):\n    return {'a': x ** 2}  # \u00e9t\u00e9",
    "\u4f60\u597d\uff0c\u4e16\u754c \u043f\u0440\u0438\u0432\u0435\u0442 \U0001f642",
    "  \\frac{1}{2} \\boxed{42}",
)


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


def media_of_teacher(teacher: TeacherConfig, options: MediaOptions) -> MediaOptions:
    if teacher.num_video_frames is None:
        return options
    tokens = teacher.tokens_per_frame or options.tokens_per_frame
    return replace(options, num_video_frames=teacher.num_video_frames, tokens_per_frame=tokens)


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
        columns = {TEACHER_MEDIA: seen["multi_modal_data"]}
        for name in ("prompts", "prompt_mask", "prompt_position_ids"):
            values = torch.as_tensor(seen[name])
            columns[f"{PREFIX}{name}"] = F.pad(values, (self.width - values.shape[-1], 0)).numpy()
        return columns

    @staticmethod
    def columns(items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | np.ndarray]:
        stacked = {
            name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in TEACHER_PROMPTS
        }
        return {**stacked, TEACHER_MEDIA: objects(item[TEACHER_MEDIA] for item in items)}


def check_teacher_tokens(distillation: DistillationConfig, policy_tokenizer: Any) -> None:
    """Raise a ValueError unless each teacher's tokenizer is the policy's."""
    for name, teacher in distillation.teachers.items():
        option, path = f"{TEACHERS}.{name}", teacher.tokenizer_path
        assert path is not None, "filled in when the config was checked"
        template = policy_tokenizer.chat_template  # the policy's is used, so that its own may be missing
        tokenizer = load_tokenizer(
            path, None, teacher.trust_remote_code, default_template=template, option=option
        )
        for reason in differences(policy_tokenizer, tokenizer):
            raise ValueError(
                f"`{option}` ({path}) must have the tokenizer of the policy: {reason}; choose a"
                " teacher of the policy's family"
            )


def differences(policy_tokenizer: Any, tokenizer: Any) -> Iterator[str]:
    """Yield why a teacher cannot read the policy's tokens. It may have more tokens than the policy."""
    policy, teacher = policy_tokenizer.get_vocab(), tokenizer.get_vocab()
    other = [token for token in policy if teacher.get(token) != policy[token]]
    if other:
        first = sorted(other, key=policy.__getitem__)[:MAX_SHOWN]
        shown = ", ".join(f"{token!r} is {policy[token]} and {teacher.get(token)}" for token in first)
        yield f"{len(other)} of {len(policy)} tokens have another id or none, such as: {shown}"
        return
    for text in TEXTS:
        pair = [one.encode(text, add_special_tokens=False) for one in (policy_tokenizer, tokenizer)]
        if pair[0] != pair[1]:
            yield f"it divides {text!r} into {len(pair[1])} tokens, and the policy's into {len(pair[0])}"
            return
