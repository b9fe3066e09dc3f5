# SPDX-License-Identifier: Apache-2.0
"""Terms added to the score of a response that do not depend on its content."""

from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer_length: int, factor: float) -> Tensor:
    """Penalty for responses close to the maximum length (soft overlong punishment), (B,) float32.

        penalty_i = -factor * clamp((length_i - (max_length - buffer_length)) / buffer_length, 0, 1)

    Lengths are in tokens.

    Source: DAPO, section 3.4, equation 13 (https://arxiv.org/abs/2503.14476).
    """
    if not 1 <= buffer_length <= max_length:
        raise ValueError(
            f"`worker.reward.overlong_buffer_length` must be from 1 to `data.max_response_length`"
            f" ({max_length}) to penalize, got {buffer_length}"
        )
    into_buffer = (lengths - (max_length - buffer_length)).float() / buffer_length  # (B,)
    return into_buffer.clamp(0.0, 1.0) * -factor
