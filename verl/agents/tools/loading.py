# SPDX-License-Identifier: Apache-2.0
"""Load the tools named in a config: functions and classes of files, shipped ones, those of verl's YAML.

    async def weather(city: str) -> str:         a function: its docstring describes it and its arguments
        ...

    class Search:                                 a class without `create`: made once, called like a function
        name = "search"
        def __init__(self, endpoint): ...         from `tool_kwargs.search`
        def __call__(self, query: str) -> str: ...

    class Notebook:                               a class with `create`: a state for each conversation
        def create(self, row): ...
        def __call__(self, state, code: str): ...
        def close(self, state): ...

Nothing here imports torch. A file is run here, when the run starts, and once more in each pool of tools.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.agents.tools.tool_schema import function_schema
from verl.agents.tools.verl_tools import VerlTool, read_verl_tools
from verl.config.multi_turn import MultiTurnConfig
from verl.utils.registry import HEADING, place_of
from verl.utils.user_file import find_function, import_file

OPTION = "worker.rollout.multi_turn.tools"
KWARGS_OPTION = "worker.rollout.multi_turn.tool_kwargs"
SHIPPED = {  # by the names of `verl.config.multi_turn`, in the folders `shipped/` of `verl/agents/`
    "calculator": "tools/shipped/calculator.py:calculator",
    "python": "tools/shipped/python.py:Python",
    "search": "tools/shipped/search.py:Search",
    "zoom": "tools/shipped/zoom.py:Zoom",
    "gymnasium": "environments/shipped/gymnasium_env.py:Gymnasium",
    "verifiers": "harnesses/shipped/verifiers_agent.py:run",
}
NAME = re.compile(r"[A-Za-z_][\w-]{0,63}")  # as OpenAI allows


@dataclass(frozen=True)
class LoadedTool:
    """A tool, an environment or an agent whose file was imported."""

    name: str
    schemas: Sequence[Mapping[str, Any]]  # that chat templates show; an environment may have any number
    path: Path  # of its file
    is_stateful: bool
    build: Callable[[], Any]  # what is called: the function, or an instance of the class
    kind: str = "tool"  # or environment, or agent


def load_tools(options: MultiTurnConfig) -> list[LoadedTool]:
    """Import the tools of a config and check them.

    Raises:
        ValueError: A file cannot be imported, or a tool breaks a rule; the message names file, tool, rule and
            remedy.
    """
    modules: dict[Path, ModuleType] = {}
    loaded = [_load_tool(spec, options.tool_kwargs, modules) for spec in options.tools]
    if options.tool_config_path is not None:
        for name, schema, kind, config in read_verl_tools(Path(options.tool_config_path)):
            path = Path(inspect.getsourcefile(kind) or options.tool_config_path)
            loaded.append(LoadedTool(name, [schema], path, True, partial(VerlTool, kind, config, schema)))
    _check_names(loaded, options)
    return loaded


def _check_names(loaded: Sequence[LoadedTool], options: MultiTurnConfig) -> None:
    by_name: dict[str, LoadedTool] = {}
    for tool in loaded:
        if not NAME.fullmatch(tool.name):
            raise ValueError(
                f"`{OPTION}`: {tool.path}: a tool's name must be letters, digits, `_` and `-`, at most 64,"
                f" got {tool.name!r}"
            )
        if tool.name in by_name:
            other = by_name[tool.name].path
            raise ValueError(
                f"`{OPTION}`: two tools are named `{tool.name}`, of {other} and of {tool.path}: rename the"
                " function, or give one of the classes another `name`"
            )
        by_name[tool.name] = tool
    for name in options.tool_kwargs:
        if name not in by_name:
            raise ValueError(f"`{KWARGS_OPTION}.{name}`: no tool has that name; there are {sorted(by_name)}")


def _load_tool(spec: str, all_kwargs: Mapping[str, Any], modules: dict[Path, ModuleType]) -> LoadedTool:
    found, path, where = find_named(spec, OPTION, modules)
    attribute = SHIPPED.get(spec, spec).rpartition(":")[2]
    try:
        if inspect.isclass(found):
            return _load_class(found, attribute, path, all_kwargs)
        if not inspect.isroutine(found):
            raise ValueError(f"is a {type(found).__name__}, not a function or class: call it in a `def`")
        if all_kwargs.get(attribute):
            raise ValueError(f"is a function and takes no `{KWARGS_OPTION}.{attribute}`: make it a class")
        schema = function_schema(found, attribute)
        return LoadedTool(attribute, [schema], path, False, lambda: found)
    except ValueError as error:
        raise ValueError(f"`{OPTION}`: {where} {error}") from error


def find_named(spec: str, option: str, modules: dict[Path, ModuleType]) -> tuple[Any, Path, str]:
    """Import `file.py:NAME` or a shipped function or class; return it, its file, and its place for errors.

    `modules` are the files that were imported already, to which this one is added.
    """
    if spec in SHIPPED:
        spec = str(Path(__file__).parents[1] / SHIPPED[spec])
    file, _, attribute = spec.rpartition(":")
    path = Path(file).absolute()
    if not path.is_file():
        raise ValueError(f"`{option}`: no file {path}")
    if path not in modules:
        modules[path] = import_file(path, option, "tool_file", HEADING)
    found = find_function(modules[path], path, attribute, option)
    return found, path, place_of(f"{path}:{attribute}", found)


def _load_class(tool_class: type, attribute: str, path: Path, all_kwargs: Mapping[str, Any]) -> LoadedTool:
    if "__call__" not in dir(tool_class):
        raise ValueError("has no method `__call__`: it is what the policy calls")
    call, is_stateful = tool_class.__call__, hasattr(tool_class, "create")
    arguments = list(inspect.signature(call).parameters)
    if is_stateful and len(arguments) < 2:
        raise ValueError(
            "has a method `create`, so `__call__` must take its result first: `__call__(self, state, ...)`"
        )
    declared = getattr(tool_class, "schema", None)
    name = str(getattr(tool_class, "name", attribute))
    if declared is None:
        schema = function_schema(call, name, skipped=2 if is_stateful else 1)
    else:
        schema = checked_schema(declared, "a docstring at `__call__`, or a class attribute `schema`")
        name = schema["function"]["name"]
    kwargs = dict(all_kwargs.get(name) or {})
    try:
        inspect.signature(tool_class).bind(**kwargs)
    except TypeError as error:
        raise ValueError(f"cannot be made with `{KWARGS_OPTION}.{name}` ({kwargs}): {error}") from error
    return LoadedTool(name, [schema], path, is_stateful, partial(tool_class, **kwargs))


def checked_schema(schema: Any, what: str) -> Mapping[str, Any]:
    """Return a schema that OpenAI's API would take for a function."""
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f'must have {what} like {{"type": "function", "function": {{"name": ...,'
            ' "description": ..., "parameters": {...}}}'
        )
    return schema
