# SPDX-License-Identifier: Apache-2.0
"""Tools as a config names them: their schemas, and every error at the start, without torch."""

import subprocess
import sys
from typing import Any, Literal

import pytest

from verl.agents.tools.loading import SHIPPED, load_tools
from verl.agents.tools.tool_schema import function_schema
from verl.config.multi_turn import SHIPPED_AGENTS, SHIPPED_ENVIRONMENTS, SHIPPED_TOOLS, MultiTurnConfig


def plain(text: str, count: int = 3) -> str:
    """Repeat a text.

    It is not translated.

    Args:
        text: What to repeat,
            over two lines.
        count: Number of times.
    """
    return text * count


def rich(
    box: list[float],
    point: tuple[int, str],
    labels: dict[str, int],
    mode: Literal["fast", "slow"],
    either: int | str,
    nested: list[int] | str,
    anything: Any,
    drink: str,
    maybe: str | None = None,
    switch: bool = False,
):
    """Take arguments of all kinds.

    Args:
        box: Edges.
        point: A point.
        labels: Numbers by name.
        mode: Speed.
        either: One of two.
        nested: One of two, of which one has parts.
        anything: Any value.
        drink: A drink (choices: ["tea", "coffee"])
        maybe: Perhaps nothing.
        switch: On or off.

    Returns:
        Nothing.

    Raises:
        ValueError: Never.
    """


def alone() -> int:
    """Return a number."""
    return 1


@pytest.mark.parametrize("function", [plain, rich, alone])
def test_a_schema_is_the_one_of_transformers(function):
    from transformers.utils.chat_template_utils import get_json_schema

    theirs = get_json_schema(function)
    theirs["function"].pop("return", None)

    assert function_schema(function, function.__name__) == theirs


def options_for(tmp_path, text, *names, **options):
    path = tmp_path / "tools.py"
    path.write_text(text)
    return MultiTurnConfig(enable=True, tools=tuple(f"{path}:{name}" for name in names), **options)


HEAD = '"""Tools."""\nimport os\n'
FUNCTION = 'def look(what: str):\n    """Look.\n\n    Args:\n        what: Thing.\n    """\n'
CLASS = (
    "class Look:\n    def __init__(self, depth: int = 1): ...\n    def create(self, row): ...\n"
    '    def __call__(self, state, what: str):\n        """Look.\n\n        Args:\n            what: Thing.\n'
    '        """\n'
)
WRONG = {
    "no docstring": ("def look(what: str): ...", r"tools.py:3 `look` has no docstring: add one"),
    "no hint": (FUNCTION.replace(": str", ""), r"tools.py:3 `look` has no type hint at argument `what`"),
    "undescribed": (
        'def look(what: str):\n    """Look."""\n',
        r"`look` does not describe argument `what`: add it to the docstring",
    ),
    "a hint that JSON has not": (
        FUNCTION.replace("str", "os.PathLike"),
        r"the type hint `PathLike` at argument `what`, which JSON cannot express",
    ),
    "an unknown hint": (FUNCTION.replace("str", "'Strung'"), r"a type hint that cannot be read: .*Strung"),
    "arguments without names": (FUNCTION.replace("what:", "*what:"), r"takes `\*what: str`, but a policy"),
    "choices that are not JSON": (
        FUNCTION.replace("Thing.", "Thing (choices: a, b)"),
        r"choices of `what` that are not JSON",
    ),
    "an import": ("import no_such_module\n" + FUNCTION, r"ModuleNotFoundError.*no_such_module.*tools.py:3"),
    "a syntax error": ("def look(:\n", r"importing .*tools.py failed: SyntaxError"),
    "another name": (
        FUNCTION.replace("look", "watch"),
        r"`look` is missing in .*tools.py; it defines \['watch'\]",
    ),
    "a value": ("look = 1\n", r"`look` is a int, not a function or class"),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_error_names_file_tool_and_remedy(tmp_path, what):
    text, message = WRONG[what]

    with pytest.raises(ValueError, match=r"`worker.rollout.multi_turn.tools`(?s:.*)" + message):
        load_tools(options_for(tmp_path, HEAD + text, "look"))


WRONG_CLASSES = {
    "no call": (CLASS.replace("__call__", "call"), {}, r"`Look` has no method `__call__`"),
    "no state": (
        CLASS.replace("(self, state, what: str)", "(self)"),
        {},
        r"`__call__` must take its result first: `__call__\(self, state, ...\)`",
    ),
    "a schema": (CLASS + "    schema = {'name': 'look'}\n", {}, r'a class attribute `schema` like {"type"'),
    "an unknown argument": (CLASS, {"Look": {"deep": 1}}, r"cannot be made with .*tool_kwargs.Look.*'deep'"),
    "kwargs of no tool": (
        CLASS,
        {"look": {}},
        r"tool_kwargs.look`: no tool has that name; there are \['Look'\]",
    ),
    "a name that no template can hold": (
        CLASS + "    name = 'look at'\n",
        {},
        r"must be letters, .* 'look at'",
    ),
}


@pytest.mark.parametrize("what", WRONG_CLASSES)
def test_an_error_of_a_class_names_rule_and_remedy(tmp_path, what):
    text, kwargs, message = WRONG_CLASSES[what]

    with pytest.raises(ValueError, match=message):
        load_tools(options_for(tmp_path, HEAD + text, "Look", tool_kwargs=kwargs))


def test_a_function_takes_no_kwargs(tmp_path):
    options = options_for(tmp_path, FUNCTION, "look", tool_kwargs={"look": {"depth": 1}})

    with pytest.raises(
        ValueError, match=r"`look` is a function and takes no `.*tool_kwargs.look`: make it a"
    ):
        load_tools(options)


def test_two_tools_of_one_name_are_refused(tmp_path):
    text = FUNCTION + CLASS + "    name = 'look'\n"

    with pytest.raises(ValueError, match="two tools are named `look`"):
        load_tools(options_for(tmp_path, text, "look", "Look"))


def test_a_file_with_two_tools_runs_once(tmp_path):
    text = FUNCTION + CLASS + f"\nwith open({str(tmp_path / 'runs')!r}, 'a') as file:\n    file.write('x')\n"

    names = [tool.name for tool in load_tools(options_for(tmp_path, text, "look", "Look"))]

    assert (names, (tmp_path / "runs").read_text()) == (["look", "Look"], "x")


def test_a_class_has_the_schema_that_it_declares(tmp_path):
    schema = {"type": "function", "function": {"name": "peek", "parameters": {"type": "object"}}}

    (tool,) = load_tools(options_for(tmp_path, CLASS + f"    schema = {schema}\n", "Look"))

    assert (tool.name, tool.schemas, tool.is_stateful) == ("peek", [schema], True)


def test_the_arguments_of_a_class_are_those_after_its_state(tmp_path):
    (tool,) = load_tools(options_for(tmp_path, CLASS, "Look"))

    assert list(tool.schemas[0]["function"]["parameters"]["properties"]) == ["what"]


def test_every_shipped_tool_loads_by_its_name():
    assert tuple(SHIPPED) == (*SHIPPED_TOOLS, *SHIPPED_ENVIRONMENTS, *SHIPPED_AGENTS)
    kwargs = {"search": {"endpoint": "http://localhost:8000/retrieve"}}
    options = MultiTurnConfig(enable=True, tools=SHIPPED_TOOLS, tool_kwargs=kwargs)

    assert [tool.name for tool in load_tools(options)] == list(SHIPPED_TOOLS)


def test_tools_are_loaded_without_torch_and_transformers():
    code = (
        "import sys; from verl.agents.tools.loading import load_tools;"
        "from verl.config.multi_turn import *;"
        "load_tools(MultiTurnConfig(tools=('calculator', 'zoom')));"
        "print(sorted({'torch', 'transformers', 'ray', 'vllm'} & {*sys.modules}))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"
