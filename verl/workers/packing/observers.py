# SPDX-License-Identifier: Apache-2.0
"""Observers of a forward pass: they watch a model run over packed tokens, and leave columns for the rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from verl.distributed.token_sharding import ShardPlan, SPRows
from verl.protocol import DataProto
from verl.utils.registry import Registry

OBSERVERS: Registry[Any] = Registry("worker.actor.observers")  # of files only
Columns = dict[str, Tensor]  # (b, ...) each, of the rows of a micro batch


class PackedRows(NamedTuple):
    """Where the tokens of a micro batch are in its packed sequence, on CPU."""

    mask: Tensor  # (b, T)
    positions: Tensor  # (b, T): packed position of each token
    length: int  # packed tokens
    plan: ShardPlan | None  # None where this rank runs the whole sequence


class PassTokens(NamedTuple):
    """The n tokens of a pass on this rank, on the device; a shared prompt's belong to several rows."""

    mask: Tensor  # (b, T)
    response_length: int  # R; responses are the last columns of the mask
    tokens: SPRows  # of the M tokens of all rows, one row after another
    rows: Tensor  # (m,) int64: row of each that this rank runs
    weights: Tensor  # (n,) int64: rows that a token belongs to; zero for padding and dummies

    def row_sums(self, values: Tensor) -> Tensor:
        """Sum values of this rank's tokens over each row, on all ranks: (n, V) to (b, V)."""
        sums = values.new_zeros(len(self.mask), values.shape[-1])
        sums.index_add_(0, self.rows, values[self.tokens.local])
        if self.tokens.owned is not None:
            dist.all_reduce(sums, group=self.tokens.sp.group)
        return sums

    def padded(self, values: Tensor, fill: float = 0) -> Tensor:
        """Put values of tokens in their rows, those of all ranks: (n, ...) to (b, T, ...)."""
        found = self.tokens.gather(values[self.tokens.local])
        padded = found.new_full((*self.mask.shape, *found.shape[1:]), fill)
        padded[self.mask.bool()] = found
        return padded

    def of_responses(self, values: Tensor) -> Tensor:
        """Return the values of response tokens, zero on padding: (n, ...) to (b, R, ...)."""
        return self.padded(values)[:, self.mask.shape[1] - self.response_length :]


class ForwardObserver:
    """Watches the forward passes of a model.

    Ranks that share a sequence watch its passes together. A backward pass may run modules again, outside of
    `watching`.

    Attributes:
        reads: Columns of the batch that `inputs` reads.
        columns: Columns (b, R) that the observer of a file leaves: a mean over response tokens is logged.
    """

    reads: Sequence[str] = ()
    columns: Sequence[str] = ()

    def inputs(self, micro: DataProto, packed: PackedRows) -> Any:
        """Return what `watching` reads of a micro batch; tensors reach the device with those of the model."""
        return None

    @contextmanager
    def watching(self, tokens: PassTokens, inputs: Any) -> Iterator[Columns]:
        """Watch the pass in the block; after it, put columns into the yielded dict."""
        yield {}
