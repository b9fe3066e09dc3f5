# SPDX-License-Identifier: Apache-2.0
"""Tables and histograms of plain text."""

import math
from collections.abc import Sequence

BAR = 40  # characters of the longest bar of a histogram


def table(rows: Sequence[Sequence[object]], indent: str = "  ", *, has_remarks: bool = False) -> str:
    """Align rows of equally many cells: the first column left, the others right, remarks at the end left."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for first, *others in texts:
        remark = [others.pop()] if has_remarks else []
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=False)]
        lines.append(indent + "  ".join([first.ljust(widths[0]), *cells, *remark]).rstrip())
    return "".join(f"{line}\n" for line in lines)


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
