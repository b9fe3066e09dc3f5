# SPDX-License-Identifier: Apache-2.0
"""A registry of functions by name, with errors that name the config option that selects one."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions or classes of one signature, by name.

    Example::

        POLICY_LOSSES = Registry("worker.actor.loss_type")

        @POLICY_LOSSES.register("default")
        def ppo(inputs): ...
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
        if name not in self._functions:
            raise ValueError(f"`{self.option}` must be one of {self.names()}, got {name!r}")
        return self._functions[name]

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        return sorted(self._functions)
