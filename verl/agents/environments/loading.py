# SPDX-License-Identifier: Apache-2.0
"""Load the environment named in a config: a class of a file, or a shipped one.

    class Env:
        tools = [...]                        optional: schemas that the chat template shows
        @classmethod
        def prepare(cls, **kwargs): ...      optional: called once next to each engine, before all others
        def __init__(self, **kwargs): ...    `environment_kwargs`, and the column `env_kwargs` of a row
        def reset(self, row): ...            the prompt: messages or a text; None is that of the row
        def step(self, text, calls): ...     an `Observation`, a text or an image
        def close(self): ...

Each conversation has an instance in its own process, which is forked after `prepare`. Methods may be
`async def`. Nothing here imports torch.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from verl.agents.tools.loading import NAME, LoadedTool, checked_schema, find_named
from verl.config.multi_turn import MultiTurnConfig

OPTION = "worker.rollout.multi_turn.environment"
KWARGS_OPTION = "worker.rollout.multi_turn.environment_kwargs"
COLUMN = "env_kwargs"
METHODS = ("reset", "step", "close")


def load_environments(options: MultiTurnConfig) -> list[LoadedTool]:
    """Import the environment of a config and check it; an empty list without one.

    Raises:
        ValueError: Its file cannot be imported, or the class breaks a rule; the message names file, class,
            rule and remedy.
    """
    if options.environment is None:
        return []
    kind, path, where = find_named(options.environment, OPTION, {})
    kwargs = dict(options.environment_kwargs)
    try:
        _check_class(kind, kwargs)
        schemas = _schemas_of(kind)
    except ValueError as error:
        raise ValueError(f"`{OPTION}`: {where} {error}") from error
    build = partial(prepared, kind, kwargs)
    return [LoadedTool(kind.__name__, schemas, path, True, build, "environment")]


def prepared(kind: Any, kwargs: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Call `prepare` of a class that has one, and return what makes an environment for a row."""
    if hasattr(kind, "prepare"):
        kind.prepare(**kwargs)
    return partial(_made, kind, kwargs)


def _made(kind: Any, kwargs: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    given = row.get(COLUMN)
    if isinstance(given, str):
        given = json.loads(given)
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"column `{COLUMN}` must be a mapping or its JSON, got {type(given).__name__}")
    # null, which files write for a missing key, replaces nothing
    return kind(**{**kwargs, **{name: value for name, value in (given or {}).items() if value is not None}})


def _check_class(kind: Any, kwargs: Mapping[str, Any]) -> None:
    missing = [name for name in METHODS if not callable(getattr(kind, name, None))]
    if not inspect.isclass(kind) or missing:
        raise ValueError(f"must be a class with `reset`, `step` and `close`, and lacks {missing}")
    try:
        inspect.signature(kind).bind_partial(**kwargs)  # rows may give the others
    except TypeError as error:
        raise ValueError(f"cannot be made with `{KWARGS_OPTION}` ({kwargs}): {error}") from error


def _schemas_of(kind: Any) -> list[dict[str, Any]]:
    declared = getattr(kind, "tools", None) or ()
    if not isinstance(declared, list | tuple):
        raise ValueError(f"has an attribute `tools` that is no list of schemas: {declared!r:.100}")
    schemas = [dict(checked_schema(schema, "entries of `tools`")) for schema in declared]
    names = [schema["function"]["name"] for schema in schemas]
    bad = [name for name in names if not NAME.fullmatch(name) or names.count(name) > 1]
    if bad:
        raise ValueError(
            f"has `tools` whose names are not distinct, or not of letters, digits, `_` and `-`: {bad}"
        )
    return schemas
