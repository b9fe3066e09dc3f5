# SPDX-License-Identifier: Apache-2.0
"""Python files of a user: their imports, and errors that point into them."""

import difflib
import hashlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote, unquote

EXCERPT_HEAD, EXCERPT_TAIL = 200, 100  # characters of a text that an error shows
ERROR_HEAD, ERROR_TAIL = 4000, 2000  # characters of an exception, and of its traceback

__path__: list[str] = []  # makes this module a package: the files are its modules


class _UsersFiles:
    """Import a file by the name of its module, in a process that is sent an object of it."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}.") or ":" not in name:
            return None
        path = Path(unquote(name.partition(":")[2], errors="surrogateescape"))
        extend_import_path(path)
        return spec_from_file_location(name, path)


sys.meta_path.append(_UsersFiles)


def import_file(path: Path, option: str, prefix: str, heading: str) -> ModuleType:
    """Run a Python file and return its module, whose name holds `prefix` and the path of the file.

    Errors name the `option` that named the file, and have a `heading` before the traceback.
    """
    where = quote(os.fsencode(path.resolve()), safe="").replace(".", "%2E")
    name = f"{__name__}.{prefix}:{where}"
    module_spec = spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"`{option}` must be a Python file (.py), got {path}")
    module = module_from_spec(module_spec)
    module.__package__ = ""  # the file is in no package, for imports with a dot
    extend_import_path(path)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        what = describe_error(error, path, heading)
        raise ValueError(f"`{option}`: importing {path} failed: {what}{_remedy_of(error)}") from error
    return module


def find_function(
    module: ModuleType, path: Path, name: str, option: str, usual: str | None = None
) -> Callable[..., Any]:
    """Return a function or class of a user's file; a ValueError suggests another, first the `usual` one."""
    found = getattr(module, name, None)
    if callable(found):
        return found
    own = [
        key
        for key, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isroutine(value))
        and getattr(value, "__module__", None) == module.__name__
        and key[0] != "_"
    ]
    close = [key for key in own if key == usual] or difflib.get_close_matches(name, own, n=1)
    remedy = f": write {path}:{close[0]}" if close else f"; it defines {own or 'no function'}"
    what = "is missing" if found is None else f"is a {type(found).__name__}, not a function or class"
    raise ValueError(f"`{option}`: `{name}` {what} in {path}{remedy}")


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
    if type(error).__module__.startswith(__name__):  # an exception of the file itself
        text = text.removeprefix(f"{type(error).__module__}.")
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
