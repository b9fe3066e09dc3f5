# SPDX-License-Identifier: Apache-2.0
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl.rewards.graders.answer_text import read
from verl.rewards.graders.math import TimeLimitReached, _comparer, last_boxed, same_answer
from verl.rewards.graders.math import _time_limit as time_limit

WRAPS = ("text", "textbf", "textit", "mathrm", "mathbf")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} or rather \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{a\boxed{3}", "3"),
        (r"\boxed{x = \boxed{3}} { and", "3"),
        (r"\boxed {5}", "5"),
        ("\\boxed\n{5}", "5"),
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),  # `\{` is no brace
        (r"so \boxed{\frac{1}{2}", r"\frac{1}{2}"),  # the response was cut
        (r"\boxed{5} } \boxed{6", "5"),
        (r"\boxed{}", ""),
        ("no box {5}", None),
        ("", None),
    ],
)
def test_the_last_closed_box_is_the_answer_or_else_the_last_one_that_was_cut(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "ground_truth"),
    [
        ("5", "5"),
        ("0.5", r"\frac{1}{2}"),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac12", "1/2"),
        ("1,234", "1234"),
        ("7.0", "7"),
        ("$5$.", "5"),
        (r"2\sqrt2", r"\sqrt{8}"),
        ("1+x^2", "x^2+1"),
        ("(1, 2)", "(1,2)"),
        (r"\{2,1\}", r"\{1,2\}"),
        ("10^3", "1000"),
        (r"12\text{ apples}", "12"),
        ("x=5", "5"),
        (r"\text{(B)}", "B"),
        ("A", "A"),
        ("yes", "Yes"),
        ("left  of it", "left of it"),
        *((f"\\{wrap}{{{word}}}", word) for wrap in WRAPS for word in ("Evelyn", "east")),
        *((word, f"\\{wrap}{{{word}}}") for wrap in WRAPS for word in ("evelyn", "East")),
        (r"\text{an ellipse}", "ellipse"),
        ("xy", "yx"),
        ("mg/2", r"\frac{mg}{2}"),
        ("b", "B"),
        ("C) 14 cm", "C"),
        ("½", "0.5"),
        ("1½", "3/2"),
        ("√2", r"\sqrt{2}"),
        ("√(x+1)", r"\sqrt{x+1}"),
        ("2³", "8"),
        ("10⁻³", "0.001"),
        ("-∞", r"-\infty"),
        ("90°", r"90^\circ"),
        ("90°", "90"),
        ("\uff12\uff15", "25"),  # digits of full width
        ("1e5", "100000"),
        ("6.02e23", r"6.02 \times 10^{23}"),
        ("9.10e-31", r"9.1 \times 10^{-31}"),
        (r"0.\overline{36}", r"\frac{4}{11}"),
        (r"12\,600", "12600"),
        ("$5", "5"),
        (r"\sin 30^\circ", r"\frac{1}{2}"),
        (r"\frac{a}{b}\cdot c", r"\frac{ac}{b}"),
        ("2 < x < 5", "(2,5)"),
        (r"5\,\mathrm{cm}", r"5\text{ centimeters}"),
        ("60 miles per hour", "60 mph"),
        ("10:30 a.m.", r"10:30 \text{ AM}"),
        (r"5 \text{ or } 6", "5, 6"),
        ("52_8", "52_{8}"),
    ],
)
def test_equal_answers_are_the_same(answer, ground_truth):
    assert same_answer(answer, ground_truth)


@pytest.mark.parametrize(
    ("answer", "ground_truth"),
    [
        ("4", "5"),
        ("5}{7", "5"),
        ("-3", "3"),
        ("0.333", "1/3"),
        (r"\pi", "3.14"),
        ("B", "A"),
        ("no", "on"),
        ("der", "red"),
        ("blue", "red"),
        ("", "5"),
        ("5", ""),
        ("(1,2]", "(1,2)"),
        ("5 or 6", "5"),
        (r"7 \text{ (or } 5)", "5"),
        ("7 apples and 5 pears", "5"),
        (r"9.1 \times 10^{-31}", r"1.6 \times 10^{-19}"),
        ("0.0000004", "0.0000003"),
        ("(0.0000004, 1)", "(0.0000003, 1)"),
        ("0.00001", "0"),
        ("1101_3", "1101_2"),
        (r"5\text{ m}", r"5\text{ cm}"),
        (r"10:30 \text{ p.m.}", r"10:30 \text{ a.m.}"),
        (r"\$5", r"5\text{ cents}"),
        ("2abc", "2"),
        ("2 rs", "2"),
        ("A. Lincoln", "A. Jackson"),
        (r"\infty <\sum_{k=1}^{3}1.5/0.0", "5"),  # SymPy raises an error
        ("2**3", "23"),
        ("silent", "listen"),
        ("A. one B. two", "A"),
        ("The answer is not 5", "5"),
        (r"\frac{\frac{\frac{", "5"),
        ("(" * 100, "5"),
        ("5" * 5000, "5"),
        ("\x00\ufffd🎲", "5"),
    ],
)
def test_other_answers_are_not_the_same(answer, ground_truth):
    assert not same_answer(answer, ground_truth)


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "999999999!", r"\binom{1000000000}{500000000}"])
def test_an_answer_that_explodes_is_wrong_after_the_time_limit(answer):
    start = time.process_time()

    assert not same_answer(answer, "5", time_limit_s=0.5)

    assert time.process_time() - start < 5.0


@pytest.mark.parametrize("text", ["a" * 300, '"a"' * 100, "½" * 300, r"\text{" * 50, "2 3 " * 75, "^{" * 150])
def test_reading_an_answer_takes_no_time(text):
    start = time.process_time()

    read(text)

    assert time.process_time() - start < 0.5  # 10 ms on a quiet machine


def comparing_process():
    same_answer("0.5", "1/2")  # starts it
    guardian = _comparer(os.getpid()).args[0]._child.pid
    (pid,) = Path(f"/proc/{guardian}/task/{guardian}/children").read_text().split()
    return int(pid)


def test_an_answer_that_fills_the_memory_is_wrong():
    assert not same_answer(r"(1+\sqrt{2})^{1000000}", "5", time_limit_s=1.0)
    assert same_answer("0.5", "1/2")


def test_answers_are_compared_in_any_thread():
    with ThreadPoolExecutor(4) as pool:
        same = list(pool.map(lambda n: same_answer(f"{n}/2", str(n / 2)), range(20)))

    assert same == [True] * 20


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGXCPU, signal.SIGSEGV])
def test_a_comparison_that_takes_its_process_with_it_is_wrong_and_the_next_one_is_not(number):
    pid = comparing_process()
    killer = threading.Timer(0.2, os.kill, [pid, number])
    killer.start()

    assert not same_answer("9^{9^{9^{9}}}", "5", time_limit_s=30.0)
    assert same_answer("0.5", "1/2")
    assert comparing_process() != pid


def test_the_kernel_ends_a_comparison_that_hears_no_alarm():
    pid = comparing_process()
    same_answer("1", "2", time_limit_s=1.0)
    limits = Path(f"/proc/{pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max cpu time")]

    # Started, it has computed for a second or two; then 1 s of its own and 2 s of grace.
    assert 3 <= int(line.split()[3]) <= 12


def test_the_limit_reaches_code_that_catches_every_exception():
    with pytest.raises(TimeLimitReached), time_limit(0.05):
        while True:
            try:
                sum(range(1000))
            except Exception:
                continue


def test_the_limit_rings_again_when_the_first_time_was_swallowed():
    rings = 0
    with pytest.raises(TimeLimitReached), time_limit(0.05):
        while True:
            try:
                sum(range(1000))
            except BaseException:
                rings += 1
                if rings == 2:
                    raise


def test_within_the_limit_nothing_happens():
    with time_limit(0.05):
        pass

    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
