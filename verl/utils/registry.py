# SPDX-License-Identifier: Apache-2.0
"""A dictionary of functions with good errors: what one config option selects among, by name."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """The functions or classes that one config option selects among, by name.

    All entries of a registry share one signature, so that calling never branches on the name.

    Example::

        POLICY_LOSSES = Registry("worker.actor.loss_type")

        @POLICY_LOSSES.register("default")
        def ppo(inputs): ...

        loss = POLICY_LOSSES[config.worker.actor.loss_type](inputs)
    """

    def __init__(self, option: str) -> None:
        """Create an empty registry for `option`, the dotted config path that every error names."""
        self.option = option
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Return a decorator that stores a function under `name` and returns it unchanged."""

        def decorator(function: F) -> F:
            if name in self._functions:
                raise ValueError(f"`{self.option}`: {name!r} is registered twice")
            self._functions[name] = function
            return function

        return decorator

    def __getitem__(self, name: str) -> F:
        """Return what is registered under `name`; a ValueError lists the known names."""
        if name not in self._functions:
            raise ValueError(f"`{self.option}` must be one of {self.names()}, got {name!r}")
        return self._functions[name]

    def __contains__(self, name: str) -> bool:
        """Whether `name` is registered."""
        return name in self._functions

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, sorted."""
        return iter(self.names())

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        return sorted(self._functions)
