# SPDX-License-Identifier: Apache-2.0
"""Checks of a term of the policy's loss, on two tiny responses, and of an observer of its forward passes."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from verl.batch_keys import BATCH_KEYS
from verl.config.schema import value_at
from verl.models.fused_log_probs import TokenLogProbs
from verl.trainer.extensions.algorithms import check_gradient
from verl.trainer.extensions.protocol import ProtocolError, UsedExtension, check_tensor, described
from verl.workers.packing.observers import OBSERVERS, ForwardObserver
from verl.workers.roles.loss_terms import BUILT_IN, LOSS_TERMS, LossTerm, TokenLoss

SIZES = {"B": 2, "R": 3}  # of the tiny columns; any other dimension has 4
DTYPES = {"float32": torch.float32, "int32": torch.int32}


def check_term(term: Any, used: UsedExtension, config: Any) -> None:
    """Call a term on tiny log-probs and columns, and follow its gradient."""
    if not isinstance(term, LossTerm):
        raise ProtocolError(f"must be a LossTerm, got {described(term)}")
    names = [LOSS_TERMS[spec].name for spec in value_at(config, used.option)]
    if term.name in BUILT_IN or names.count(term.name) > 1:
        raise ProtocolError(f"must have a name that no other term has, got {term.name!r}")
    if "kl" in term.needs and not config.algorithm.use_reference:
        raise ProtocolError("needs `kl`, and the run has no reference: set `algorithm.disable_kl=false`")
    if "divergence" in term.needs:
        raise ProtocolError("must not need `divergence`, which belongs to the term of `distillation`")
    specs = value_at(config, "worker.actor.observers")
    columns = _columns(term, {name for spec in specs for name in OBSERVERS[spec].columns})
    log_probs = torch.tensor([[-0.5, -1.0, -2.0], [-0.1, -3.0, -0.2]], requires_grad=True)
    results = {"entropy": -2 * log_probs, "kl": log_probs.square(), "sum_squared_probs": log_probs.exp()}
    needed = {name: values for name, values in results.items() if name in term.needs}
    found = term.per_token(TokenLogProbs(log_probs, **needed), columns)
    if not isinstance(found, TokenLoss):
        raise ProtocolError(f"must return a TokenLoss, got {described(found)}")
    shape = columns["loss_mask"].shape
    check_tensor("per_token", found.per_token, shape)
    for name, (values, mask) in found.means.items():
        check_tensor(f"means[{name!r}]", values, shape)
        check_tensor(f"the mask of means[{name!r}]", mask, shape)
    if term.mask is not None:
        check_tensor("mask", term.mask(columns), shape)
    check_gradient("per_token", found.per_token, log_probs)


def check_observer(observer: Any, used: UsedExtension, config: Any) -> None:
    """Check the class of an observer, which only a model can call."""
    if not isinstance(observer, type) or not issubclass(observer, ForwardObserver):
        raise ProtocolError(f"must be a class derived from ForwardObserver, got {described(observer)}")
    if isinstance(observer.columns, str):
        raise ProtocolError(f"must have a list of names as `columns`, got {observer.columns!r}")
    specs = value_at(config, used.option)
    names = [*BATCH_KEYS, *(name for spec in specs for name in OBSERVERS[spec].columns)]
    taken = sorted(name for name in observer.columns if names.count(name) > 1)
    if taken:
        raise ProtocolError(f"must leave columns with names that nothing else has, got {taken}")


def _columns(term: LossTerm, observed: Collection[str]) -> dict[str, Tensor]:
    # ones where a column is a mask, else small numbers
    columns = {"loss_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    for name in term.needs:
        if name in TokenLogProbs._fields or name in columns:
            continue
        if name in observed:
            columns[name] = torch.ones(2, 3) / 2
            continue
        key = BATCH_KEYS.get(name)
        if key is None or key.kind == "object":
            known = sorted({*observed, *(name for name, key in BATCH_KEYS.items() if key.kind != "object")})
            raise ProtocolError(f"needs {name!r}, which is none of {[*TokenLogProbs._fields, *known]}")
        shape = [SIZES.get(size, 4) for size in key.dims[0]]
        ones = torch.ones(shape, dtype=DTYPES.get(key.kind, torch.int64))
        columns[name] = ones / 2 if key.kind == "float32" else ones
    return columns
