# SPDX-License-Identifier: Apache-2.0
"""Calls in the formats of models: read back from chat templates, and malformed."""

import pickle
import random

import pytest

from tests.helpers.conversations import template_of
from tests.helpers.growth import grows_with_length
from tests.helpers.nightly import by_day
from tests.helpers.tool_templates import TEMPLATES, tool_tokenizer
from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import MAX_CALLS, without_thought
from verl.agents.parsers.registry import CALL_FORMATS, call_format, format_of
from verl.agents.parsers.tagged_calls import types_of
from verl.config.multi_turn import FORMATS

FORMAT_OF = {
    "hermes": "hermes", "qwen3": "hermes", "qwen3_coder": "qwen3_coder", "qwen3_5": "qwen3_coder",
    "llama": "json", "glm": "glm", "gemma4": "gemma4",
}  # fmt: skip
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "parameters": {
                "type": "object",
                "properties": {
                    "code": {"type": "string"},
                    "count": {"type": "integer"},
                    "scale": {"type": "number"},
                    "fast": {"type": "boolean"},
                    "box": {"type": "array", "items": {"type": "integer"}},
                    "options": {"type": "object"},
                    "limit": {"type": "integer", "nullable": True},
                    "key": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                },
            },
        },
    }
]
TEXTS = [
    "print('x')", "", "5", "true", "null", '{"a": 1}', "two\nlines", "\n", " spaces ", 'a "quote" \\ and \\n',
    "</tool_call>", "<tool_call>", "</parameter>", "</function>", "</arg_value>",
    "<arg_key>", "<tool_call|>", "{[,:", "<|im_start|>", "日本語 🙂",
    "<a href='x'>&amp;</a>",
    "x = 1\nif x:\n    print(x)\n",
]  # fmt: skip
VALUES = {
    "code": TEXTS,
    "count": [0, -3, 10**20],
    "scale": [0.5, -1e-9, 3, 1e300],
    "fast": [True, False],
    "box": [[], [1, 2, 3, 4], [-1]],
    "options": [{}, {"a": [1, {"b": None}], "c": "</tool_call>"}, {"text": "a\nb"}],
    "limit": [None, 7],
    "key": ["name", "a b", 12],
}


def turn_of(template, calls, content=""):
    """The text of a turn as the model's own template writes it."""
    render = template_of(tool_tokenizer(template), tools=SCHEMAS)
    user = {"role": "user", "content": "hello"}
    written = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    turn = {"role": "assistant", "content": content, "tool_calls": written}
    prompt, whole = render([user], True, ""), render([user, turn], False, "")
    assert whole.startswith(prompt)
    turn = whole[len(prompt) :].rstrip()
    for end in ("<|im_end|>", "<|eot_id|>", "<|tool_response>", "<turn|>"):
        turn = turn.removesuffix(end)
    return turn


def random_call(rng):
    names = rng.sample(sorted(VALUES), rng.randrange(len(VALUES)))
    return ToolCall("run", {name: rng.choice(VALUES[name]) for name in names})


def test_the_options_are_the_registered_formats():
    assert {"auto", *CALL_FORMATS} == set(FORMATS)


@pytest.mark.parametrize("template", FORMAT_OF)
def test_a_format_is_that_of_the_chat_template(template):
    name = FORMAT_OF[template]

    assert format_of(TEMPLATES[template]) == name
    assert call_format("auto", TEMPLATES[template]) is CALL_FORMATS[name]
    assert call_format("json", TEMPLATES[template]) is CALL_FORMATS["json"]


def test_a_template_that_writes_calls_in_no_known_format_needs_the_option():
    with pytest.raises(ValueError, match=r"`worker.rollout.multi_turn.format=auto` finds no calls"):
        format_of(TEMPLATES["gemma"])


@pytest.mark.parametrize("template", by_day(FORMAT_OF, "hermes", "gemma4"))
def test_calls_are_read_back_from_the_chat_template(template):
    rng = random.Random(0)
    parse = CALL_FORMATS[FORMAT_OF[template]].parse
    for number in range(200):
        count = 1 if template == "llama" else rng.randrange(4)
        calls = [random_call(rng) for _ in range(count)]
        content = rng.choice(["", "Let me see."]) if template != "llama" else ""

        text = turn_of(template, calls, content) if calls or content else ""

        opened = "<think>" if template == "qwen3_5" else ""
        assert parse(without_thought(opened + text), SCHEMAS) == calls, (number, text)


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (
            '<tool_call>{"name": "run", "arguments": {"code": "a\nb"}}</tool_call>',
            ToolCall("run", {"code": "a\nb"}),
        ),
        ('<tool_call>{"name": "run"}</tool_call>', ToolCall("run", {})),
        ('<tool_call>{"name": "run", "arguments": null}</tool_call>', ToolCall("run", {})),
        ('<tool_call>{"name": "run", "arguments": "{\\"a\\": 1}"}</tool_call>', ToolCall("run", {"a": 1})),
        ('<tool_call>{"name": "run", "parameters": {"a": 1}}</tool_call>', ToolCall("run", {"a": 1})),
    ],
)
def test_hermes_calls_in_other_words(text, call):
    assert CALL_FORMATS["hermes"].parse(text, ()) == [call]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>", "is no JSON object: Expecting value at character 1"),
        ("<tool_call></tool_call>", "is no JSON object"),
        ("<tool_call>run(1)</tool_call>", "is no JSON object"),
        ('<tool_call>{"name": "run", "arguments": {}', "is no JSON object"),
        ('<tool_call>{"name": "run", "arguments": {}}', "must end with </tool_call>"),
        ('<tool_call>{"name": "run", "arguments": {}} {</tool_call>', "must end with </tool_call>"),
        ("<tool_call>[1]</tool_call>", "must be an object with `name` and `arguments`, got a list"),
        ("<tool_call>null</tool_call>", "got null"),
        ('<tool_call>{"arguments": {}}</tool_call>', "must have a `name`"),
        ('<tool_call>{"name": 3}</tool_call>', "must have a `name`"),
        (
            '<tool_call>{"name": "run", "arguments": [1]}</tool_call>',
            "`arguments` must be an object, got a list",
        ),
        ('<tool_call>{"name": "run", "arguments": "x"}</tool_call>', "got a text that is no JSON"),
        ('<tool_call>{"name": "run", "arguments": true}</tool_call>', "got true or false"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply"),
    ],
)
def test_malformed_hermes_calls_say_why(text, problem):
    (call,) = CALL_FORMATS["hermes"].parse(text, ())

    assert problem in call.problem
    assert call.arguments == {}


def test_a_malformed_call_hides_no_other_one():
    good = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
    for bad in ("<tool_call>x</tool_call>", "<tool_call>x", '<tool_call>{"a": </tool_call>'):
        calls = CALL_FORMATS["hermes"].parse(f"{good}{bad}\n{good}", ())

        assert [call.problem is None for call in calls] == [True, False, True]
        assert [call.name for call in calls] == ["run", "", "run"]


@pytest.mark.parametrize(
    ("value", "name", "read"),
    [
        ("5", "count", 5), (" 5 ", "count", 5), ("5.0", "count", 5), ("5", "code", "5"), ("5", "scale", 5),
        ("True", "fast", True), ("false", "fast", False), ("None", "limit", None), ("null", "limit", None),
        ("12", "key", 12), ("twelve", "key", "twelve"), ("5", "unknown", "5"), ("[1, 2]", "box", [1, 2]),
    ],
)  # fmt: skip
def test_values_of_xml_calls_have_the_type_of_the_schema(value, name, read):
    text = (
        f"<tool_call>\n<function=run>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )

    (call,) = CALL_FORMATS["qwen3_coder"].parse(text, SCHEMAS)

    assert call == ToolCall("run", {name: read})
    assert type(call.arguments[name]) is type(read)


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        ("<tool_call>", "", "must be followed by <function=NAME>"),
        ('<tool_call>{"name": "run"}</tool_call>', "", "must be followed by <function=NAME>"),
        ("<tool_call><function=run></tool_call>", "run", "and end with </function></tool_call>"),
        ("<tool_call><function=run></function>", "run", "and end with </function></tool_call>"),
        ("<tool_call><function=run><parameter=code>x</function></tool_call>", "run", "and end with"),
        ("<tool_call><function=run>code: x</function></tool_call>", "run", "and end with"),
        (
            "<tool_call><function=run><parameter=count>five</parameter></function></tool_call>", "run",
            "`count` must be of the type integer, got 'five'",
        ),
        (
            "<tool_call><function=run><parameter=limit>1.5</parameter></function></tool_call>", "run",
            "`limit` must be of the type integer or null, got '1.5'",
        ),
        (
            "<tool_call><function=run><parameter=count>Infinity</parameter></function></tool_call>", "run",
            "`count` must be of the type integer, got 'Infinity'",
        ),
    ],
)  # fmt: skip
def test_malformed_xml_calls_say_why(text, name, problem):
    (call,) = CALL_FORMATS["qwen3_coder"].parse(text, SCHEMAS)

    assert call.name == name and problem in call.problem


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("<tool_call>run</tool_call>", ToolCall("run", {})),
        (
            "<tool_call>run<arg_key>count</arg_key><arg_value>5</arg_value></tool_call>",
            ToolCall("run", {"count": 5}),
        ),
        ("<tool_call>\nrun\n</tool_call>", ToolCall("run", {})),
    ],
)
def test_glm_calls_without_line_breaks_and_arguments(text, call):
    assert CALL_FORMATS["glm"].parse(text, SCHEMAS) == [call]


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        ("<tool_call>", "", "must be followed by the name of a tool"),
        ('<tool_call>{"name": "run"}</tool_call>', "", "must be followed by the name of a tool"),
        ("<tool_call>run<arg_key>count</arg_key></tool_call>", "run", "and end with </tool_call>"),
        ("<tool_call>run<arg_key>count</arg_key><arg_value>5</arg_value>", "run", "and end with"),
        (
            "<tool_call>run<arg_key>count</arg_key><arg_value>five</arg_value></tool_call>", "run",
            "`count` must be of the type integer, got 'five'",
        ),
    ],
)  # fmt: skip
def test_malformed_glm_calls_say_why(text, name, problem):
    (call,) = CALL_FORMATS["glm"].parse(text, SCHEMAS)

    assert call.name == name and problem in call.problem


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("{}", {}),
        ('{ count : 5 , <|"|>a key<|"|>:null }', {"count": 5, "a key": None}),
        ("{a:[ 1 , -0.5 , [] ],b:{c:true}}", {"a": [1, -0.5, []], "b": {"c": True}}),
        ('{code:<|"|>{a:[<|"|>}', {"code": "{a:["}),
    ],
)
def test_gemma_calls_in_other_words(arguments, read):
    (call,) = CALL_FORMATS["gemma4"].parse(f"Well.<|tool_call>call:run{arguments}<tool_call|>", ())

    assert call == ToolCall("run", read)
    assert [type(value) for value in call.arguments.values()] == [type(value) for value in read.values()]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<|tool_call>", "must be followed by call:NAME{ARGUMENTS}"),
        ("<|tool_call>call:run<tool_call|>", "must be followed by call:NAME{ARGUMENTS}"),
        ("<|tool_call>call:run{code:x}<tool_call|>", "texts between <|\"|>, got 'x}"),
        ('<|tool_call>call:run{code:<|"|>x}<tool_call|>', 'a text must end with <|"|>'),
        ("<|tool_call>call:run{5}<tool_call|>", "expected ':'"),
        ("<|tool_call>call:run{count:5 6}<tool_call|>", "expected ','"),
        ("<|tool_call>call:run{:5}<tool_call|>", "expected a name"),
        ("<|tool_call>call:run{count:5", "expected ','"),
        ("<|tool_call>call:run{count:5}", "must end with <tool_call|>"),
        ("<|tool_call>call:run{a:" + "[" * 100_000, "nested too deeply"),
    ],
)
def test_malformed_gemma_calls_say_why(text, problem):
    (call,) = CALL_FORMATS["gemma4"].parse(text, ())

    assert problem in call.problem and call.arguments == {}


def test_a_gemma_call_in_thoughts_is_none():
    call = "<|tool_call>call:run{}<tool_call|>"

    assert CALL_FORMATS["gemma4"].parse(f"<|channel>thought\n{call}<channel|>{call}", ()) == [
        ToolCall("run", {})
    ]


RUN = '{"name": "run", "parameters": {"code": "x"}}'


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (RUN, 1), (f" {RUN}\n", 1), (f"<|python_tag|>{RUN}", 1), (f"```json\n{RUN}\n```", 1),
        (f"```\n{RUN}\n```", 1),
        (f"{RUN}; {RUN}", 2), (f"[{RUN}, {RUN}]", 2), (f"{RUN}\n{RUN}\n{RUN}", 3), (f"{RUN} is my call", 1),
        ("", 0), ("5", 0), ("It is 5.", 0), (f"I call {RUN}", 0), ('{"answer": 5}', 0), ("[1, 2]", 0),
        ("[]", 0),
        ("{not JSON", 0), ("[5 is the answer", 0), ('{"name": "Paris", "people": 2}', 0),
    ],
)  # fmt: skip
def test_a_turn_in_json_is_a_call_only_with_name_and_arguments(text, count):
    assert CALL_FORMATS["json"].parse(text, ()) == [ToolCall("run", {"code": "x"})] * count


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"name": "run", "parameters": {"code": "x"}', "the call is no JSON object"),
        ('{"name": "run", "parameters": [1]}', "`arguments` must be an object, got a list"),
        ('{"name": 1, "parameters": {}}', "must have a `name`"),
    ],
)
def test_malformed_json_calls_say_why(text, problem):
    (call,) = CALL_FORMATS["json"].parse(text, ())

    assert problem in call.problem


def call_in(name, value):
    """The text of a call of `run` in a format, with one argument as JSON."""
    whole = f'{{"name": "run", "arguments": {{"options": {value}}}}}'
    return {
        "json": whole,
        "hermes": f"<tool_call>{whole}</tool_call>",
        "gemma4": f"<|tool_call>call:run{{options:{value}}}<tool_call|>".replace('"', ""),
        "glm": f"<tool_call>run<arg_key>options</arg_key><arg_value>{value}</arg_value></tool_call>",
        "qwen3_coder": f"<tool_call><function=run><parameter=options>{value}</parameter>"
        "</function></tool_call>",
    }[name]


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_arguments_have_64_levels_at_most(name):
    def read(depth):
        value = '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)
        (call,) = CALL_FORMATS[name].parse(call_in(name, value), SCHEMAS)
        return call

    # the arguments are a level themselves
    whole = read(63)
    assert whole.problem is None and pickle.loads(pickle.dumps(whole)) == whole
    for depth in (64, 600):
        refused = read(depth)
        assert "nested too deeply" in refused.problem or "have over 64 levels" in refused.problem
        assert (refused.name, refused.arguments) == ("run", {})


@pytest.mark.parametrize("value", ['{"a": NaN}', '{"a": [1e999]}', '{"a": -Infinity}'])
def test_arguments_have_finite_numbers(value):
    (refused,) = CALL_FORMATS["hermes"].parse(call_in("hermes", value), SCHEMAS)

    assert refused.problem == "the arguments have a number that is not finite"


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_any_text_is_read_without_an_error(name):
    rng = random.Random(1)
    parts = [
        "<tool_call>", "</tool_call>", "<function=run>", "</function>", "<parameter=count>", "</parameter>",
        "{", "}", "[", "]", '"', '"name"', '"arguments"', ":", ",", "1", "true", "null", " ", "\n", "\\",
        "\ud800",
        "run", "NaN", "-Infinity", "1e999", "9" * 5000, "<arg_key>", "</arg_key>", "<arg_value>",
        "</arg_value>", "<|tool_call>", "<|tool_call>call:run{", "<tool_call|>", '<|"|>', "a:",
    ]  # fmt: skip
    for _ in range(3000):
        text = "".join(rng.choices(parts, k=rng.randrange(30)))

        for call in CALL_FORMATS[name].parse(text, SCHEMAS):
            assert isinstance(call.name, str) and isinstance(call.arguments, dict)


# A start, a part that is repeated, and an end: nothing that a policy writes takes a reader long.
HOSTILE = [
    ("", "<tool_call>", ""), ("", "<tool_call>a<arg_key>b</arg_key><arg_value>", ""),
    ("<tool_call>a<arg_key>", " ", "</arg_key>"),
    ("<tool_call>a<arg_key>b</arg_key><arg_value>", "</arg_value> ", ""), ("<tool_call>a", " ", ""),
    ("<tool_call>a<arg_key>b</arg_key>", " ", ""), ("", "<tool_call>a", " "),
    ("", '<tool_call>{"name": "a"}', ""), ("", '<tool_call>{"name": "a"} ', "</tool_call>"),
    ("", "<tool_call>{", ""), ("", "<tool_call>{}</tool_call>", ""), ("<tool_call>", " ", ""),
    ("<tool_call>", "{", ""), ("", "<tool_call><function=a><parameter=b>", ""),
    ("<tool_call><function=a><parameter=b>", "\n</parameter> ", ""), ("<tool_call><function=a>", "\n", ""),
    ("", "<tool_call><function=a>", ""), ("<tool_call><function=", "a", ""), ("```", " ", ""),
    ("```", " ", "```"), ("```json", "\n", "a```"), ("", "```", ""), ("", "{}", ""), ("", "{} ", ""),
    ('{"', '"name":', ""), ('{"', '"name" ', ""), ("[", '{"name": "a"},', ""), ("", "[", ""),
    ("{}", " ", "{"), ("", "<|tool_call>call:a{", ""), ('<|tool_call>call:a{b:<|"|>', "c", ""),
    ("<|tool_call>call:a{b:", "[", ""), ("", '<|tool_call>call:a{b:<|"|>', ""),
    ("<|tool_call>call:a{b:[", "1,", ""), ("<|tool_call>call:", "a", ""), ("<think>", " ", "</think>"),
    ("", "<think>", ""), ("", "</think>", ""),
]  # fmt: skip


@pytest.mark.parametrize("name", CALL_FORMATS)
@pytest.mark.parametrize(("start", "part", "end"), HOSTILE)
def test_the_time_of_a_reader_grows_with_the_length_of_the_text_and_not_faster(name, start, part, end):
    def read(text):
        CALL_FORMATS[name].parse(without_thought(text), SCHEMAS)

    assert grows_with_length(read, lambda length: start + part * (length // len(part)) + end, 32_000)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>{"name": "run"}</tool_call>'), ("json", '{"name": "run", "parameters": {}} '),
        ("glm", "<tool_call>run</tool_call>"), ("gemma4", "<|tool_call>call:run{}<tool_call|>"),
        ("qwen3_coder", "<tool_call><function=run></function></tool_call>"),
    ],
)  # fmt: skip
def test_a_turn_has_so_many_calls_at_most(name, call):
    parse = CALL_FORMATS[name].parse

    assert len(parse(call * MAX_CALLS, SCHEMAS)) == MAX_CALLS
    assert parse(call * MAX_CALLS, SCHEMAS)[-1].problem is None
    assert "at most 128 calls" in parse(call * 5_000, SCHEMAS)[-1].problem


@pytest.mark.parametrize(
    "parameters",
    [
        *(None, 5, True, [], {"properties": 5}, {"properties": {"a": True}}),
        {"properties": {"a": {"type": 5, "anyOf": True}}},
        {"properties": {"a": {"type": ["integer", 3]}}},
    ],
)
def test_a_schema_of_another_form_declares_no_types_of_what_it_does_not_describe(parameters):
    schemas = [{"type": "function", "function": {"name": "run", "parameters": parameters}}]

    assert types_of(schemas, "run", "a") == ({"integer"} if "integer" in str(parameters) else set())
