# SPDX-License-Identifier: Apache-2.0
"""Files of a user: imports of Python files, errors that point into them, and opening of images."""

import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:  # most processes open no image
    from PIL import Image

EXCERPT_HEAD, EXCERPT_TAIL = 200, 100  # characters of a text that an error shows
ERROR_HEAD, ERROR_TAIL = 4000, 2000  # characters of an exception, and of its traceback
# That Pillow decodes itself, tried in this order; a Pillow may lack some.
IMAGE_FORMATS = "JPEG PNG WEBP GIF BMP PPM TIFF AVIF JPEG2000 DDS DIB ICNS ICO PCX PSD QOI SGI TGA"

_imported: dict[str, Path] = {}  # by the names of their modules


def import_file(path: Path, option: str, prefix: str, heading: str) -> ModuleType:
    """Run a Python file and return its module, which is named after `prefix` and the file.

    Args:
        option: The option that named the file, for errors.
        heading: Precedes the traceback in errors.
    """
    # Prefixed, because a file may well be called math.py.
    name = f"{prefix}_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"`{option}` must be a Python file (.py), got {path}")
    module = importlib.util.module_from_spec(module_spec)
    extend_import_path(path)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        what = describe_error(error, path, heading)
        raise ValueError(f"`{option}`: importing {path} failed: {what}{_remedy_of(error)}") from error
    _imported[name] = path.resolve()
    return module


def imported_files() -> dict[str, Path]:
    """Return the files that this process has imported, by the names of their modules."""
    return dict(_imported)


def import_again(files: Mapping[str, Path]) -> None:
    """Import files under the names that they have in another process, which sends objects of them."""
    for name, path in files.items():
        if name not in sys.modules:
            prefix = name.removesuffix(f"_{path.stem}")
            import_file(path, "a file of the run", prefix, "Traceback (most recent call last):")


def open_image(source: str | BinaryIO) -> "Image.Image":
    """Open an image of one of the formats; for PostScript, Pillow would run a program."""
    from PIL import Image  # noqa: PLC0415

    Image.init()
    return Image.open(source, formats=[name for name in IMAGE_FORMATS.split() if name in Image.OPEN])


def _remedy_of(error: BaseException) -> str:
    """Explain how to install a package that a file imports; empty for other errors."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    package = error.name.partition(".")[0]
    return f"\nInstall the package {package} where the run starts, for example by `pip install {package}`."


def extend_import_path(path: Path) -> None:
    """Let a file import from the working directory and from its own folder."""
    working_directory, folder = os.getcwd(), str(path.resolve().parent)
    if not {"", working_directory} & set(sys.path):  # as `python3 -m` does, but a console command does not
        sys.path.insert(0, working_directory)
    if folder not in sys.path:
        sys.path.append(folder)  # last: a file called math.py must not hide `math`


def digest_of(path: Path) -> str:
    """Digest of a file's content; of the files that it imports nothing is known."""
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def shorten(text: str, head: int = EXCERPT_HEAD, tail: int = EXCERPT_TAIL) -> str:
    if len(text) <= head + tail:
        return text
    return f"{text[:head]} ... ({len(text)} characters) ... {text[-tail:]}"


def describe_error(error: BaseException, path: Path, heading: str) -> str:
    """Describe an error with its line in the user's file and the traceback from there on."""
    if isinstance(error, SyntaxError):
        line = shorten((error.text or "").strip())
        return f"SyntaxError: {error.msg} at {error.filename}:{error.lineno}\n    {line}"
    text = "".join(traceback.format_exception_only(error)).strip()
    return shorten(text, ERROR_HEAD, ERROR_TAIL) + describe_place(error, path, heading)


def describe_place(error: BaseException, path: Path, heading: str) -> str:
    """Give the line of the user's file that raised an error, and the traceback from its first line on."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [idx for idx, frame in enumerate(frames) if frame.filename == str(path)]
    if not frames:
        return ""
    at = frames[users[-1]] if users else frames[-1]
    trace = "".join(traceback.format_list(frames[users[0] :] if users else frames))
    shown = shorten(trace, ERROR_HEAD, ERROR_TAIL)
    return f" at {at.filename}:{at.lineno}, in {at.name}\n{heading}\n{shown}"
