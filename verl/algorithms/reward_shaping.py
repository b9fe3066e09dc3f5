# SPDX-License-Identifier: Apache-2.0
"""What is added to the score of a response for how it was written, not for what it says."""

from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer_length: int, factor: float) -> Tensor:
    """Penalty for responses that come close to the longest one allowed (soft overlong punishment).

        penalty_i = -factor * clamp((length_i - (max_length - buffer_length)) / buffer_length, 0, 1)

    Zero up to the start of the buffer, then falling in a straight line to -factor at `max_length`.

    Source: DAPO, section 3.4, equation 13 (https://arxiv.org/abs/2503.14476).

    Args:
        lengths: Tokens of each response, (B,), any integer or floating type.
        max_length: Tokens of a response at most.
        buffer_length: Tokens before `max_length` over which the score falls, in [1, max_length].
        factor: What a response of `max_length` tokens loses, at least 0.

    Returns:
        (B,) float32, at most zero.

    Raises:
        ValueError: The buffer is empty or longer than the longest response.
    """
    if not 1 <= buffer_length <= max_length:
        raise ValueError(
            f"`worker.reward.overlong_buffer_length` must be from 1 to `data.max_response_length`"
            f" ({max_length}) to penalise, got {buffer_length}"
        )
    into_buffer = (lengths - (max_length - buffer_length)).float() / buffer_length  # (B,)
    return into_buffer.clamp(0.0, 1.0) * -factor
