# SPDX-License-Identifier: Apache-2.0
"""Estimate pass@k from more than k responses."""

import math
from collections.abc import Sequence


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of pass@k for a prompt with `correct` of `n` responses right.

        1 - C(n - c, k) / C(n, k)

    The mean of 1 - (1 - c / n)^k would be too low: it draws with replacement.

    Source: Evaluating Large Language Models Trained on Code, section 2.1 (https://arxiv.org/abs/2107.03374).
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(
            f"pass@k needs 1 <= k <= n and 0 <= correct <= n, got k={k}, n={n}, {correct} correct"
        )
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """Return the mean over prompts, given as (n, correct); None if no prompt has k responses."""
    chances = [pass_at_k(n, correct, k) for n, correct in counts if n >= k]
    return sum(chances) / len(chances) if chances else None


def powers_up_to(n: int) -> list[int]:
    """Return 1, 2, 4, ... below n, and n."""
    return sorted({*(2**exponent for exponent in range(n.bit_length()) if 2**exponent < n), n})
