# SPDX-License-Identifier: Apache-2.0
"""A registry of functions by name, with errors that name the config option that selects one.

A name may also be `/path/to/file.py:NAME`: a function or class of a file of the user's, an extension. It is
loaded by path in each process that looks it up, so the controller and the workers on every node find it.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from verl.utils.user_file import import_file

F = TypeVar("F", bound=Callable[..., Any])
HEADING = "Traceback in the file (most recent call last):"


class ProtocolError(ValueError):
    """An extension returned something that a run cannot use; the message follows the extension's name."""


def needs(*names: str) -> Callable[[F], F]:
    """Declare inputs that a function of a file needs and that a run computes only on request.

    The config reads the names without running the file, so they must be plain text.

    Example::

        @needs("group", "values")
        def my_estimator(inputs): ...
    """

    def decorator(function: F) -> F:
        function.needs = frozenset(names)  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return decorator


def is_extension(name: str) -> bool:
    return name.rpartition(":")[0].endswith(".py")


def load_extension(spec: str, option: str) -> Any:
    """Return a function, class or object of a file, `file.py:NAME`; a file is run once in each process."""
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(
            f"`{option}`: no file {path} on this node: with several nodes, it must be in a shared folder"
        )
    module = _module(path, option)
    if not hasattr(module, name):
        raise ValueError(f"`{option}`: {path} defines no {name!r}")
    return getattr(module, name)


def place_of(spec: str, value: Any) -> str:
    """Return `file.py:LINE `NAME``, for errors about an extension."""
    file, _, name = spec.rpartition(":")
    value = inspect.unwrap(value) if callable(value) else value
    try:
        line = f":{inspect.getsourcelines(value)[1]}"
    except (OSError, TypeError):
        line = ""
    return f"{file}{line} `{name}`"


@cache
def _module(path: Path, option: str) -> ModuleType:
    return import_file(path, option, "extension", HEADING)


class Registry(Generic[F]):
    """Functions or classes of one signature, by name.

    Example::

        POLICY_LOSSES = Registry("worker.actor.loss_type")

        @POLICY_LOSSES.register("default")
        def ppo(inputs): ...

        POLICY_LOSSES["default"], POLICY_LOSSES["/home/me/losses.py:my_loss"]
    """

    def __init__(self, option: str) -> None:
        self.option = option  # dotted config path
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        def decorator(function: F) -> F:
            if name in self._functions:
                raise ValueError(f"`{self.option}`: {name!r} is registered twice")
            self._functions[name] = function
            return function

        return decorator

    def __getitem__(self, name: str) -> F:
        if name in self._functions:
            return self._functions[name]
        if is_extension(name):
            return load_extension(name, self.option)
        raise ValueError(f"`{self.option}` must be one of {self.names()}, got {name!r}")

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        return sorted(self._functions)
