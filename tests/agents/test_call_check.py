# SPDX-License-Identifier: Apache-2.0
"""Arguments of a call against the schema of its tool, keyword by keyword."""

import pytest

from verl.agents.interface import ToolCall
from verl.agents.tools.tool_schema import argument_problem, call_problem


def problem(schema, value):
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return argument_problem({"function": {"name": "tool", "parameters": parameters}}, {"x": value})


@pytest.mark.parametrize(
    ("schema", "good", "bad", "reason"),
    [
        ({"type": "integer"}, 1, True, "`x` must be integer, got true"),
        ({"type": "integer"}, 1, 1.5, "`x` must be integer, got 1.5"),
        ({"type": "number"}, 1, "1", '`x` must be number, got "1"'),
        ({"type": "boolean"}, False, 0, "`x` must be boolean, got 0"),
        ({"type": ["integer", "string"]}, "a", [], "`x` must be integer or string, got []"),
        ({"type": "string", "nullable": True}, None, 1, "`x` must be string, got 1"),
        ({"type": "string"}, "", None, "`x` must be string, got null"),
        ({"enum": ["a", "b"]}, "a", "c", '`x` must be one of ["a", "b"], got "c"'),
        ({"type": "number", "minimum": 0}, 0, -1, "`x` must be at least 0, got -1"),
        ({"type": "number", "maximum": 1}, 1, 2, "`x` must be at most 1, got 2"),
        ({"type": "array", "items": {"type": "integer"}}, [1], [1, "2"], '`x[1]` must be integer, got "2"'),
        ({"type": "array", "minItems": 2, "maxItems": 2}, [1, 2], [1], "`x` must have 2 items, got 1"),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
            [1, "a"],
            [1, 2],
            "`x[1]` must be string, got 2",
        ),
        ({"prefixItems": [{}, {}]}, [1, 2], [1, 2, 3], "`x` must have 2 items, got 3"),
        (
            {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]},
            [1],
            [1.5],
            "`x` must be array or string, got [1.5]",
        ),
        (
            {"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["y"]},
            {"y": 1, "z": 2},
            {"y": "1"},
            '`x.y` must be integer, got "1"',
        ),
        ({"type": "object", "required": ["y"]}, {"y": 1}, {}, "`x.y` is missing"),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            {"a": 1},
            {"a": "b"},
            '`x.a` must be integer, got "b"',
        ),
        ({}, object, None, None),
    ],
)
def test_each_keyword_is_checked(schema, good, bad, reason):
    assert problem(schema, good) is None
    if reason is not None:
        assert f"tool was not called: {reason}. It takes x (" in problem(schema, bad)


def test_arguments_that_are_no_object_are_named():
    assert argument_problem({"function": {"name": "tool"}}, [1]) == (
        "tool takes an object of named arguments, got [1]"
    )


def test_a_tool_without_parameters_takes_no_arguments():
    schema = {"function": {"name": "tool"}}

    assert argument_problem(schema, {}) is None
    assert argument_problem(schema, {"x": 1}) == (
        "tool was not called: `x` is not one of its arguments. It takes no arguments."
    )


def test_a_message_stays_short():
    arguments = {f"name{number}": "a" * 10_000 for number in range(100)}

    text = argument_problem({"function": {"name": "tool"}}, arguments)

    assert text is not None
    assert text.count("is not one of its arguments") == 5


def test_a_long_value_is_shortened():
    text = problem({"type": "integer"}, "a" * 10_000)

    assert text is not None
    assert len(text) < 300


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (ToolCall("add", {"a": 2}), None),
        (
            ToolCall("add", {}),
            "add was not called: `a` is missing. It takes a (integer), b (integer, optional).",
        ),
        (ToolCall("ad", {"a": 2}), "There is no tool 'ad' (did you mean 'add'?); the tools are add, count"),
        (ToolCall("zzz", {}), "There is no tool 'zzz'; the tools are add, count"),
        (ToolCall("", {}, problem="not JSON"), "not JSON"),
    ],
)
def test_a_call_is_made_if_a_tool_of_that_name_takes_its_arguments(call, reason):
    integer = {"type": "integer"}
    parameters = {"properties": {"a": integer, "b": integer}, "required": ["a"]}
    add, count = {"name": "add", "parameters": parameters}, {"name": "count"}

    assert call_problem([{"function": add}, {"function": count}], call) == reason
