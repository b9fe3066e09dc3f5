# SPDX-License-Identifier: Apache-2.0
"""The tools of a run, and a call with its observation as the policy writes and reads them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from verl.agents.interface import Message, Observation, ToolCall
from verl.agents.rules import ConversationRules
from verl.agents.setup import check_conversations, schemas_of
from verl.config.data import DataConfig
from verl.config.worker import WorkerConfig
from verl.data.readers import load_readers, media_options

READ, WRITTEN = "|", "+"  # first character of a line of text
EXAMPLES: Mapping[str, Any] = {
    "string": "text", "integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}, "null": None,
}  # fmt: skip
ANSWER = "(the answer)"


def tool_lines(data: DataConfig, worker: WorkerConfig) -> Iterator[str]:
    """Yield a line for each tool, and an example of a call and its answer in the run's chat template.

    The environment or the agent of a run has a line too.

    Raises:
        ValueError: A tool cannot be used, or the chat template cannot show tools, calls or answers.
    """
    options = worker.rollout.multi_turn
    schemas = schemas_of(options)
    readers = load_readers(
        worker.actor.model, data.override_chat_template, media_options(data, worker.rollout),
        None, schemas,
    )  # fmt: skip
    rules = check_conversations(readers, data, options)
    if options.environment is not None:
        yield f"environment {options.environment}: its `reset` may replace the prompts below"
    if options.agent is not None:
        yield f"agent {options.agent}: it may send other messages than the prompts below"
    for schema in schemas:
        function = schema["function"]
        given = ", ".join(function.get("parameters", {}).get("properties", {}))
        yield f"tool: {function['name']}({given}): {function.get('description', '').partition(chr(10))[0]}"
    if schemas and rules.renderer.style.role == "tool":
        yield "a call and its answer (+ marks what the policy writes and learns):"
        yield from _example(rules)


def example_call(schema: Mapping[str, Any]) -> ToolCall:
    """Return a call of a tool with a value of the right type for each argument that it needs."""
    function = schema["function"]
    parameters = function.get("parameters", {})
    needed = parameters.get("required", [])
    values = {
        name: _example_value(kind)
        for name, kind in parameters.get("properties", {}).items()
        if name in needed
    }
    return ToolCall(function["name"], values)


def _example_value(kind: Mapping[str, Any]) -> Any:
    if kind.get("enum"):
        return kind["enum"][0]
    name = kind.get("type", "string")
    return EXAMPLES.get(name[0] if isinstance(name, list) else name, "text")


def _example(rules: ConversationRules) -> Iterator[str]:
    call, renderer = example_call(rules.schemas[0]), rules.renderer
    question = [{"role": "user", "content": _content("(the question)", rules)}]
    function = {"name": call.name, "arguments": call.arguments}
    turn: Message = {"role": "assistant", "content": _content("", rules)}
    turn["tool_calls"] = [{"id": "call00000", "type": "function", "function": function}]
    images = ["one"] * (rules.media is not None)
    seen = [Observation(ANSWER, images=images)]
    answer = renderer.messages([call], seen)
    prompt = renderer.template(question, True, "a question")
    whole = renderer.template([*question, turn, *answer], True, "an example of a call")
    last = rules.tokenizer.encode("a")[-1]
    end = renderer.after_turn(last, [call], answer)[0]  # of a turn: the policy samples it
    read = rules.tokenizer.decode(
        renderer.after_turn(end, [call], answer), clean_up_tokenization_spaces=False
    )
    written = whole.removeprefix(prompt).removesuffix(read)
    found = rules.format.parse(written, rules.schemas)
    if [(one.name, one.arguments, one.problem) for one in found] != [(call.name, call.arguments, None)]:
        raise ValueError(
            f"`worker.rollout.multi_turn.format={rules.options.format}` does not read the call that the chat"
            f" template writes: expected {json.dumps(function)}, got {found}; set the format of the template"
        )
    rest = whole.removeprefix(prompt)[len(written) :]
    for mark, text in ((READ, prompt), (WRITTEN, written), (READ, rest)):
        yield from (f"{mark} {line}" for line in text.strip("\n").split("\n"))


def _content(text: str, rules: ConversationRules) -> Any:
    return [{"type": "text", "text": text}] if rules.renderer.style.has_parts else text
