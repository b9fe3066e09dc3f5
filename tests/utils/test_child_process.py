# SPDX-License-Identifier: Apache-2.0
"""A call in a process of its own fails alone."""

import asyncio
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.endings import ACTIONS, ENDINGS, do
from tests.helpers.nightly import by_day
from verl.utils.processes.child_process import STACK_SIGNAL, ChildEndedError, ChildProcess
from verl.utils.processes.isolated_calls import IsolatedCalls

PARENT = """
import os, sys, time
from verl.utils.processes.isolated_calls import IsolatedCalls
calls = IsolatedCalls(lambda seconds: time.sleep(seconds) or os.getpid(), None)
print(calls(0), flush=True)
calls(1000)
"""


forked = partial(IsolatedCalls, start=ChildProcess.fork)  # also what cannot be pickled


def act(deed):
    """Do a deed, or return the id of this process."""
    if deed in ACTIONS:
        do(deed)
    return os.getpid()


def hang(seconds, connection):
    connection.send("begun")
    time.sleep(seconds)


def is_there(pid):
    """Whether a process exists; one that ended and was not waited for does."""
    return Path(f"/proc/{pid}").exists()


def wait_until_ended(pid):
    """Wait until a process runs no more; its parent may still have to reap it."""
    end, stat = time.monotonic() + 60, Path(f"/proc/{pid}/stat")
    while is_there(pid) and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end, "the process lives on"
        time.sleep(0.01)


def wait_until_gone(pid):
    end = time.monotonic() + 60
    while is_there(pid):
        assert time.monotonic() < end, "the process lives on"
        time.sleep(0.01)


def test_a_process_that_is_forked_while_another_one_starts_does_not_hold_it_up(monkeypatch):
    opened, forked, started, open_pipe = threading.Event(), threading.Event(), [], os.pipe

    def pipe():  # of `Popen`, which reads from it until the program runs
        ends = open_pipe()
        opened.set()
        forked.wait(0.5)
        return ends

    monkeypatch.setattr(os, "pipe", pipe)
    starting = threading.Thread(
        target=lambda: started.append(ChildProcess.start(partial(hang, 1000))), daemon=True
    )
    starting.start()
    assert opened.wait(60)
    other = ChildProcess.fork(partial(hang, 1000))
    forked.set()
    starting.join(60)
    has_started = bool(started)

    other.kill()
    starting.join(60)
    started[0].kill()
    assert has_started


def test_calls_run_one_after_the_other_in_one_process_that_is_not_this_one():
    calls = forked(lambda values: (values.sum(), os.getpid()), 10)

    results = [calls(np.arange(n)) for n in (3, 4, 5)]

    assert [total for total, _ in results] == [3, 6, 10]
    assert len({pid for _, pid in results}) == 1 and results[0][1] != os.getpid()


@pytest.mark.parametrize("deed", ENDINGS)
def test_a_call_that_ends_its_process_fails_alone_and_says_how(deed):
    calls = IsolatedCalls(act, 10)
    first = calls("nothing")

    with pytest.raises(ChildProcessError, match=f"was killed by {ENDINGS[deed]}"):
        calls(deed)

    assert calls("nothing") not in (first, os.getpid()) and not is_there(first)


@pytest.mark.parametrize("leave", [sys.exit, os._exit])
def test_a_call_that_exits_says_with_which_status(leave):
    with pytest.raises(ChildProcessError, match="exited with status 1"):
        IsolatedCalls(leave, 10)(1)


def deaf(seconds):
    """Sleep through every signal that can be ignored."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    time.sleep(seconds)


def test_a_call_that_takes_too_long_is_ended_and_the_next_one_works():
    calls = IsolatedCalls(deaf, 1.5)
    calls(0)
    start = time.monotonic()

    with pytest.raises(TimeoutError, match=r"did not end within 1\.5 s"):
        calls(1000)

    assert 1.5 <= time.monotonic() - start < 60 and calls(0) is None


def test_errors_are_raised_here_and_leave_the_process_alive():
    def fail(kind):
        if kind == "value":
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte")
        if kind == "memory":
            np.empty(1 << 56, dtype=np.uint8)
        if kind == "key":
            return {}[kind]
        if kind == "result":
            return lambda: None  # cannot be pickled
        return os.getpid()

    calls = forked(fail, 10)
    pid = calls("nothing")

    for kind, error, message in (
        ("value", ValueError, "bad byte"),
        ("memory", ValueError, "memory ran out: Unable to allocate"),
        ("key", RuntimeError, r"in fail\n(.|\n)*KeyError: 'key'"),
        ("result", RuntimeError, "pickle"),
    ):
        with pytest.raises(error, match=message):
            calls(kind)
    assert calls("nothing") == pid


def test_the_answer_to_an_interrupted_call_is_not_taken_for_the_next_ones():
    def interrupt(*_):
        raise KeyboardInterrupt

    def slow(number):
        if number > 0:
            os.kill(os.getppid(), signal.SIGALRM)  # amid the call, however busy the machine is
            time.sleep(0.3)
        return number

    calls = forked(slow, 60)
    assert calls(0) == 0  # the process is there: what a signal raises in the middle of a fork is ignored
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            calls(1)
    finally:
        signal.signal(signal.SIGALRM, before)
    time.sleep(0.5)

    assert calls(0) == 0


def test_a_process_that_is_killed_between_calls_is_replaced_and_no_call_fails():
    calls = IsolatedCalls(act, 10)
    first = calls("nothing")

    os.kill(first, signal.SIGKILL)
    wait_until_ended(first)

    assert calls("nothing") != first and not is_there(first)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_a_run_is_no_fault_of_a_call(number):
    def hear(_):
        os.kill(os.getpid(), number)  # as Ctrl-C and a scheduler send it to all processes
        return "heard"

    assert forked(hear, 10)("") == "heard"


def test_the_process_ends_with_its_parent_even_during_a_call():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    helper = int(parent.stdout.readline())
    time.sleep(0.1)
    assert is_there(helper)

    parent.kill()
    parent.wait()

    wait_until_gone(helper)


def test_the_process_ends_when_it_is_closed_or_garbage_collected():
    calls = IsolatedCalls(act, 10)
    first = calls("nothing")
    calls.close()
    second = calls("nothing")
    assert not is_there(first) and is_there(second)

    del calls
    gc.collect()

    assert not is_there(second)


def test_a_forked_process_has_a_helper_of_its_own_and_leaves_its_parents_alone():
    calls = forked(lambda number: (number, os.getpid()), 10)
    ours = calls(0)[1]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def other():
        results = [calls(number) for number in range(1000, 1200)]
        calls.close()
        queue.put((os.getpid(), results))

    process = context.Process(target=other)
    process.start()
    results = [calls(number) for number in range(200)]
    pid, theirs = queue.get()
    process.join()

    assert results == [(number, ours) for number in range(200)]
    assert [number for number, _ in theirs] == list(range(1000, 1200))
    assert {helper for _, helper in theirs}.isdisjoint({ours, pid, os.getpid()})
    assert calls(7) == (7, ours)


def test_a_new_process_is_entered_before_its_first_call():
    state = []
    calls = forked(lambda _: list(state), 10, enter=lambda: state.append(os.getpid()))

    assert len(calls(0)) == len(calls(0)) == 1 and not state


@pytest.mark.nightly
def test_many_failed_calls_leave_no_files_open_and_no_processes():
    calls = forked(act, 10)

    def count():
        return len(os.listdir("/proc/self/fd"))

    def children():
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    others = children()
    calls("nothing")
    before = count()
    for _ in range(20):
        with contextlib.suppress(ChildProcessError):
            calls("abort")
    calls("nothing")

    assert count() == before
    assert len(children() - others) == 1, "the helper that answered last"


def test_a_call_is_cheap():
    calls = forked(lambda value: value, 10)

    def seconds():
        start = time.perf_counter()
        calls(0)
        return time.perf_counter() - start

    # One of many, since others may have the processors: the fewer calls are undisturbed, the more are made.
    end = time.monotonic() + 30
    while seconds() >= 1e-3:
        assert time.monotonic() < end, "no call took less than a millisecond"


def test_a_fresh_interpreter_answers_and_is_replaced_after_a_call_that_ends_it():
    calls = IsolatedCalls(act, 60, start=ChildProcess.start)
    first = calls("nothing")

    with pytest.raises(ChildEndedError, match="was killed by SIGABRT") as caught:
        calls("abort")

    assert caught.value.exit_code == -signal.SIGABRT
    assert calls("nothing") not in (first, os.getpid()) and not is_there(first)


def test_a_fresh_interpreter_says_where_it_hangs():
    child = ChildProcess.start(partial(hang, 1000))
    try:
        child.connection.recv()  # it has begun

        assert "in hang" in asyncio.run(child.stacks())
    finally:
        assert child.kill() == child.kill() == -signal.SIGKILL


def tell_slowly(connection):
    """Write stacks as a process does that others interrupt."""
    report = int(sys.argv[2])
    faulthandler.unregister(STACK_SIGNAL)

    def tell(*_):
        for part in ("Thread 0x1 (most recent call first):\n", '  File "a.py", line 4 in judge\n', BOTTOM):
            time.sleep(0.15)
            os.write(report, part.encode())

    signal.signal(STACK_SIGNAL, tell)
    connection.send("begun")
    while True:  # a handler waits for the end of a sleep that begins between the signal and its call
        time.sleep(0.05)


BOTTOM = '  File "<string>", line 1 in <module>\n'


def test_stacks_are_whole_however_slowly_they_are_written():
    child = ChildProcess.start(tell_slowly)
    try:
        child.connection.recv()

        assert asyncio.run(child.stacks()).endswith(f"in judge\n{BOTTOM}")
    finally:
        child.kill()


def start_daemon(connection):
    """Fork twice and leave the session, as daemons do; send the daemon's pid, and obey."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            connection.send(os.getpid())
            time.sleep(1000)
        os._exit(0)
    match connection.recv():
        case "hang":
            time.sleep(1000)
        case "abort":
            os.abort()


@pytest.mark.parametrize("deed", by_day(["hang", "abort", "return"], "hang", "abort"))
def test_a_daemon_ends_with_the_fresh_interpreter_that_started_it(deed):
    child = ChildProcess.start(start_daemon)
    daemon = child.connection.recv()
    child.connection.send(deed)
    if deed != "hang":
        wait_until_gone(daemon)  # nobody has asked for its end
        with pytest.raises(EOFError):  # the daemon does not hold the connection open
            child.connection.recv()

    exit_code = child.kill()

    assert exit_code == {"hang": -signal.SIGKILL, "abort": -signal.SIGABRT, "return": 0}[deed]
    assert not is_there(daemon)


@pytest.mark.nightly
def test_a_daemon_ends_though_its_guardian_has_no_time_to_end_it():
    child = ChildProcess.start(start_daemon)
    daemon = child.connection.recv()
    is_ending = threading.Event()

    def hold_up():
        while not is_ending.wait(0.0005):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGSTOP)

    thread = threading.Thread(target=hold_up)
    thread.start()
    try:
        child.kill()
    finally:
        is_ending.set()
        thread.join()

    wait_until_gone(daemon)


@pytest.mark.nightly
def test_a_daemon_ends_though_its_guardian_was_killed():
    child, other = ChildProcess.start(start_daemon), ChildProcess.start(start_daemon)
    daemon, of_other = child.connection.recv(), other.connection.recv()
    os.kill(child.pid, signal.SIGKILL)
    wait_until_ended(child.pid)
    assert is_there(daemon)

    assert child.kill() == -signal.SIGKILL

    wait_until_gone(daemon)
    assert is_there(of_other)
    other.kill()


@pytest.mark.nightly
def test_a_daemon_of_a_fresh_interpreter_ends_when_the_controller_is_killed():
    code = """
import time
from tests.utils.test_child_process import start_daemon
from verl.utils.processes.child_process import ChildProcess
child = ChildProcess.start(start_daemon)
print(child.connection.recv(), child.pid, flush=True)
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert all(is_there(pid) for pid in pids)

    parent.kill()
    parent.wait()

    for pid in pids:
        wait_until_gone(pid)
