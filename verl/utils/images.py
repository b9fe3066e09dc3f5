# SPDX-License-Identifier: Apache-2.0
"""Images and frames as viewers and players show them, and their files opened safely.

Images are turned as their EXIF data say, put on white and converted to 8-bit RGB; frames of videos are turned
by the display matrix of their file and have square pixels. The policy, the rollout engine, judges, tools, the
viewer and the data check read every image and frame through here.
"""

import io
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
from PIL import ExifTags, Image

# That Pillow decodes itself, tried in this order; a Pillow may lack some.
IMAGE_FORMATS = "JPEG PNG WEBP GIF BMP PPM TIFF AVIF JPEG2000 DDS DIB ICNS ICO PCX PSD QOI SGI TGA"
VIDEO_FORMATS = (
    "mov", "matroska", "avi", "gif", "mpegts", "mpeg", "mpegvideo", "m4v", "h264", "hevc", "ivf", "flv",
    "asf", "ogg",
)  # fmt: skip
# By the orientation of EXIF data, from 1; the last four swap width and height.
TURNS = ("", "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM")
TURNS += ("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")


def open_image(source: str | BinaryIO) -> Image.Image:
    """Open an image of one of the formats; for PostScript, Pillow would run a program."""
    Image.init()
    return Image.open(source, formats=[name for name in IMAGE_FORMATS.split() if name in Image.OPEN])


def open_container(source: str | bytes, formats: Sequence[str] = VIDEO_FORMATS) -> Any:
    """Open a file in one of FFmpeg's formats, as PyAV's `InputContainer`.

    Other demuxers open what a file names: playlists other files, session descriptions network ports.
    """
    import av  # noqa: PLC0415 - images need none
    import av.error  # noqa: PLC0415

    safe = {"format_whitelist": ",".join(formats), "protocol_whitelist": "file"}
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        return av.open(file, "r", container_options=safe)
    except av.error.ArgumentError as error:  # all that FFmpeg says of a format that is not listed
        raise ValueError(f"it is damaged, or in none of the formats {', '.join(formats)}") from error


def shown_size(image: Image.Image) -> tuple[int, int]:
    """Return the width and height that `to_rgb` gives an image, from the header of its file."""
    width, height = image.size
    return (height, width) if _orientation(image) > 4 else (width, height)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return the RGB pixels that a viewer shows; of an animation those of its first frame."""
    turn = TURNS[_orientation(image) - 1]
    shown = _on_white(to_8_bits(image))
    return shown.transpose(Image.Transpose[turn]) if turn else shown


def to_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit, integer and float pixels, which Pillow would clip at 255, to gray levels.

    16-bit pixels have the range 0 to 65535. Others have the first of the ranges 0 to 1 (floats only), 0 to
    255 and 0 to 65535 that contains all of them, else that from the smallest to the largest. NaN and infinity
    count as 0.
    """
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    pixels = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0, neginf=0)
    low, high = pixels.min(), pixels.max()
    tops = {"I": (255, 65535), "F": (1, 255, 65535)}.get(image.mode, (65535,))
    top = next((top for top in tops if low >= 0 and high <= top), None)
    low, size = (low, high - low or 1) if top is None else (0, top)
    gray = ((pixels - low) * 255 / size).round().astype(np.uint8)
    if (hidden := image.info.get("transparency")) is None:
        return Image.fromarray(gray)
    return Image.fromarray(np.stack([gray, np.where(pixels == hidden, 0, 255)], -1).astype(np.uint8))


def shown_frame(frame: Any) -> np.ndarray:
    """Return the RGB pixels (H, W, 3) of a frame that PyAV decoded, turned as a player shows them."""
    pixels = frame.to_ndarray(format="rgb24")
    (a, b), (c, d) = _display_matrix(frame)
    if abs(b) > abs(a):
        pixels, a, d = pixels.transpose(1, 0, 2), c, b
    return np.ascontiguousarray(pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1])


def shown_frame_size(frame: Any, stream: Any) -> tuple[int, int]:
    """Return the width and height with which a player shows a frame, whose pixels need not be square."""
    width, height = round(frame.width * (stream.sample_aspect_ratio or 1)), frame.height
    (a, b), _ = _display_matrix(frame)
    return (height, width) if abs(b) > abs(a) else (width, height)


def frame_image(frame: Any, stream: Any) -> Image.Image:
    """Return a decoded frame as a player shows it."""
    return Image.fromarray(shown_frame(frame)).resize(shown_frame_size(frame, stream))


def _display_matrix(frame: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where the display matrix of a file takes the directions to the right and down."""
    for data in frame.side_data:
        if data.type.name == "DISPLAYMATRIX":
            a, b, _, c, d = np.frombuffer(data, np.int32)[:5].tolist()
            return (a, b), (c, d)
    return (1, 0), (0, 1)


def _on_white(image: Image.Image) -> Image.Image:
    image.load()  # which tells the transparency of some formats
    hidden = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(hidden, tuple) and max(hidden) > 255:
        # It has 16 bits, of which Pillow keeps the upper 8 of pixels.
        image.info["transparency"] = tuple(level >> 8 for level in hidden)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _orientation(image: Image.Image) -> int:
    """Return the orientation of EXIF data before the pixels of a file; Pillow itself turns TIFF."""
    if image.format == "TIFF":
        return 1
    try:
        # Not the method of a PNG, which decodes it to find EXIF data after the pixels.
        found = int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))
        return found if found in range(1, 9) else 1
    except Exception:  # noqa: BLE001 - damaged EXIF data raise anything, and viewers ignore them
        return 1
