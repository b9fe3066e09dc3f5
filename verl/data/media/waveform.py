# SPDX-License-Identifier: Apache-2.0
"""A picture of audio, for people."""

import numpy as np
from PIL import Image, ImageDraw

SIZE = (384, 128)  # width and height in pixels
PAPER, INK, AXIS = (255, 255, 255), (31, 119, 180), (190, 190, 190)


def draw_waveform(samples: np.ndarray) -> Image.Image:
    """Draw the range of the samples (N,) in each column; from -1 to 1, or to the largest beyond."""
    width, height = SIZE
    picture = Image.new("RGB", SIZE, PAPER)
    pen = ImageDraw.Draw(picture)
    pen.line((0, height / 2, width, height / 2), fill=AXIS)
    top = max(1.0, float(np.abs(samples).max(initial=0.0)))
    bounds = np.linspace(0, len(samples), width + 1).astype(int)
    for column in range(width):
        part = samples[bounds[column] : max(bounds[column + 1], bounds[column] + 1)]
        if len(part):
            low, high = (height / 2 * (1 - value / top) for value in (part.min(), part.max()))
            pen.line((column, high, column, low), fill=INK)
    return picture
