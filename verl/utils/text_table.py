# SPDX-License-Identifier: Apache-2.0
"""Tables of plain text."""

from collections.abc import Sequence


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
