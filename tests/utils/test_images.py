# SPDX-License-Identifier: Apache-2.0
"""Everybody sees the pixels of an image that a viewer shows, whatever its file stores."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from verl.agents.tools.answers import AnswerLimits, as_observation
from verl.agents.tools.shipped.zoom import Zoom
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.messages import references
from verl.data.readers import load_processor
from verl.models.tiny import save_tiny_model
from verl.rewards.graders.chat_media import media_parts
from verl.utils.images import open_image, shown_size, to_rgb

WIDTH, HEIGHT = 84, 56
RED, BLUE, WHITE, GRAY = (200, 0, 0), (0, 0, 200), (255, 255, 255), (128, 128, 128)


def halves(left, right=WHITE) -> np.ndarray:
    """Pixels of a picture whose left third and whose rest have one color each."""
    pixels = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    pixels[:, : WIDTH // 3], pixels[:, WIDTH // 3 :] = left, right
    return pixels


SHOWN = halves(RED, BLUE)
STORED = {  # what is stored for SHOWN, by the orientation of the EXIF data
    1: SHOWN,
    2: SHOWN[:, ::-1],
    3: SHOWN[::-1, ::-1],
    4: SHOWN[::-1],
    5: SHOWN.transpose(1, 0, 2),
    6: np.rot90(SHOWN),
    7: SHOWN.transpose(1, 0, 2)[::-1, ::-1],
    8: np.rot90(SHOWN, -1),
}


def saved(image: Image.Image, kind: str, **options) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def turned(orientation: int, kind: str, **options) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.fromarray(np.ascontiguousarray(STORED[orientation])), kind, exif=exif, **options)


def transparent(mode: str, kind: str = "PNG", **options) -> bytes:
    """A picture that is red on the left and hides blue on the right."""
    pixels = np.concatenate([SHOWN, np.where(SHOWN[..., :1] == 200, 255, 0).astype(np.uint8)], -1)
    image = Image.fromarray(pixels)
    return saved(image if mode == "RGBA" else image.convert(mode), kind, **options)


def palette(kind: str, **options) -> bytes:
    image = Image.fromarray((SHOWN[..., 2] // 200).astype(np.uint8)).convert("P")
    image.putpalette([*RED, *BLUE])
    return saved(image, kind, **options)


def png_16(color_type: int, left: list[int], right: list[int], hidden: list[int] | None = None) -> bytes:
    """A PNG of 16 bits for each channel, of which Pillow writes none with color or transparency."""
    pixels = [np.array(pixel, ">u2").tobytes() for pixel in (left, right)]
    row = b"\0" + pixels[0] * (WIDTH // 3) + pixels[1] * (WIDTH - WIDTH // 3)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", WIDTH, HEIGHT, 16, color_type, 0, 0, 0),
        **({} if hidden is None else {b"tRNS": np.array(hidden, ">u2").tobytes()}),
        b"IDAT": zlib.compress(row * HEIGHT), b"IEND": b"",
    }  # fmt: skip
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def levels(dtype, left, right, kind: str) -> bytes:
    """A gray picture of more than 8 bits."""
    return saved(Image.fromarray(np.where(SHOWN[..., 0] == 200, left, right).astype(dtype)), kind)


def animation(kind: str) -> bytes:
    first, second = Image.fromarray(SHOWN), Image.fromarray(halves(WHITE))
    options = {"lossless": True} if kind == "WEBP" else {}
    return saved(first, kind, save_all=True, append_images=[second], **options)


FILES = {
    **{f"JPEG turned {n}": (turned(n, "JPEG", quality=95, subsampling=0), SHOWN) for n in STORED},
    **{f"{kind} turned {n}": (turned(n, kind), SHOWN) for kind in ("PNG", "TIFF") for n in (3, 6)},
    "WEBP turned 6": (turned(6, "WEBP", lossless=True), SHOWN),
    "damaged EXIF data": (saved(Image.fromarray(SHOWN), "PNG", exif=b"Exif\0\0MM\0*\0\0\xff\xff"), SHOWN),
    "RGBA": (transparent("RGBA"), halves(RED)),
    "RGBA in WEBP": (transparent("RGBA", "WEBP", lossless=True), halves(RED)),
    "LA": (transparent("LA"), halves((60, 60, 60))),  # 0.299 * 200
    "a palette with transparency": (palette("PNG", transparency=1), halves(RED)),
    "a palette with levels of transparency": (palette("PNG", transparency=b"\xff\0"), halves(RED)),
    "a GIF with transparency": (palette("GIF", transparency=1), halves(RED)),
    "RGB with a hidden color": (saved(Image.fromarray(SHOWN), "PNG", transparency=BLUE), halves(RED)),
    "16 bits with a hidden level": (png_16(0, [32896], [7], hidden=[7]), halves(GRAY)),
    # of 16-bit colors, the upper 8 bits count: 51400 = 200 * 257, 32896 = 128 * 257
    "16 bits and alpha": (png_16(4, [32896, 65535], [7, 0]), halves(GRAY)),
    "16-bit colors": (png_16(2, [51400, 0, 0], [65535, 65535, 65535]), halves(RED)),
    "16-bit colors and alpha": (png_16(6, [51400, 0, 0, 65535], [0, 0, 51400, 0]), halves(RED)),
    "16-bit colors with half of alpha": (png_16(6, [0, 0, 0, 32896], [0, 0, 0, 0]), halves((127, 127, 127))),
    "a hidden 16-bit color": (
        png_16(2, [51400, 0, 0], [0x1234, 0x5678, 0x3CFE], hidden=[0x1234, 0x5678, 0x3CFE]),
        halves(RED),
    ),
    "16-bit colors whose lower bits are those of the hidden one": (
        png_16(2, [51400, 0, 0], [65535, 65535, 65535], hidden=[0x12C8, 0x1200, 0x1200]),
        halves(RED),
    ),
    "a palette": (palette("PNG"), SHOWN),
    "CMYK": (saved(Image.fromarray(SHOWN).convert("CMYK"), "TIFF"), SHOWN),
    "16 bits": (levels(np.uint16, 32896, 65535, "PNG"), halves(GRAY)),
    "integers": (levels(np.int32, 32896, 65535, "TIFF"), halves(GRAY)),
    "floats": (levels(np.float32, 0.5, 1, "TIFF"), halves(GRAY)),
    **{f"an animated {kind}": (animation(kind), SHOWN) for kind in ("GIF", "WEBP", "PNG")},
}


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    processor = load_processor(save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl"))
    return MediaLoader(processor, MediaOptions(min_pixels=1, max_pixels=1 << 20))


def judged(content: bytes) -> Image.Image:
    (part,) = media_parts({"images": [content]})
    return Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))


def answered(content: bytes) -> Image.Image:
    """The image of a tool that returns one in memory."""
    (image,) = as_observation(Image.open(io.BytesIO(content)), AnswerLimits(100, "left")).images
    return Image.open(io.BytesIO(image["bytes"]))


def zoomed(content: bytes) -> Image.Image:
    (image,) = Zoom(units="fractions", size=1)([content], [0.0, 0.0, 1.0, 1.0]).images
    return image


@pytest.mark.parametrize("name", FILES)
def test_policy_engine_judge_and_tools_see_what_a_viewer_shows(name, loader):
    content, shown = FILES[name]
    (in_memory,) = references(Image.open(io.BytesIO(content)), "image", None)
    seen = {  # the viewer and the data check show what was decoded for policy and engine
        "policy and engine": loader.decode({"images": [content]}).images[0],
        "an image of a row in memory": loader.decode({"images": [in_memory]}).images[0],
        "judge": judged(content),
        "tool": answered(content),
        "zoom": zoomed(content),
    }

    for who, image in seen.items():
        assert image.mode == "RGB" and image.size == (WIDTH, HEIGHT), who
        for x in (WIDTH // 6, WIDTH // 2, WIDTH - 3):  # away from the edge, which JPEG blurs
            pixel = np.array(image.getpixel((x, HEIGHT // 2)), int)
            assert np.abs(pixel - shown[0, x]).max() <= 3, (who, pixel)


@pytest.mark.parametrize("name", FILES)
def test_the_size_in_a_header_is_that_of_the_pixels(name, loader):
    content = FILES[name][0]
    image = open_image(io.BytesIO(content))

    assert shown_size(image) == to_rgb(image).size == (WIDTH, HEIGHT)
    decoded = loader.decode({"images": [content]})
    assert loader.measure({"images": [content]}).images == loader.shape_of(decoded).images


def test_a_size_that_the_processor_refuses_is_an_error_with_the_name_of_the_image(loader, tmp_path):
    Image.new("RGB", (5880, 28)).save(tmp_path / "strip.png")

    with pytest.raises(ValueError, match=r"the image .*strip\.png cannot be read: .*aspect ratio .* got 210"):
        loader.measure({"images": [str(tmp_path / "strip.png")]})
