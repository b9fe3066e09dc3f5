# SPDX-License-Identifier: Apache-2.0
"""Many small pictures on one: what a model sees of a prompt's images and frames, for a person to look at."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageOps

TILE = 192  # pixels of a tile's side
LABEL = 16  # pixels below it for its label
GAP = 4  # pixels around each
COLUMNS = 8
PAPER, INK = (255, 255, 255), (0, 0, 0)


class Tile(NamedTuple):
    """One picture of a sheet and what is written below it."""

    picture: Image.Image
    label: str


def contact_sheet(tiles: Sequence[Tile]) -> Image.Image:
    """Put pictures on one, eight in a line, each scaled to fit its tile.

    Args:
        tiles: At least one.

    Returns:
        An RGB image of 196 x 212 pixels for each tile, with 4 more on the left and on the top.
    """
    columns = min(len(tiles), COLUMNS)
    lines = -(-len(tiles) // COLUMNS)
    sheet = Image.new("RGB", (GAP + columns * (TILE + GAP), GAP + lines * (TILE + LABEL + GAP)), PAPER)
    pen = ImageDraw.Draw(sheet)
    for number, tile in enumerate(tiles):
        line, column = divmod(number, COLUMNS)
        left, top = GAP + column * (TILE + GAP), GAP + line * (TILE + LABEL + GAP)
        sheet.paste(ImageOps.contain(tile.picture.convert("RGB"), (TILE, TILE)), (left, top))
        pen.text((left, top + TILE + 2), tile.label, fill=INK)
    return sheet


def save_sheet(tiles: Sequence[Tile], path: Path) -> None:
    """Write a contact sheet as PNG, complete or not at all; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        contact_sheet(tiles).save(part, format="PNG")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
