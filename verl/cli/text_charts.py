# SPDX-License-Identifier: Apache-2.0
"""Histograms of plain text, for commands that report on a terminal."""

import math
from collections.abc import Sequence

BAR = 40  # characters of the longest bar


def histogram(values: Sequence[int], limit: int, num_bins: int = 10, indent: str = "  ") -> str:
    """Draw the counts of values in up to `num_bins` ranges of equal width; marks ranges beyond `limit`."""
    lowest, highest = min(values), max(values)
    width = -(-(highest - lowest + 1) // num_bins)  # of a range; the last one has the highest value
    counts = [0] * ((highest - lowest) // width + 1)
    for value in values:
        counts[(value - lowest) // width] += 1
    digits, most = len(str(highest)), max(counts)
    lines = []
    for number, count in enumerate(counts):
        start = lowest + number * width
        end = min(start + width - 1, highest)
        bar = "#" * -(-count * BAR // most)
        mark = f"  > {limit}" if count and end > limit else ""
        lines.append(f"{indent}{start:{digits}} - {end:{digits}}  {bar:{BAR}} {count}{mark}\n")
    return "".join(lines)


def quantile(values: Sequence[int], share: float) -> int:
    """Return the smallest value that at least a share in (0, 1] of the values do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]
