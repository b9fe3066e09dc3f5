# SPDX-License-Identifier: Apache-2.0
"""Loss of the critic."""

from typing import NamedTuple

import torch
from torch import Tensor

from verl.utils.masking import check_same_shape


class ValueLoss(NamedTuple):
    """Result of the value loss."""

    per_token: Tensor  # (B, R); padding holds zeros without gradient
    statistics: dict[str, Tensor]  # name -> (B, R), detached; means over response tokens are logged


def clipped_value_loss(
    values: Tensor,  # (B, R) float32, from the critic being trained; carries the gradient
    old_values: Tensor,  # (B, R) float32, used for the advantages
    returns: Tensor,  # (B, R) float32
    response_mask: Tensor,  # (B, R), one on response tokens
    cliprange_value: float = 0.5,  # bound on the change of a value
) -> ValueLoss:
    """Half the squared error of the values, or of the values clipped around the old ones if that is larger.

        clipped = clip(values, old_values - c, old_values + c)
        L = 1/2 max((values - returns)^2, (clipped - returns)^2)

    The gradient is zero where a value has moved towards its return by more than c. `vf_clipfrac` counts
    tokens with the larger clipped error, `vpred_mean` is the mean value. Padding (`response_mask` 0) may hold
    anything, even NaN.

    Source: "Implementation Matters in Deep RL", section 2 (https://arxiv.org/abs/2005.12729).
    """
    check_same_shape(values=values, old_values=old_values, returns=returns, response_mask=response_mask)
    padding = response_mask == 0  # (B, R)
    values, old_values, returns = (each.masked_fill(padding, 0) for each in (values, old_values, returns))

    clipped = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    error = (values - returns).square()
    clipped_error = (clipped - returns).square()
    statistics = {"vf_clipfrac": (clipped_error > error).float(), "vpred_mean": values.detach()}
    return ValueLoss(0.5 * torch.maximum(error, clipped_error), statistics)
