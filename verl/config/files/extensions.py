# SPDX-License-Identifier: Apache-2.0
"""Extensions: functions and classes of a user's file, which an option names by `path/to/file.py:NAME`.

A file is parsed here, never run. Inputs that an extension needs are read from its decorator
`@needs("values", ...)`, whose arguments must therefore be plain text.
"""

import ast
import difflib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from verl.config.files.paths import existing_file, names_in, parse_file

DECORATOR = "needs"


def is_extension(text: object) -> bool:
    """Return whether a value is meant as a function or class of a file."""
    return isinstance(text, str) and (text.endswith(".py") or ".py:" in text)


def extension_in_file(text: str) -> str:
    """Return `/absolute/file.py:NAME`; raise if there is no such file, or if it does not define the name."""
    file, separator, name = text.rpartition(":")
    if not separator or not file.endswith(".py"):
        file, name = text, ""
    if not file.endswith(".py"):
        raise ValueError(f"must be `file.py:NAME`, got {text!r}")
    path = existing_file(file)
    body = parse_file(Path(path))
    names = names_in(body)
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
                if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == DECORATOR:
                    found |= set(_texts(call, f"{file}, line {call.lineno}"))
    return frozenset(found)


def _texts(call: ast.Call, where: str) -> Iterator[str]:
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
            raise ValueError(
                f"{where}: `@{DECORATOR}` takes plain text, because the file is not run when a config is"
                f" read; got {ast.unparse(argument)}"
            )
        yield argument.value
