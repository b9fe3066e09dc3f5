# SPDX-License-Identifier: Apache-2.0
"""Test cases of a program, and the row formats that hold them.

    {"inputs": [...], "outputs": [...], "fn_name": ...}            APPS, TACO, LiveCodeBench, Skywork-OR1
    [{"input": ..., "output": ..., "testtype": ...}, ...]          LiveCodeBench's test cases
    {"public_test_cases", "private_test_cases", "metadata"}        LiveCodeBench's rows
    {"assert_case": [...]}                                         Skywork-OR1, MBPP
    {"import_prefix", "test_code", "entry_point"}                  Skywork-OR1, LeetCode, HumanEval

Each may be JSON text. Without `fn_name`, a test provides stdin and expects stdout.
"""

import ast
import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FUNCTIONAL = "functional"  # LiveCodeBench's word for a test that calls a function


@dataclass(frozen=True)
class StdinCase:
    """The program reads `stdin` and must write `stdout`."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class CallCase:
    """The function, or the method of `Solution`, must return `expected` for `arguments`."""

    function: str
    arguments: list[Any]
    expected: Any


@dataclass(frozen=True)
class AssertCase:
    """After `before`, the expression must have the value `expected`, which the program never sees.

    For an assertion that compares with a literal. For any other assertion, `expression` is its condition and
    `expected` is True, a value that a cheating program could write itself.
    """

    before: str
    expression: str
    expected: Any
    prefix: str = ""  # executed before the program


Case = StdinCase | CallCase | AssertCase


def read_cases(tests: Any) -> list[Case]:
    """Read the tests of a row in any of the formats above.

    Raises:
        ValueError: The format is unknown, or there is no test.
    """
    try:
        cases = list(_cases(json.loads(tests) if isinstance(tests, str) else tests))
    except (KeyError, TypeError, AttributeError, SyntaxError) as error:
        raise ValueError(f"these tests cannot be read: {type(error).__name__} {error}") from error
    if not cases:
        raise ValueError("a row of code needs at least one test")
    return cases


def _cases(tests: Any) -> Iterator[Case]:
    if isinstance(tests, list | tuple):
        for test in tests:
            yield from _assertions(test) if isinstance(test, str) else [_input_and_output(test)]
    elif "public_test_cases" in tests or "private_test_cases" in tests:
        metadata = tests.get("metadata") or {}
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
        for name in ("public_test_cases", "private_test_cases"):
            for test in _unpacked(tests.get(name) or []):
                yield _input_and_output(test, metadata.get("func_name"))
    elif "inputs" in tests:
        name = tests.get("fn_name")
        for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True):
            yield _call(name, given, wanted) if name else StdinCase(_text(given), _text(wanted))
    elif "test_code" in tests:
        yield from _checks(tests["test_code"], tests["entry_point"], tests.get("import_prefix") or "")
    elif "assert_case" in tests:
        for test in tests["assert_case"]:
            yield from _assertions(test)
    else:
        known = "inputs, assert_case, test_code, public_test_cases or a list of input and output"
        raise ValueError(f"tests must have {known}, got the keys {sorted(tests)}")


def _input_and_output(test: dict[str, Any], function: str | None = None) -> Case:
    metadata = test.get("metadata") or {}
    function = test.get("fn_name") or metadata.get("func_name") or function
    if test.get("testtype", FUNCTIONAL if function else "") == FUNCTIONAL:
        if not function:
            raise ValueError("a functional test needs `fn_name`, or `func_name` in its `metadata`")
        return _call(function, test["input"], test["output"])
    return StdinCase(_text(test["input"]), _text(test["output"]))


def _unpacked(tests: Any) -> list[dict[str, Any]]:
    """Decode a list, JSON, or LiveCodeBench's form: JSON pickled, compressed and in base 64."""
    if not isinstance(tests, str):
        return tests
    if tests.lstrip().startswith("["):
        return json.loads(tests)
    try:
        pickled = zlib.decompress(base64.b64decode(tests, validate=True))
        return json.loads(_TextUnpickler(io.BytesIO(pickled)).load())
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError) as error:
        known = "a list, JSON or LiveCodeBench's packed form"
        raise ValueError(f"test cases must be {known}: {error}") from error


class _TextUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"packed test cases may hold text only, not {module}.{name}")


def _text(value: Any) -> str:
    return "\n".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)


def _call(name: str, given: Any, wanted: Any) -> CallCase:
    """Read arguments (a list, or JSON lines) and their result (a value, in a list, or JSON)."""
    if isinstance(given, str):
        arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
    else:
        arguments = list(given.values()) if isinstance(given, dict) else list(given)
    if isinstance(wanted, str) and isinstance(given, str):
        return CallCase(name, arguments, json.loads(wanted))
    if isinstance(wanted, list) and len(wanted) == 1 and not isinstance(given, str):
        wanted = wanted[0]
    return CallCase(name, arguments, wanted)


def _assertions(
    code: str, before: str = "", prefix: str = "", body: list[ast.stmt] | None = None
) -> Iterator[AssertCase]:
    """Split `body`, by default all the code, into assertions, each with the other statements before it."""
    body = ast.parse(code).body if body is None else body
    others = [node for node in body if not isinstance(node, ast.Assert)]
    if any(isinstance(inner, ast.Assert) for node in others for inner in ast.walk(node)):
        yield AssertCase(f"{before}\n{code}", "True", True, prefix)
        return
    for node in body:
        if isinstance(node, ast.Assert):
            yield AssertCase(before, *_expected(node.test), prefix)
        else:
            before += f"\n{ast.unparse(node)}"


def _checks(code: str, entry_point: str, prefix: str) -> Iterator[AssertCase]:
    body = ast.parse(code).body
    check = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None:
        return _assertions(code, prefix=prefix)
    others = "\n".join(ast.unparse(node) for node in body if node is not check)
    before = f"{others}\n{check.args.args[0].arg} = {entry_point}"
    call = f"{ast.unparse(check)}\ncheck({entry_point})"
    return _assertions(call, before, prefix, check.body)


def _expected(test: ast.expr) -> tuple[str, Any]:
    """Return an expression and the literal that it is compared with, or the condition and True."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for side, other in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            try:
                return ast.unparse(side), ast.literal_eval(other)
            except ValueError:
                continue  # not a literal
    return f"bool({ast.unparse(test)})", True
