# SPDX-License-Identifier: Apache-2.0
"""What a path in a config may be: each function returns it made absolute, or raises with rule and remedy.

Use one as `option(..., resolve=existing_file)`. To add a kind of path, add a function of one text.
A name on the hub (`Qwen/Qwen2.5-7B-Instruct`, `hiyouga/math12k`) stays as it is: no network.
"""

import ast
import os
import re
import tempfile
from pathlib import Path

DATA_SUFFIXES = (".parquet", ".json", ".jsonl", ".arrow", ".csv", ".pkl")
DEFAULT_FUNCTION = "main"  # of a file that is named without one
CHECKPOINT_NAME = re.compile(r"global_step_\d+")
POLICY, EXPORTED = "actor", "huggingface"  # of a checkpoint: a role's folder, and the one of its export


def existing_file(text: str) -> str:
    """Return the absolute path of a file that exists."""
    path = _absolute(text)
    if path.is_dir():
        raise FileNotFoundError(f"must be a file, {path} is a folder")
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    return str(path)


def existing_folder(text: str) -> str:
    """Return the absolute path of a folder that exists."""
    path = _absolute(text)
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}")
    return str(path)


def function_in_file(text: str) -> str:
    """Return `file.py[:function]` with the file's absolute path; the file is read, not run."""
    file, colon, function = text.rpartition(":")
    if not colon or not file.endswith(".py"):
        file, colon, function = text, "", ""
    if not file.endswith(".py"):
        raise ValueError(f"must be `file.py` or `file.py:function`, got {text!r}")
    path = existing_file(file)
    body = _parse(Path(path))
    names = _names_in(body)
    if names is not None and (function or DEFAULT_FUNCTION) not in names:
        functions = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        raise ValueError(
            f"{path} has no function {function or DEFAULT_FUNCTION!r}: write `{text.partition(':')[0]}:NAME`"
            f" with one of {functions}"
        )
    return path + colon + function


def data_source(text: str) -> str:
    """Return `PATH[@split]` with an absolute path, or a hub name as it is."""
    source, at, split = text.rpartition("@")
    if not at or "/" in split:
        source, at, split = text, "", ""
    if at and not split:
        raise ValueError(f"must name a split after the `@`, got {text!r}")
    if not source:
        raise ValueError(f"must be a path or a hub name, got {text!r}")
    path = _absolute(source)
    if path.exists():
        return str(path) + at + split
    if looks_local(source) or source.endswith(DATA_SUFFIXES):
        raise FileNotFoundError(f"no file or folder {path}")
    return text


def data_sources(value: str | list[str]) -> str | list[str]:
    """Return one data source or a list of them, resolved."""
    if isinstance(value, str):
        return data_source(value) if value else value
    return [data_source(item) for item in value]


def model_source(text: str) -> str:
    """Return a model's absolute folder, or a hub name as it is.

    Of a checkpoint (`.../global_step_N`, or a role's folder in it) it is where its weights are exported to.
    """
    path = _absolute(text)
    if path.is_dir():
        return str(_model_of_checkpoint(path))
    if path.exists():
        raise ValueError(f"must be a folder or a hub name, {path} is a file")
    if looks_local(text):
        raise FileNotFoundError(f"no folder {path}")
    return text


def _model_of_checkpoint(path: Path) -> Path:
    role = path / POLICY if CHECKPOINT_NAME.fullmatch(path.name) else path
    if role != path and not role.is_dir():
        raise FileNotFoundError(f"{path} holds no {POLICY}: it is not a complete checkpoint")
    exported = role / EXPORTED
    return exported if (exported / "config.json").is_file() else path


def checkpoint_folder(text: str) -> str:
    """Return the absolute path of a `.../global_step_N` folder that exists."""
    path = Path(existing_folder(text))
    if not CHECKPOINT_NAME.fullmatch(path.name):
        found = sorted(entry.name for entry in path.iterdir() if CHECKPOINT_NAME.fullmatch(entry.name))
        remedy = f"; inside it are {found}" if found else ""
        raise ValueError(f"must end with a folder named `global_step_N`, got {text!r}{remedy}")
    return str(path)


def writable_folder(text: str) -> str:
    """Return an absolute path where a folder can be made and written; nothing stays behind."""
    path = _absolute(text)
    ancestor = next(folder for folder in (path, *path.parents) if folder.exists())
    if not ancestor.is_dir():
        raise ValueError(f"must be a folder that can be written, but {ancestor} is a file")
    try:
        # Asked by doing: permission bits say nothing on read-only, full or remote file systems.
        with tempfile.TemporaryDirectory(dir=ancestor, prefix=".write-test-"):
            pass
    except OSError as error:
        raise ValueError(
            f"must be a folder that can be written, {ancestor} is not: {error.strerror}"
        ) from error
    return str(path)


def writable_file(text: str) -> str:
    """Return the absolute path of a file that can be written."""
    path = _absolute(text)
    if path.is_dir():
        raise ValueError(f"must be a file, {path} is a folder")
    writable_folder(str(path.parent))
    return str(path)


def looks_local(text: str) -> bool:
    """Whether a name that does not exist here was meant as a path: a hub name is `name` or `owner/name`."""
    return text.startswith(("/", ".", "~")) or text.endswith("/") or text.count("/") > 1


def _parse(path: Path) -> list[ast.stmt]:
    try:
        return ast.parse(path.read_bytes(), filename=str(path)).body
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # a NUL, or too many parentheses
        raise ValueError(f"{path} is no Python: {error or 'it is nested too deeply'}") from error


def _names_in(body: list[ast.stmt]) -> set[str] | None:
    """Return the names that a Python file defines or imports; None if only running it would tell."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif not isinstance(node, ast.Expr):  # assignments, and what an `if` or `try` around them defines
            names |= {getattr(item, "id", "") or getattr(item, "name", "") or "" for item in ast.walk(node)}
    return None if "*" in names else names - {""}


def _absolute(text: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(text)))
