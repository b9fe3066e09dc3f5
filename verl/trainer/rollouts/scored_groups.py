# SPDX-License-Identifier: Apache-2.0
"""Groups of sequences whose scores are known: chosen, joined, carried from one step to the next, stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.rollouts.scores import Values, join_values
from verl.utils.plain_data import encode

PREFIX = "score/"  # of the columns that hold the values of the reward function in a file


@dataclass(frozen=True)
class ScoredGroups:
    """G groups of n sequences each, the responses to a prompt next to each other, with their scores.

    Example::

        informative = groups.select(torch.tensor([0, 3]))  # the first and the fourth prompt
        informative.scores(informative.values["overall"])  # (2, n)
    """

    sequences: DataProto  # G * n rows
    values: Values  # of the reward function, one number for each row
    group_size: int  # n

    def __len__(self) -> int:
        """The number of groups."""
        return len(self.sequences) // self.group_size

    def select(self, groups: Tensor) -> "ScoredGroups":
        """The groups of these numbers (K,) int64, copied."""
        rows = (groups.unsqueeze(-1) * self.group_size + torch.arange(self.group_size)).flatten()
        numbers = rows.tolist()
        values = {key: [column[row] for row in numbers] for key, column in self.values.items()}
        return ScoredGroups(self.sequences[rows], values, self.group_size)

    @staticmethod
    def concat(parts: Sequence["ScoredGroups"]) -> "ScoredGroups":
        """Join groups of the same size, in order."""
        sequences = DataProto.concat([part.sequences for part in parts])
        return ScoredGroups(sequences, join_values([part.values for part in parts]), parts[0].group_size)

    def split(self, first: int) -> tuple["ScoredGroups", "ScoredGroups"]:
        """The first groups, which share memory with these, and a copy of the others."""
        end = first * self.group_size
        values = {key: column[:end] for key, column in self.values.items()}
        head = ScoredGroups(self.sequences[:end], values, self.group_size)
        return head, self.select(torch.arange(first, len(self)))

    def check_storable(self) -> None:
        """Find out now whether `save` will work.

        Raises:
            TypeError: A column holds something that cannot be stored; it is named.
        """
        for key, column in self.sequences.non_tensor_batch.items():
            encode(column, f"column `{key}` of the training rows")

    def save(self, path: Path) -> None:
        """Write the groups to one file, which holds no code."""
        scores = {
            PREFIX + key: torch.tensor(column, dtype=torch.float64) for key, column in self.values.items()
        }
        about = {"group_size": self.group_size, "keys": list(self.values)}
        self.sequences.merge(DataProto.from_dict(scores, meta_info=about)).save_to_disk(path)

    @staticmethod
    def load(path: Path) -> "ScoredGroups":
        """Read what `save` wrote."""
        stored = DataProto.load_from_disk(path)
        group_size, keys = stored.meta_info.pop("group_size"), stored.meta_info.pop("keys")
        scores = stored.pop([PREFIX + key for key in keys]).batch
        return ScoredGroups(stored, {key: scores[PREFIX + key].tolist() for key in keys}, group_size)
