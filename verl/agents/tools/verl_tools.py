# SPDX-License-Identifier: Apache-2.0
"""Tools in verl's form: a YAML file that lists classes with `create`, `execute` and `release`.

tools:
  - class_name: my_package.my_tools.Lookup
    config: {}
    tool_schema: {type: function, function: {name: lookup, description: ..., parameters: {...}}}

A row's `tools_kwargs` holds {name: {"create_kwargs": {...}, "execute_kwargs": {...}}}.
"""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.agents.interface import Observation
from verl.config.parsing import read_config_file
from verl.utils.user_file import extend_import_path

OPTION = "worker.rollout.multi_turn.tool_config_path"
EXAMPLE = (
    '{class_name: package.module.Class, config: {}, tool_schema: {type: function, function: {name: "..."}}}'
)


class VerlTool:
    """A tool of verl as one of ours. Its methods may be `async def`."""

    def __init__(self, tool_class: type, config: dict[str, Any], schema: Mapping[str, Any]) -> None:
        self.tool = tool_class(config, schema)
        self.name = schema["function"]["name"]

    async def create(self, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        kwargs = ((row.get("tools_kwargs") or {}).get(self.name)) or {}
        instance = await _awaited(self.tool.create(**(kwargs.get("create_kwargs") or {})))
        return instance[0] if isinstance(instance, tuple) else instance, kwargs

    async def __call__(self, state: tuple[str, dict[str, Any]], **arguments: Any) -> Observation:
        instance, kwargs = state
        further = kwargs.get("execute_kwargs") or {}
        answer = await _awaited(self.tool.execute(instance, arguments, **further))
        answer, reward = answer[:2] if isinstance(answer, tuple) else (answer, None)
        if isinstance(answer, str):
            return Observation(answer, reward=reward)
        get = answer.get if isinstance(answer, Mapping) else lambda name: getattr(answer, name, None)
        return Observation(get("text") or "", get("image") or (), get("video") or (), reward)

    async def close(self, state: tuple[str, dict[str, Any]]) -> None:
        instance, kwargs = state
        await _awaited(self.tool.release(instance, **(kwargs.get("release_kwargs") or {})))


def read_verl_tools(path: Path) -> Iterator[tuple[str, Mapping[str, Any], type, dict[str, Any]]]:
    """Read the file and yield the name, the schema, the class and the config of each entry.

    Raises:
        ValueError: An entry is wrong, or its class cannot be imported; the message names it.
    """
    try:
        entries = read_config_file(path).get("tools")
    except ValueError as error:
        raise ValueError(f"`{OPTION}`: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"`{OPTION}`: {path} must have a list `tools` of entries like {EXAMPLE}")
    extend_import_path(path)
    for idx, entry in enumerate(entries):
        where = f"`{OPTION}`: {path}, entry {idx}"
        try:
            schema = entry["tool_schema"]
            name, class_name = str(schema["function"]["name"]), str(entry["class_name"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{where} must be like {EXAMPLE}; {error} is wrong or missing") from error
        module, _, attribute = class_name.rpartition(".")
        try:
            tool_class = getattr(importlib.import_module(module), attribute)
        except Exception as error:
            remedy = "; verl's own tools are not part of this package" if module.startswith("verl.") else ""
            raise ValueError(f"{where}: {class_name} cannot be imported: {error!r}{remedy}") from error
        missing = [each for each in ("create", "execute", "release") if not hasattr(tool_class, each)]
        if missing:
            raise ValueError(f"{where}: {class_name} has no method {missing}, as tools of verl do")
        yield name, schema, tool_class, dict(entry.get("config") or {})


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
