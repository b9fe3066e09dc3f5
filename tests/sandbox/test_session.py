# SPDX-License-Identifier: Apache-2.0
"""Sessions: cells share their variables, are interrupted, and cannot leave the sandbox."""

import gc
import io
import os
import time
from dataclasses import replace

import pytest
from PIL import Image

from tests.helpers.nightly import by_day
from verl.sandbox import session as sessions
from verl.sandbox.outcome import Isolation, Limits
from verl.sandbox.runner import detect
from verl.sandbox.session import Session, SessionEndedError

LIMITS = Limits(cpu_s=60, memory_mb=1024, wall_s=10)
WORKING, _ = detect()
pytestmark = pytest.mark.skipif(WORKING is Isolation.NONE, reason="no isolation works on this machine")


@pytest.fixture(params=[Isolation.NAMESPACES, Isolation.LANDLOCK])
def session(request):
    if request.param is Isolation.NAMESPACES and WORKING is not Isolation.NAMESPACES:
        pytest.skip("namespaces do not work on this machine")
    with Session(LIMITS, isolation=request.param) as session:
        yield session


def test_cells_share_variables_and_show_the_value_of_their_last_line(session):
    texts = [session.run(code).text for code in ("x = 6", "print('a'); x * 7", "None", "y = x; y", "")]

    assert texts == ["", "a\n42\n", "", "6\n", ""]


@pytest.mark.parametrize(
    ("code", "last_line"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero\n"),
        ("def f(:", "SyntaxError: invalid syntax\n"),
        ("bytearray(1 << 34)", "MemoryError\n"),
        ("exit(3)", "SystemExit: 3"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded\n"),
        ("open('/etc/shadow').read()", "'/etc/shadow'\n"),
        ("import socket; socket.socket()", "Operation not permitted\n"),
        ("import subprocess; subprocess.run(['ls'])", "'ls'\n"),
    ],
)
def test_an_error_is_text_and_keeps_the_variables(session, code, last_line):
    session.run("x = 1")

    cell = session.run(code)

    assert cell.text.endswith(last_line) or "Operation not permitted" in cell.text
    assert "solution.py" not in cell.text
    assert session.run("x").text == "1\n"


def test_code_that_runs_too_long_is_interrupted_and_keeps_the_variables(session):
    session.run("None")  # the interpreter is up: its start counts as time of the first cell
    begin = time.monotonic()

    session.limits = replace(LIMITS, wall_s=0.5)
    cell = session.run("x = 0\nwhile True:\n    x += 1")
    session.limits = LIMITS

    assert time.monotonic() - begin < 30  # it would run for ever
    assert cell.text.endswith("TimeoutError: the code ran for over 0.5 s\n")
    assert int(session.run("x").text) > 0


ENDINGS = {
    "import os; os._exit(1)": "it ended its own process",
    "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass": "it took too long",
    "import ctypes; ctypes.string_at(0)": "signal 11 ended it",
    "import os; os.write(3, b'\\xff\\xff\\xff\\xff')": "it wrote too much",
    "import os; os.write(3, b'\\x00\\x00\\x00\\x02{}')": "ended it",
    "import os; os.write(3, b'\\x00\\x01\\x00\\x00' + b'[' * 65536)": "ended it",
    "import os\nwhile True: os.write(1, b'a' * 65536)": "it wrote too much",
}


@pytest.mark.parametrize("code", by_day(ENDINGS, *list(ENDINGS)[:2]))
def test_code_that_ends_its_program_ends_the_session(monkeypatch, code):
    monkeypatch.setattr(sessions, "GRACE_S", 0.5)
    gc.collect()  # else files of tests before this one may be closed while it runs
    before = len(os.listdir("/proc/self/fd"))
    limits = replace(LIMITS, wall_s=1.0 if "SIG_IGN" in code else 30.0)
    with Session(limits) as session, pytest.raises(SessionEndedError) as error:
        session.run(code)

    assert ENDINGS[code] in str(error.value) or "stopped answering" in str(error.value)
    with pytest.raises(SessionEndedError, match="it has ended already"):
        session.run("1")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_processor_time_is_limited_over_all_cells():
    limits = replace(LIMITS, cpu_s=2, wall_s=0.5)
    with Session(limits) as session, pytest.raises(SessionEndedError, match="too long"):
        for _ in range(200):  # a busy machine gives a cell little of its time
            session.run("while True: pass")


def test_a_long_text_keeps_its_start_and_end(session):
    text = session.run("print('a' * 100_000 + 'z' * 100_000, end='')").text

    half = sessions.MAX_CHARACTERS // 2
    assert text == "a" * half + f"\n[... {200_000 - 2 * half} characters ...]\n" + "z" * half


def test_figures_and_pictures_are_png(session):
    if session._run.job["namespaces"]:
        pytest.importorskip("matplotlib")
        cell = session.run("import matplotlib.pyplot as plt\nfor _ in range(3): plt.figure()\nplt.show()")
        assert [Image.open(io.BytesIO(image)).format for image in cell.images] == ["PNG"] * 3
        assert cell.text == ""
        assert session.run("plt.figure(); plt.figure()", max_images=1).images[1:] == []
    cell = session.run("from PIL import Image\nImage.new('RGB', (3, 2), 'red')")

    (image,) = cell.images
    assert Image.open(io.BytesIO(image)).getpixel((0, 0)) == (255, 0, 0)
    assert session.run("1").images == []
