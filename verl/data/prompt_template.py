# SPDX-License-Identifier: Apache-2.0
"""Prompt templates: Jinja files that see the prompt as `content` and every column of the row."""

import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from verl.data.bad_rows import BadRowError
from verl.utils.processes.child_process import limit_memory
from verl.utils.processes.isolated_calls import IsolatedCalls

MAX_RENDERED = 10_000_000  # characters of a prompt; tokenizing them takes seconds
RENDER_TIMEOUT_S = 10.0
RENDER_MEMORY = 1 << 28  # bytes that rendering may take


class PromptFormat:
    """A Jinja template that turns the prompt of a row into the user message.

    Jinja's sandbox keeps a template away from files and processes, but does not limit its work: nested loops
    or `'a' * 10**10` can block or fill a process. It is rendered in one of limited time and memory.

    Args:
        path: The template file; None keeps prompts as they are.
        timeout_s: Limit for a row in seconds.
    """

    def __init__(self, path: str | None, timeout_s: float = RENDER_TIMEOUT_S) -> None:
        self.path, self.timeout_s = path, timeout_s
        self.names: frozenset[str] = frozenset()  # that the template reads
        if path is None:
            return
        source, tree = _read_template("data.format_prompt", path)
        self.names = frozenset(node.name for node in tree.find_all(nodes.Name))
        render, limit = partial(_render, source.strip()), partial(limit_memory, RENDER_MEMORY)
        self._render = IsolatedCalls(render, timeout_s, limit, retry=True)

    def __call__(self, content: str, row: dict[str, Any]) -> str:
        """Render the template; the prompt hides a column named `content`.

        A TimeoutError is not a BadRowError: the template is at fault, and every row would take as long.
        """
        if self.path is None:
            return content
        values = {name: value for name, value in row.items() if name in self.names} | {"content": content}
        template = f"the template `data.format_prompt` ({self.path})"
        try:
            text = self._render(values)
        except TimeoutError as error:
            cause = f"{error} for a prompt of {len(content)} characters: does it loop forever?"
            raise TimeoutError(f"{template} {cause}") from error
        except (ValueError, RuntimeError, ChildProcessError) as error:  # also values too deep to be sent
            found = f"; the row has {', '.join({'content': None} | row)}" if "undefined" in str(error) else ""
            raise BadRowError(f"{template} failed: {error}{found}") from error
        if (size := len(text)) > MAX_RENDERED:
            raise BadRowError(f"{template} makes a prompt of {size} characters, the limit is {MAX_RENDERED}")
        return text

    def close(self) -> None:
        """End the process, if any; the next row starts another."""
        if self.path is not None:
            self._render.close()


def _render(source: str, values: dict[str, Any]) -> str:
    try:
        return _compiled(source).render(values)
    except jinja2.TemplateError as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # columns are objects, and templates call their methods
        raise ValueError(f"{type(error).__name__}: {error}") from error


@cache
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)  # computes constants, so only where the template is rendered


def read_chat_template(path: str) -> str:
    """Read the file of `data.override_chat_template`, and check its syntax."""
    return _read_template("data.override_chat_template", path)[0]


def _read_template(option: str, path: str) -> tuple[str, nodes.Template]:
    try:
        source = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
        return source, _environment().parse(source)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"`{option}`: no file {path}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"`{option}` ({path}), line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ValueError(f"`{option}` ({path}) is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"`{option}` ({path}) cannot be read: {error}") from error


def no_chat_template(model: str | Path) -> ValueError:
    return ValueError(f"{model} has no chat template: set `data.override_chat_template` to a Jinja file")


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
