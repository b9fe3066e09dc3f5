# SPDX-License-Identifier: Apache-2.0
"""Tables and histograms of plain text, for commands that report on a terminal."""

import math
from collections.abc import Sequence

BAR = 40  # characters of the longest bar


def table(rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Rows as aligned lines: the first column to the left, numbers and what else follows to the right.

    Args:
        rows: Cells, as many in each row; the first row is the heading.
        indent: What every line begins with.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for first, *others in texts:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append(indent + "  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "".join(f"{line}\n" for line in lines)


def histogram(values: Sequence[int], limit: int, num_bins: int = 10, indent: str = "  ") -> str:
    """How many of the values lie where: one line for each of up to `num_bins` ranges of equal width.

    Args:
        values: At least one integer.
        limit: Ranges that reach beyond it are marked.
        num_bins: Ranges at most.
        indent: What every line begins with.
    """
    lowest, highest = min(values), max(values)
    width = -(-(highest - lowest + 1) // num_bins)  # of a range, so that the last one holds the highest
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
    """The smallest value that at least this share, in (0, 1], of the values do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]
