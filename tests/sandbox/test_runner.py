# SPDX-License-Identifier: Apache-2.0
"""The sandbox runs programs and reports how they end."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from tests.sandbox.outside import launchers, wait_for_launchers
from tests.sandbox.outside import works as is_there
from verl.sandbox import runner
from verl.sandbox.outcome import Call, Isolation, Limits, SandboxError, Status
from verl.sandbox.runner import run
from verl.sandbox.values import to_text

works = cache(is_there)
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[Isolation.NAMESPACES, Isolation.LANDLOCK])
def isolation(request):
    if not works(request.param):
        pytest.skip(f"this machine has no {request.param}")
    return request.param


@pytest.mark.parametrize(
    ("source", "status", "exit_code"),
    [
        ("print('all right')", Status.OK, 0),
        ("import sys; sys.exit(3)", Status.WRONG_EXIT, 3),
        ("1 / 0", Status.CRASHED, 121),
        ("this is no program", Status.CRASHED, 121),
        ("import os; os.abort()", Status.CRASHED, None),
        ("x = [bytearray(1 << 20) for _ in range(1 << 20)]", Status.OUT_OF_MEMORY, 122),
        ("while True: pass", Status.TIMED_OUT, None),
        ("import time; time.sleep(100)", Status.TIMED_OUT, None),
        ("while True: print('x' * 1000)", Status.OUTPUT_LIMIT, None),
    ],
)
def test_the_status_says_how_the_program_ended(source, status, exit_code, isolation):
    wall_s = 1.5 if "sleep" in source else 60.0
    limits = Limits(cpu_s=1, wall_s=wall_s, memory_mb=256, output_bytes=1 << 20)

    outcome = run(source, limits=limits, isolation=isolation)

    assert (outcome.status, outcome.exit_code) == (status, exit_code)


def test_a_program_reads_its_input_and_its_output_is_returned(isolation):
    source = "import sys\nfor line in sys.stdin: print(int(line) * 2)\nsys.stderr.write('done')"

    outcome = run(source, stdin="1\n20\n", isolation=isolation)

    assert (outcome.status, outcome.stdout, outcome.stderr) == (Status.OK, "2\n40\n", "done")


@pytest.mark.parametrize("read", ["open(0).read()", "open('/dev/stdin').read()", "sys.stdin.read()"])
def test_every_way_to_read_a_large_input_works(read, isolation):
    text = "äöü 1 2 3\n" * 300_000

    outcome = run(f"import sys\nprint(len({read}))", stdin=text, isolation=isolation)

    assert outcome.stdout == f"{len(text)}\n"


def test_what_solutions_do_with_threads_and_recursion_works(isolation):
    source = """
import sys, threading
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
def main(): print(depth(50_000))
sys.setrecursionlimit(1 << 20)
threading.stack_size(512 << 20)
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""
    assert run(source, isolation=isolation).stdout == "50000\n"


def test_the_standard_library_and_installed_packages_can_be_imported(isolation):
    source = """
import asyncio, bisect, collections, decimal, fractions, heapq, json, random, re, ssl, statistics
import numpy
async def work(): return await asyncio.to_thread(lambda: numpy.arange(5).sum())
print(asyncio.run(work()), random.random() < 1, open('/dev/null', 'w').write('x'))
"""
    outcome = run(source, isolation=isolation)

    assert outcome.stdout == "10 True 1\n", outcome.stderr


def test_the_working_folder_is_empty_writable_and_new_for_every_run():
    if not works(Isolation.NAMESPACES):
        pytest.skip("this machine has no namespaces")
    source = "import os\nprint(os.listdir('.'))\nopen('x', 'w').write('mine')\nprint(open('x').read())"

    outputs = [run(source, isolation=Isolation.NAMESPACES).stdout for _ in range(2)]

    assert outputs == ["[]\nmine\n"] * 2


def test_a_program_may_start_as_many_processes_as_allowed():
    if not works(Isolation.NAMESPACES):
        pytest.skip("this machine has no namespaces")
    source = "import os\nif os.fork() == 0: os.write(1, b'child\\n'), os._exit(0)\nos.wait()\nprint('parent')"

    outcome = run(source, limits=Limits(processes=4), isolation=Isolation.NAMESPACES)

    assert outcome.stdout == "child\nparent\n"


def test_a_call_returns_its_value_with_its_types(isolation):
    source = "def f(n, text): return ({n: (text, 1.5)}, {1, 2}, None, [True], b'x')"
    value = ({7: ("a", 1.5)}, {1, 2}, None, [True], b"x")

    assert run(source, call=Call("f(7, 'a')"), isolation=isolation).value == to_text(value)
    json_value = run(source, call=Call("f", '[7, "a"]'), isolation=isolation).value
    assert json_value == to_text(value, as_json=True)


def test_a_call_finds_a_method_of_solution(isolation):
    source = "class Solution:\n    def double(self, x): return 2 * x"

    assert run(source, call=Call("double", "[4]"), isolation=isolation).value == "8"


def test_a_traceback_shows_the_program_only(isolation):
    outcome = run("def f():\n    raise ValueError('deep')\nf()", isolation=isolation)

    assert 'File "solution.py", line 2, in f' in outcome.stderr
    assert "program.py" not in outcome.stderr
    assert outcome.stderr.endswith("ValueError: deep\n")


def test_time_and_memory_are_measured(isolation):
    busy = "while time.process_time() < 0.4: pass\nprint(time.process_time())"
    source = f"import time\nx = bytearray(64 << 20)\n{busy}"

    outcome = run(source, isolation=isolation)

    assert 0.4 <= float(outcome.stdout) <= outcome.cpu_s + 0.01
    assert outcome.wall_s >= 0.3
    assert 64 < outcome.peak_mb < 150


def test_a_program_is_late_by_the_cpu_seconds_that_it_used(isolation):
    deaf = "import signal, time\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    late = deaf + "while time.process_time() < 0.3: pass\nprint('late')"

    assert run(late, limits=Limits(cpu_s=0.2), isolation=isolation).status is Status.TIMED_OUT
    assert run(late, limits=Limits(cpu_s=0.9), isolation=isolation).status is Status.OK
    outcome = run("import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)", isolation=isolation)
    assert outcome.status is Status.CRASHED  # after a few milliseconds: no limit was reached


def test_a_program_has_as_many_threads_as_its_limit_says(isolation):
    source = """
import os, threading, time
for count in range(1, 99):
    try:
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
    except RuntimeError:
        os.write(1, b"%d" % count)
        os._exit(0)
"""
    with ThreadPoolExecutor(2) as pool:
        outputs = pool.map(
            lambda n: run(source, limits=Limits(threads=n), isolation=isolation).stdout, (1, 6)
        )
        assert list(outputs) == ["1", "6"]


def test_no_more_output_is_kept_than_asked_for(isolation):
    source = "import sys\nprint('x' * 100)\nsys.stderr.write('y' * 200_000 + 'the end')"

    outcome = run(source, kept_bytes=10, isolation=isolation)

    assert (outcome.status, outcome.stdout, outcome.is_stdout_cut) == (Status.OK, "x" * 10, True)
    assert len(outcome.stderr) == 1 << 16
    assert outcome.stderr.endswith("ythe end")
    assert not run(source, kept_bytes=101, isolation=isolation).is_stdout_cut


def test_preludes_run_before_the_program_and_move_none_of_its_lines(isolation):
    source = "\ufefffrom __future__ import (\n    annotations,\n)\nprint(a, b)\n1 / 0"

    outcome = run(
        source, preludes=["a = 1", "from __future__ import annotations\nb = a + 1"], isolation=isolation
    )

    assert outcome.stdout == "1 2\n"
    assert 'File "solution.py", line 5' in outcome.stderr


def test_runs_in_many_threads_do_not_disturb_each_other(isolation):
    with ThreadPoolExecutor(4) as pool:
        outcomes = pool.map(
            lambda n: run("print(int(input()) ** 2)", stdin=str(n), isolation=isolation), range(16)
        )
        assert [outcome.stdout for outcome in outcomes] == [f"{n * n}\n" for n in range(16)]


LEAVES_NOTHING = """
import os, sys, threading
from tests.sandbox.outside import wait_for_launchers
from verl.sandbox.outcome import Isolation, Limits
from verl.sandbox.runner import run

def count():
    return len(os.listdir("/proc/self/fd")), threading.active_count()

isolation = Isolation(sys.argv[1])
run("print(1)", isolation=isolation)
before = count()
for source in ("print(1)", "1 / 0", "while True: print('x' * 9999)"):
    run(source, limits=Limits(output_bytes=1 << 16), isolation=isolation)
assert count() == before, (count(), before)
assert not wait_for_launchers()
"""


def test_nothing_is_left_open_or_running(isolation):
    command = [sys.executable, "-c", LEAVES_NOTHING, isolation]  # no thread of another test ends or begins

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_the_program_dies_with_the_process_that_runs_it(isolation):
    code = (
        "from verl.sandbox.runner import run; from verl.sandbox.outcome import Isolation;"
        f"run('import time; time.sleep(10)', isolation=Isolation({str(isolation)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        while not launchers(process.pid):
            time.sleep(0.02)
        process.kill()

    assert not wait_for_launchers()


def test_a_launcher_that_dies_is_a_failure_and_no_outcome():
    if not works(Isolation.LANDLOCK):
        pytest.skip("this machine has no Landlock")
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run, "import time; time.sleep(9)", isolation=Isolation.LANDLOCK)
        while len(found := launchers(os.getpid())) != 1 or not launchers(int(found[0].split()[0])):
            time.sleep(0.02)
        time.sleep(0.2)  # the program has started
        os.kill(int(found[0].split()[0]), signal.SIGKILL)

        with pytest.raises(SandboxError, match="its launcher died before it reported"):
            done.result()


def test_where_processes_cannot_be_watched_nothing_is_judged():
    # A filter like those of old container engines: every system call but pidfd_open (434) is allowed.
    code = """
import ctypes
from verl.sandbox import filter, kernel
from verl.sandbox.verdicts import judge
rules = [(filter.LOAD, 0, 0, 0), (filter.JUMP_EQUAL, 0, 1, 434)]
rules += [(filter.RETURN, 0, 0, filter.FAIL | 1), (filter.RETURN, 0, 0, filter.ALLOW)]
lines = b"".join(filter.INSTRUCTION.pack(*rule) for rule in rules)
buffer = ctypes.create_string_buffer(lines, len(lines))
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
kernel.syscall("seccomp", 1, 0, filter.struct.pack("HP", 4, ctypes.addressof(buffer)))
print(judge("print(1)", [{"input": "", "output": "1"}]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

    assert done.stdout == ""
    assert "SandboxRefusedError: no isolation works on this machine" in done.stderr
    assert "pidfd_open: Operation not permitted" in done.stderr


@pytest.mark.parametrize("unsafe", [False, True])
def test_without_isolation_nothing_runs_unless_the_user_says_so(unsafe):
    # personality(PER_LINUX32): the machine calls itself one that the filter has no numbers for.
    code = (
        "import ctypes; ctypes.CDLL(None).personality(8);"
        "from verl.sandbox.runner import run; outcome = run('print(6 * 7)');"
        "print(outcome.status, outcome.stdout, outcome.detail)"
    )
    environment = {**os.environ, "VERL_SANDBOX_UNSAFE": "1"} if unsafe else None

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )

    if unsafe:
        assert done.stdout.startswith("ok 42"), done
    else:
        assert done.stdout.startswith("refused"), done
        assert "needs Linux on x86_64 or aarch64" in done.stdout
        assert "VERL_SANDBOX_UNSAFE=1" in done.stdout


def test_several_processes_are_refused_where_nothing_counts_them():
    outcome = run("print(1)", limits=Limits(processes=2), isolation=Isolation.LANDLOCK)

    assert outcome.status is Status.REFUSED
    assert "`Limits.processes` (2) must be 1" in outcome.detail


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match=r"`Limits\.cpu_s` must be positive, got 0"):
        Limits(cpu_s=0)


def test_what_works_here_is_found_out_once():
    assert runner.detect() is runner.detect()
