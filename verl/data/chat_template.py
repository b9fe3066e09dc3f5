# SPDX-License-Identifier: Apache-2.0
"""Render conversations with the chat template of a model."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verl.data.bad_rows import BadRowError
from verl.data.messages import Message
from verl.data.prompt_template import MAX_RENDERED, RENDER_MEMORY, RENDER_TIMEOUT_S
from verl.utils.processes.child_process import limit_memory
from verl.utils.processes.isolated_calls import IsolatedCalls

REASONING = ("reasoning_content", "reasoning", "thinking")
OTHER_TEMPLATE = "set another template with `data.override_chat_template`"


class ChatTemplate:
    """The chat template of a model, rendered by transformers in a process of limited time and memory.

    A template comes with a model and is anybody's: its loops may not end, its strings may fill the memory.

    Args:
        template: None uses the tokenizer's.
        variables: Further variables of the template, each of which it must read.
        override: Path of the file (`data.override_chat_template`) that replaced the model's, for errors.
        tools: Schemas of the tools that the model may call.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        override: str | None = None,
        timeout_s: float = RENDER_TIMEOUT_S,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        source = str(template or tokenizer.chat_template)
        for name in variables:
            if name not in source:
                raise ValueError(
                    f"`data.apply_chat_template_kwargs` sets {name!r}, which the chat template does not read:"
                    " correct or remove it"
                )
        if tools:
            if "tools" not in source:
                raise ValueError(
                    "`worker.rollout.multi_turn.tools` need a chat template that shows them, and that of the"
                    f" model does not: {OTHER_TEMPLATE}, such as one of `examples/chat_template`, which"
                    " `verl-examples` copies"
                )
            variables = {**variables, "tools": list(tools)}
        self._shows_tools = "tools" in source
        self._file = override or _template_file(str(tokenizer.name_or_path))
        limit = partial(limit_memory, RENDER_MEMORY)
        self._render = IsolatedCalls(
            partial(_render, tokenizer, template, dict(variables)), timeout_s, limit, retry=True
        )

    def __call__(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        name: str,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Render messages; errors call them `name`. A TimeoutError is the template's fault, not the row's.

        Args:
            tools: Schemas of the tools of these messages, instead of those of all.
        """
        if tools and not self._shows_tools:
            raise BadRowError(
                f"the chat template ({self._file}) shows no tools, and the row has some: {OTHER_TEMPLATE}"
            )
        template = f"the chat template ({self._file})"
        try:
            return self._render((messages, add_generation_prompt, tools))
        except TimeoutError as error:
            raise TimeoutError(
                f"{template} {error} for {name}: does it loop forever? {OTHER_TEMPLATE}"
            ) from error
        except (ValueError, ChildProcessError) as error:
            raise BadRowError(f"{template} cannot render {name}: {error}") from error

    def close(self) -> None:
        """End the process; the next call starts another."""
        self._render.close()


def check_shown(
    messages: Sequence[Message],
    text: str,
    render: Callable[[Sequence[Message]], str],
    trained: Collection[int] = (),
) -> None:
    """Raise a BadRowError if the rendered text leaves out content, a call, or reasoning to train on.

    A part that the text lacks word for word is shown if the text would differ without it.
    """
    for index, message in enumerate(messages):
        for part, rest in _parts_to_show(message, text, index in trained):
            try:
                is_shown = render([*messages[:index], rest, *messages[index + 1 :]]) != text
            except BadRowError:
                continue  # the template needs it
            if not is_shown:
                raise BadRowError(
                    f"the chat template does not show the {part} of message {index}, of the"
                    f" {message['role']}: {OTHER_TEMPLATE}, or leave it out of the row"
                )


def _parts_to_show(message: Message, text: str, is_trained: bool) -> Iterator[tuple[str, Message]]:
    """Yield the parts of a message to look for, each with the message without it."""
    content = message["content"]
    if isinstance(content, str):
        if content.strip() not in text:
            yield "content", message | {"content": ""}
    else:
        for place, part in enumerate(content):
            if part.get("text", "").strip() not in text:
                yield "content", message | {"content": [*content[:place], *content[place + 1 :]]}
    calls = message.get("tool_calls", ())
    for place, call in enumerate(calls):
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        others = [*calls[:place], *calls[place + 1 :]]
        yield f"call of `{call['function']['name']}`", rest | ({"tool_calls": others} if others else {})
    for key in REASONING if is_trained else ():
        if message.get(key):
            yield f"`{key}`", {name: value for name, value in message.items() if name != key}


def _render(
    tokenizer: Any,
    template: str | None,
    variables: dict[str, Any],
    request: tuple[Sequence[Message], bool, Sequence[Mapping[str, Any]]],
) -> str:
    messages, add_generation_prompt, tools = request
    if tools:
        variables = {**variables, "tools": list(tools)}
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **variables,
        )
        text.encode()  # the tokenizer's own error for a lone surrogate is misleading
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything
        raise ValueError(str(error)) from error
    if len(text) > MAX_RENDERED:
        raise ValueError(f"it makes {len(text)} characters, the limit is {MAX_RENDERED}")
    return text


def _template_file(model: str) -> str:
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    files = (path for path in (Path(model) / name for name in names) if path.is_file())
    return str(next(files, model))
