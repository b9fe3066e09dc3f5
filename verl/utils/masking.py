# SPDX-License-Identifier: Apache-2.0
"""Reductions over masked tensors, and a guard against unwanted broadcasting."""

from torch import Tensor


def check_same_shape(**tensors: Tensor | None) -> None:
    """Raise a ValueError unless all given tensors share one shape; `None` is skipped."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"tensors must share one shape, got {listed}")


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask`, of the same shape, is not zero. Masked values may be infinite or nan."""
    check_same_shape(values=values, mask=mask)
    kept = values.masked_fill(mask == 0, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is one: `sum(values * mask) / max(sum(mask), 1)`."""
    total = masked_sum(values, mask, dim)
    count = mask.sum() if dim is None else mask.sum(dim)
    return total / count.clamp(min=1)
