# SPDX-License-Identifier: Apache-2.0
"""Parameter groups: what is trained, and the learning rate of each part of it."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn


def parameter_groups(
    model: nn.Module, lr: float, factors: Mapping[str, float], option: str
) -> list[dict[str, Any]]:
    """Divide the trained parameters into groups for an optimizer of torch.

    The first group has the rate `lr`, and is there even if the others take all of its parameters: the rate
    that is reported is its rate. Frozen parameters are in none. A model on the meta device will do.

    Args:
        model: `requires_grad` says what is trained.
        lr: Peak learning rate.
        factors: `lr_factors`: factor of `lr` by a regular expression, found anywhere in a parameter's name;
            the first that is found decides.
        option: Section of the options, for errors.

    Returns:
        Dictionaries with `params`, `lr` and `pattern`, which is None for the first.

    Raises:
        ValueError: Nothing is trained, or a pattern decides on no trained parameter.
    """
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not trained:
        raise ValueError("the model has no parameter to train: everything is frozen")
    groups: list[dict[str, Any]] = [{"params": [], "lr": lr, "pattern": None}]
    groups += [{"params": [], "lr": lr * factor, "pattern": pattern} for pattern, factor in factors.items()]
    for name, param in trained.items():
        found = (group for group in groups[1:] if re.search(group["pattern"], name))
        next(found, groups[0])["params"].append(param)
    for group in groups[1:]:
        if not group["params"]:
            pattern = group["pattern"]
            raise ValueError(f"`{option}.lr_factors` ({pattern}) {_why_unused(model, pattern)}")
    return groups


def _why_unused(model: nn.Module, pattern: str) -> str:
    """The rule that a pattern breaks, and what to do."""
    named = dict(model.named_parameters())
    found = [name for name in named if re.search(pattern, name)]
    if not found:
        return f"must be found in a parameter's name; they are such as {next(iter(named))}"
    if not any(named[name].requires_grad for name in found):
        return f"must be found in the name of a trained parameter, but {found[0]} and its like are frozen"
    return f"must come before the patterns that take all of its parameters, such as {found[0]}"
