# SPDX-License-Identifier: Apache-2.0
"""Kinds of paths in a config. Each function returns the absolute path, or raises with rule and remedy.

Use one as `option(..., resolve=existing_file)`. To add a kind of path, add a function of one text. Hub names
are returned as they are, without network access. Files of functions (`reward.py:NAME`) are parsed, never run.
"""

import ast
import difflib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from verl.config.files.model_files import CONFIG, PIPELINE, POLICY, WEIGHTS, downloaded
from verl.config.hints.missing_paths import MissingPath, check_spelling, missing

DATA_SUFFIXES = (".parquet", ".json", ".jsonl", ".arrow", ".csv", ".pkl")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
HUB_SUBSET = re.compile(r"\w[\w.-]*/\w[\w.-]*/\w[\w.+-]*")
DEFAULT_FUNCTION = "main"  # of a file given without a function
NEEDS = "needs"  # a decorator, with the inputs that an extension needs as plain text
CHECKPOINT_NAME = re.compile(r"global_step_\d+")
RUN_TRACKER = "checkpoint_tracker.json"  # in the folder of a run
EXPORTED = "huggingface"  # folder of a role's exported weights in a checkpoint
MODEL_CONFIGS = (CONFIG, PIPELINE)  # of transformers and of diffusers


def existing_file(text: str) -> str:
    path = _absolute(text)
    if path.is_dir():
        raise IsADirectoryError(f"must be a file, {path} is a folder")
    if not path.is_file():
        raise missing("file", path)
    return str(path)


def existing_folder(text: str) -> str:
    path = _absolute(text)
    if not path.is_dir():
        raise missing("folder", path)
    return str(path)


def function_in_file(text: str) -> str:
    """Resolve `file.py[:function]`."""
    path, function, body = _parsed(text, "`file.py` or `file.py:function`")
    names, name = names_in(body), function or DEFAULT_FUNCTION
    if names is not None and name not in names:
        functions = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        raise ValueError(
            f"{path} has no function {name!r}: write `{text.partition(':')[0]}:NAME` with one of {functions}"
        )
    return f"{path}:{function}" if function else path


def is_extension(text: object) -> bool:
    """Return whether a value is meant as a function or class of a file."""
    return isinstance(text, str) and (text.endswith(".py") or ".py:" in text)


def extension_in_file(text: str) -> str:
    """Return `/absolute/file.py:NAME`; raise if there is no such file, or if it does not define the name."""
    path, name, body = _parsed(text, "`file.py:NAME`")
    file, names = text.removesuffix(f":{name}"), names_in(body)
    defined = [
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    if not name:
        raise ValueError(f"must name a function or class of {path}: `{file}:NAME` with one of {defined}")
    if names is not None and name not in names:
        near = difflib.get_close_matches(name, sorted(names), n=1)
        remedy = f"; did you mean `{file}:{near[0]}`?" if near else ""
        raise ValueError(f"{path} defines no {name!r}; it defines {defined}{remedy}")
    spec = f"{path}:{name}"
    declared_needs(spec)  # raises if they cannot be read
    return spec


@lru_cache
def declared_needs(spec: str) -> frozenset[str]:
    """Return the arguments of `@needs(...)` at a function of a file; none without the decorator.

    Raises:
        ValueError: An argument is not plain text, so that only running the file would show it.
    """
    file, _, name = spec.rpartition(":")
    found: set[str] = set()
    for node in parse_file(Path(file)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == NEEDS:
                    found |= set(_texts(call, f"{file}, line {call.lineno}"))
    return frozenset(found)


def _texts(call: ast.Call, where: str) -> Iterator[str]:
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
            raise ValueError(
                f"{where}: `@{NEEDS}` takes plain text, because the file is not run when a config is"
                f" read; got {ast.unparse(argument)}"
            )
        yield argument.value


def _parsed(text: str, forms: str) -> tuple[str, str, list[ast.stmt]]:
    """Return file and name of `file.py[:name]`, the name empty without one, and the file's statements."""
    file, _, name = text.rpartition(":")
    if not file.endswith(".py"):
        file, name = text, ""
    if not file.endswith(".py"):
        raise ValueError(f"must be {forms}, got {text!r}")
    path = existing_file(file)
    return path, name, parse_file(Path(path))


def data_source(text: str) -> str:
    """Resolve `PATH[@split]`, or the hub names `owner/name[@split]` and `owner/name/subset[@split]`."""
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
    # A missing path may look like the name of a subset, but then its first part usually exists.
    is_subset = HUB_SUBSET.fullmatch(source) and not _absolute(source.partition("/")[0]).is_dir()
    if source.endswith(DATA_SUFFIXES) or (looks_local(source) and not is_subset):
        raise missing("file or folder", path)
    check_spelling(source, path)
    return text


def data_sources(value: str | list[str]) -> str | list[str]:
    if isinstance(value, str):
        return data_source(value) if value else value
    return [data_source(item) for item in value]


def model_source(text: str) -> str:
    """Resolve a model folder, which for a checkpoint or a role in it is that of the exported weights."""
    path = _absolute(text)
    if path.is_dir():
        role = path / POLICY if CHECKPOINT_NAME.fullmatch(path.name) else path
        if not role.is_dir():
            raise ValueError(f"{path} has no folder {POLICY}: it is not a complete checkpoint")
        exported = role / EXPORTED
        is_role = any((exported / name).is_file() for name in MODEL_CONFIGS)
        return str(exported if is_role else path)
    if path.exists():
        remedy = f": python3 scripts/convert_gguf.py {path} FOLDER" if path.suffix == ".gguf" else ""
        raise ValueError(f"must be a folder or a hub name, {path} is a file{remedy}")
    if looks_local(text) or text.endswith(WEIGHTS):
        raise missing("folder", path)
    if HUB_NAME.fullmatch(text) is None:
        raise ValueError(f"must be a folder or one hub name such as `owner/name`, got {text!r}")
    if downloaded(text) is None:
        check_spelling(text, path, same_numbers="/" in text)
    return text


def checkpoint_or_run_folder(text: str) -> str:
    """Resolve a checkpoint, or the folder of a run, which stands for its last checkpoint.

    A folder without checkpoints is returned as it is: it may be that of this run, see `checkpoint_problems`.
    """
    path = _absolute(text)
    if CHECKPOINT_NAME.fullmatch(path.name):
        return existing_folder(text)
    try:
        last = json.loads((path / RUN_TRACKER).read_bytes())["last_global_step"]
    except (OSError, ValueError, LookupError, TypeError):
        last = None
    found = path / f"global_step_{last}"
    return str(found if found.is_dir() else path)


def checkpoint_problems(option: str, path: str) -> Iterator[str]:
    """Yield that a result of `checkpoint_or_run_folder` is not a checkpoint."""
    folder = Path(path)
    if not folder.is_dir():
        yield MissingPath(f"{option}: {missing('folder', folder)}")
    elif not CHECKPOINT_NAME.fullmatch(folder.name):
        found = sorted(entry.name for entry in folder.iterdir() if CHECKPOINT_NAME.fullmatch(entry.name))
        remedy = f"; it contains {found}" if found else ""
        yield (
            f"{option} must end with a folder named `global_step_N`, or be the folder of a run, got"
            f" {path!r}{remedy}"
        )


def writable_folder(text: str) -> str:
    """Resolve a folder that exists or can be created; nothing is left behind."""
    path = _absolute(text)
    ancestor = next(folder for folder in (path, *path.parents) if folder.exists())
    if not ancestor.is_dir():
        raise ValueError(f"must be a folder that can be written, but {ancestor} is a file")
    try:
        # Permission bits say nothing about read-only, full or remote file systems.
        with tempfile.TemporaryDirectory(dir=ancestor, prefix=".write-test-"):
            pass
    except OSError as error:
        reason = f"{ancestor} is not: {error.strerror}"
        raise ValueError(f"must be a folder that can be written, {reason}") from error
    return str(path)


def writable_file(text: str) -> str:
    path = _absolute(text)
    if path.is_dir():
        raise ValueError(f"must be a file, {path} is a folder")
    writable_folder(str(path.parent))
    return str(path)


def looks_local(text: str) -> bool:
    """Return whether a missing name was meant as a path: hub names are `name` or `owner/name`."""
    return text.startswith(("/", ".", "~")) or text.endswith("/") or text.count("/") > 1


def parse_file(path: Path) -> list[ast.stmt]:
    """Return the statements of a Python file, or raise a ValueError with the line that is wrong."""
    try:
        return ast.parse(path.read_bytes(), filename=str(path)).body
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # a NUL byte, or too many parentheses
        raise ValueError(f"{path} is not valid Python: {error or 'it is nested too deeply'}") from error


def names_in(body: list[ast.stmt]) -> set[str] | None:
    """Return the names that a file defines; None if only running it shows them (`from module import *`)."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif not isinstance(node, ast.Expr):  # assignments, also those inside an `if` or `try`
            names |= {getattr(item, "id", "") or getattr(item, "name", "") or "" for item in ast.walk(node)}
    return None if "*" in names else names - {""}


def _absolute(text: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(text)))
