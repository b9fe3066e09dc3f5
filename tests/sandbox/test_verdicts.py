# SPDX-License-Identifier: Apache-2.0
"""Tests of programs in every row format, and what is said about the programs."""

import base64
import json
import os
import pickle
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from verl.sandbox.cases import AssertCase, CallCase, StdinCase, read_cases
from verl.sandbox.outcome import Isolation, Limits
from verl.sandbox.runner import detect
from verl.sandbox.verdicts import VerdictKind, judge, same_output

ROOT = Path(__file__).parents[2]
needs_isolation = pytest.mark.skipif(detect()[0] is Isolation.NONE, reason="this machine has no isolation")
QUICK = Limits(cpu_s=1, memory_mb=256)
SUM = "print(sum(map(int, input().split())))"
PRINTS_5 = [{"input": "", "output": "5"}]
ADD = "def add(a, b): return a + b"
SOLUTION = "class Solution:\n    def add(self, a: int, b: List[int]) -> int: return a + sum(b)"


def kinds(source, tests, **options):
    return [verdict.kind for verdict in judge(source, tests, limits=QUICK, **options)]


def packed(tests):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


@pytest.mark.parametrize(
    ("tests", "cases"),
    [
        ([{"input": "1 2", "output": "3"}], [StdinCase("1 2", "3")]),
        ({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}, [StdinCase("1 2", "3"), StdinCase("3 4", "7")]),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, [StdinCase("1\n2", "3")]),  # lines
        ({"inputs": [[1, [2]]], "outputs": [[3]], "fn_name": "add"}, [CallCase("add", [1, [2]], 3)]),
        ({"inputs": ["1\n[2]"], "outputs": ["[3]"], "fn_name": "add"}, [CallCase("add", [1, [2]], [3])]),
        (
            [{"input": "1\n[2]", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}],
            [CallCase("add", [1, [2]], 3)],
        ),
        (
            {
                "public_test_cases": '[{"input": "1\\n2", "output": "3", "testtype": "functional"}]',
                "private_test_cases": packed([{"input": "4\n5", "output": "9", "testtype": "functional"}]),
                "metadata": '{"func_name": "add"}',
            },
            [CallCase("add", [1, 2], 3), CallCase("add", [4, 5], 9)],
        ),
        (
            {"public_test_cases": [{"input": "1 2", "output": "3", "testtype": "stdin"}]},
            [StdinCase("1 2", "3")],
        ),
        (["assert add(1, 2) == 3"], [AssertCase("", "add(1, 2)", 3)]),
        ({"assert_case": ["assert (3,) == add(1, 2)"]}, [AssertCase("", "add(1, 2)", (3,))]),
        ({"assert_case": ["x = 1\nassert add(x) < 2"]}, [AssertCase("\nx = 1", "bool(add(x) < 2)", True)]),
        (
            {
                "import_prefix": "import math\n",
                "test_code": "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2)",
                "entry_point": "add",
            },
            [
                AssertCase("\ncandidate = add", "candidate(1)", 2, "import math\n"),
                AssertCase("\ncandidate = add", "bool(candidate(2))", True, "import math\n"),
            ],
        ),
    ],
)
def test_every_row_format_is_read(tests, cases):
    assert read_cases(tests) == cases
    if not isinstance(tests, list) or not isinstance(tests[0], str):
        assert read_cases(json.dumps(tests)) == cases


@pytest.mark.parametrize(
    "tests",
    [
        [],
        {},
        "",
        "{",
        {"inputs": ["1"], "outputs": []},
        {"inputs": [], "outputs": []},
        {"inputs": ["not json"], "outputs": ["1"], "fn_name": "f"},
        {"answer": "5"},
        5,
        None,
        ["assert ("],
        [{"input": "1", "output": "2", "testtype": "functional"}],
        {"private_test_cases": "no base 64"},
        {"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(os.system))).decode()},
        {"test_code": "assert f() == 1"},
    ],
)
def test_tests_that_cannot_be_read_are_a_value_error(tests):
    with pytest.raises(ValueError):
        read_cases(tests)


def test_packed_tests_create_nothing_but_text():
    class Evil:
        def __reduce__(self):
            return os.system, ("echo created",)

    packed_evil = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()

    with pytest.raises(ValueError, match="may hold text only"):
        read_cases({"private_test_cases": packed_evil})


@needs_isolation
def test_verdicts_distinguish_wrong_crashed_timed_out_and_not_run():
    source = """
n = int(input())
if n == 1: print(1)
if n == 2: print(3)
if n == 3: raise ValueError
while n == 4: pass
if n == 5: raise SystemExit(1)
"""
    tests = [{"input": str(n), "output": str(n)} for n in range(1, 6)]

    assert kinds(source, tests) == ["passed", "wrong", "crashed", "timed_out", "crashed"]
    assert kinds(source, tests, max_failures=2) == ["passed", "wrong", "crashed", "not_run", "not_run"]
    assert kinds(source, tests, budget_s=0.0) == ["not_run"] * 5


@needs_isolation
@pytest.mark.parametrize(
    ("source", "tests", "verdicts"),
    [
        (SUM, {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "8"]}, ["passed", "wrong"]),
        (ADD, {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}, ["passed"]),
        (SOLUTION, {"inputs": ["1\n[2, 3]"], "outputs": ["6"], "fn_name": "add"}, ["passed"]),
        (SOLUTION, {"inputs": ["1\n[2, 3]"], "outputs": ["6"], "fn_name": "other"}, ["crashed"]),
        (ADD, {"assert_case": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]}, ["passed", "wrong"]),
        (ADD, ["assert add((1,), (2,)) == (1, 2)", "assert add([1], [2]) == (1, 2)"], ["passed", "wrong"]),
        (ADD, ["assert add('a', 'b') in 'cab'", "assert not add(0, 0)"], ["passed", "passed"]),
        (ADD, ["for i in range(3):\n    assert add(i, 1) == i + 1"], ["passed"]),
        (ADD, ["for i in range(3):\n    assert add(i, 1) == i + 2"], ["wrong"]),
        (
            SOLUTION,
            {
                "test_code": "def check(candidate):\n    assert candidate(1, [2]) == 3",
                "entry_point": "Solution().add",
            },
            ["passed"],
        ),
        ("from __future__ import annotations\nprint(inf)", [{"input": "", "output": "inf"}], ["passed"]),
        ("from __future__ import (\n    annotations,\n)\nprint(5)", PRINTS_5, ["passed"]),
        (
            "\ufeff'A byte order mark and a docstring.'\nfrom __future__ import division\nprint(5)",
            PRINTS_5,
            ["passed"],
        ),
        ("print(5)\nexit()\nprint(6)", PRINTS_5, ["passed"]),
        ("print(5)\nquit(0)", PRINTS_5, ["passed"]),
        (
            "from fractions import *\ndef half(n): return Fraction(n, 2)",
            ["assert half(3) == 1.5"],
            ["passed"],
        ),
        ("from decimal import *\ndef half(n): return Decimal(n) / 2", ["assert half(4) == 2"], ["passed"]),
        (
            "def f(): return 1j * 1j",
            ["assert f() == -1", "assert f() == -1 + 0j", "assert f() == 1j"],
            [*["passed"] * 2, "wrong"],
        ),
        ("def f(): return bytearray(b'x')", ["assert f() == b'x'", "assert f() == 'x'"], ["passed", "wrong"]),
        ("def f(): return {1: 2}.keys()", ["assert f() == {1}", "assert f() == [1]"], ["passed", "wrong"]),
        ("def f(): return {1: 2}.items()", ["assert f() == {(1, 2)}"], ["passed"]),
        ("def f(): return (1, [2.0])", {"inputs": [[]], "outputs": [[[1, [2]]]], "fn_name": "f"}, ["passed"]),
        # Much that is written is not the answer.
        ("import sys\nsys.stderr.write('x' * (4 << 20))\nprint(5)", PRINTS_5, ["passed"]),
        ("def f():\n    print('x' * (4 << 20))\n    return 5", ["assert f() == 5"], ["passed"]),
    ],
)
def test_each_form_of_test_is_judged(source, tests, verdicts):
    assert kinds(source, tests) == verdicts


@needs_isolation
@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("import sys; sys.exit(0)", ["assert add(1, 2) == 3"]),  # ends before the test
        ("import os; os._exit(0)", ["assert add(1, 2) == 3"]),
        ("class Always:\n    __eq__ = lambda *_: True\nadd = lambda *_: Always()", ["assert add(1, 2) == 3"]),
        ("class Any(int):\n    __eq__ = lambda *_: True\nadd = lambda *_: Any()", ["assert add(1, 2) == 3"]),
        ("import os\nos.write(3, b'true')\nos._exit(0)", ["assert add(1, 2) == 3"]),
        ("import os\nos.write(3, b'[' * 100000)\nos._exit(0)", ["assert add(1, 2) == 3"]),
        ("import os\nos.write(3, b'{\"set\": 5}')\nos._exit(0)", ["assert add(1, 2) == 3"]),
        ("import gc\nadd = lambda *_: [o for o in gc.get_objects() if o == 3]", ["assert add(1, 2) == 3"]),
        ("import atexit, os\natexit.register(os._exit, 0)\nraise ValueError", PRINTS_5),
        ("print(5)\nprint('\\n' * (2 << 20))\nprint(6)", PRINTS_5),  # the end is not kept
    ],
)
def test_a_program_cannot_pass_without_the_answer(source, tests):
    assert kinds(source, tests) != ["passed"]


WRITE = """
import os
def write(file, data):
    while data:
        data = data[os.write(file, data):]
"""
FORGED = "[k * ((1 << 61) - 1) for k in range(40_000)]"  # Python's hash of each is 0
WIDE = "('\\U0001F600' + 'x' * ((1 << 24) - 8)).encode()"  # 16 MiB that are 64 MiB as a Python string
JUDGE = """
import json, re, sys, time
from pathlib import Path
from verl.sandbox.verdicts import judge
def peak_mb(): return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
source, tests = json.load(sys.stdin)
before, seconds = peak_mb(), time.process_time()
kinds = [verdict.kind for verdict in judge(source, tests)]
print(json.dumps([kinds, peak_mb() - before, time.process_time() - seconds]))
"""


@needs_isolation
@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("write(3, f'{{\"set\": {FORGED}}}'.encode())", ["assert f() == {5}"]),
        ("write(3, f'{{\"dict\": {[[k, 1] for k in FORGED]}}}'.encode())", ["assert f() == {5: 5}"]),
        ("write(3, f'set({str(FORGED)[1:-1]})'.encode())", ["assert f() == {5}"]),
        ("write(3, b'[' + b'[],' * 5_000_000 + b'[]]')", ["assert f() == [5]"]),
        ("for file in (1, 2, 3): write(file, WIDE)", ["assert f() == 5"] * 3),
        ("write(1, b'10 ' * 5_000_000)", PRINTS_5),
        ("while True: write(1, b'x' * 9999)", PRINTS_5 * 5),
    ],
    ids=["JSON of a set", "JSON of a dictionary", "set", "empty lists", "every stream", "words", "endless"],
)
def test_what_a_program_writes_costs_its_judge_neither_time_nor_memory(source, tests):
    source = f"{WRITE}FORGED = {FORGED}\nWIDE = {WIDE}\n{source}\nos._exit(0)"

    done = subprocess.run(
        [sys.executable, "-c", JUDGE],
        cwd=ROOT,
        input=json.dumps([source, tests]),
        capture_output=True,
        text=True,
    )

    verdicts, mb, seconds = json.loads(done.stdout)
    assert len(verdicts) == len(tests)
    assert "passed" not in verdicts
    assert mb < 30
    assert seconds < 2


@needs_isolation
def test_a_verdict_keeps_the_start_or_the_end_of_what_was_written():
    source = "import sys\nprint('x' * 5000)\nsys.stderr.write('y' * 5000 + 'the end')"

    (verdict,) = judge(source, PRINTS_5)

    assert verdict.outcome.stdout == "x" * 1000
    assert len(verdict.outcome.stderr) == 1000
    assert verdict.outcome.stderr.endswith("ythe end")


@needs_isolation
def test_the_tests_of_a_row_end_with_its_budget():
    begin = time.monotonic()

    verdicts = judge("import time\ntime.sleep(60)", PRINTS_5 * 3, budget_s=0.5)

    assert [verdict.kind for verdict in verdicts] == ["timed_out", "not_run", "not_run"]
    assert time.monotonic() - begin < 8  # a test alone may take 15


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("3\n", "3", True),
        ("1 2  3 \n4\n\n", "1 2 3\n4", True),
        ("0.50", "0.5", True),
        ("1e3", "1000", True),
        ("0.1000000000000000001", "0.1", False),
        ("yes", "YES", False),
        ("1 2", "1\n2", False),
        ("", "", True),
        ("", "1", False),
        ("nan", "nan", True),
        ("1 1", "1", False),
        ("1e999999999", "1", False),
    ],
)
def test_outputs_are_the_same_by_words_and_numbers(output, expected, same):
    assert same_output(output, expected) is same


def test_no_program_is_run_for_tests_that_cannot_be_read():
    with pytest.raises(ValueError, match="tests must have"):
        judge("print(1)", {"answer": 5})


def test_verdict_kinds_are_the_words_users_see():
    assert [str(kind) for kind in VerdictKind] == ["passed", "wrong", "crashed", "timed_out", "not_run"]
