# SPDX-License-Identifier: Apache-2.0
"""The template of a prompt: a Jinja file that sees the text as `content` and every column of the row.

Jinja's sandbox keeps a template from files and processes, not from endless work: loops in one another or
`'a' * 10**10` hold up or fill the process that renders them, some of them when they are compiled already. A
template that only puts values into a text is rendered here; any other one in a process beside this one, whose
time and memory are limited, which takes some 40 microseconds more. To let another filter or test be rendered
here, add it to `PLAIN_FILTERS` or `PLAIN_TESTS`: its result must be no longer than its input.
"""

import os
import resource
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from verl.data.bad_rows import BadRowError
from verl.utils.child_process import IsolatedCalls

MAX_RENDERED = 10_000_000  # characters of a prompt; tokenizing them takes seconds
RENDER_TIMEOUT_S = 10.0
RENDER_MEMORY = 1 << 28  # bytes that rendering may take
PLAIN_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.Const, nodes.If, nodes.CondExpr,
    nodes.Compare, nodes.Operand, nodes.Not, nodes.And, nodes.Or, nodes.Getattr, nodes.Getitem,
)  # fmt: skip
PLAIN_FILTERS = {"trim", "lower", "upper", "capitalize", "length", "count", "first", "last", "int", "float"}
PLAIN_TESTS = {"defined", "undefined", "none", "string", "number", "mapping", "sequence"}


class PromptFormat:
    """A Jinja template that turns a row's prompt into the text of the user's message.

    Args:
        path: The template file; None keeps prompts as they are.
        timeout_s: Seconds that a row may take, where the template may be endless.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It cannot be read, or is no template.
    """

    def __init__(self, path: str | None, timeout_s: float = RENDER_TIMEOUT_S) -> None:
        self.path, self.timeout_s = path, timeout_s
        self._source = ""
        self._names: set[str] = set()  # of the columns that the template may read, and of its own
        self._is_plain = True
        self._render: _Renderer | IsolatedCalls[dict[str, Any], str] | None = None
        if path is not None:
            self._source, tree = _read_template(path)
            self._names = {node.name for node in tree.find_all(nodes.Name)}
            self._is_plain = all(_is_plain(node) for node in (tree, *tree.find_all(nodes.Node)))

    def __call__(self, content: str, row: dict[str, Any]) -> str:
        """Render the template; a column named `content` is hidden by the prompt.

        Raises:
            BadRowError: The template fails for this row.
            TimeoutError: It does not end. That is the template's fault, and every row would take as long.
        """
        if self.path is None:
            return content
        values = {name: value for name, value in row.items() if name in self._names} | {"content": content}
        try:
            text = self._rendered(values)
        except TimeoutError as error:
            raise TimeoutError(
                f"the template `data.format_prompt` ({self.path}) {error} for a prompt of {len(content)}"
                " characters: does it loop for ever?"
            ) from error
        except (ValueError, RuntimeError, ChildProcessError) as error:  # values too deep to be sent, too
            raise BadRowError(f"the template `data.format_prompt` ({self.path}) failed: {error}") from error
        if len(text) > MAX_RENDERED:
            raise BadRowError(
                f"the template `data.format_prompt` ({self.path}) makes a prompt of {len(text)} characters,"
                f" at most {MAX_RENDERED} can be read"
            )
        return text

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_render": None}  # neither compiled templates nor processes can be pickled

    def close(self) -> None:
        """End the process beside this one, if there is one; the next row starts another."""
        if isinstance(self._render, IsolatedCalls):
            self._render.close()

    def _rendered(self, values: dict[str, Any]) -> str:
        if self._render is None:
            renderer = _Renderer(self._source)
            self._render = (
                renderer if self._is_plain else IsolatedCalls(renderer, self.timeout_s, enter=_limit_memory)
            )
        try:
            return self._render(values)
        except ChildProcessError:  # of the memory that others use, perhaps; a guilty row does it again
            return self._render(values)


class _Renderer:
    """Compiles a template when it is first called; raises ValueError whatever goes wrong."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._template: jinja2.Template | None = None

    def __call__(self, values: dict[str, Any]) -> str:
        try:
            if self._template is None:
                self._template = _environment().from_string(self._source)
            return self._template.render(values)
        except jinja2.TemplateError as error:
            raise ValueError(str(error)) from error
        except Exception as error:  # columns are objects, and templates call their methods
            raise ValueError(f"{type(error).__name__}: {error}") from error


def _read_template(path: str) -> tuple[str, nodes.Template]:
    option = f"`data.format_prompt` ({path})"
    try:
        source = Path(os.path.expanduser(path)).read_text(encoding="utf-8").strip()
        return source, _environment().parse(source)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"`data.format_prompt`: no file {path}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{option}, line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ValueError(f"{option} is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} cannot be read: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)


def _is_plain(node: nodes.Node) -> bool:
    """Whether a part of a template takes no more time and room than what it puts into the text."""
    if isinstance(node, nodes.Filter):
        return node.name in PLAIN_FILTERS and not (node.args or node.kwargs)
    if isinstance(node, nodes.Test):
        return node.name in PLAIN_TESTS
    return isinstance(node, PLAIN_NODES)


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        data = int(file.read().split()[5]) * resource.getpagesize()  # as `RLIMIT_DATA` counts it
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data + RENDER_MEMORY
    resource.setrlimit(
        resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )
