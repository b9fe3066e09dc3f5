# SPDX-License-Identifier: Apache-2.0
"""A process without threads forks for one that has some, and no wait for it is without a limit."""

import asyncio
import os
import signal
import threading
import time
from functools import partial

import pytest

from tests.utils.test_child_process import hang, start_daemon, wait_until_ended, wait_until_gone
from verl.utils.processes import fork_server
from verl.utils.processes.child_process import ChildEndedError
from verl.utils.processes.fork_server import ForkServer
from verl.utils.processes.isolated_calls import IsolatedCalls


class State:
    """A state that takes long to load, or that ends its server."""

    def __init__(self, act=None):
        self.act = act

    def __setstate__(self, values):
        vars(self).update(values)
        if self.act is not None:
            self.act()


@pytest.fixture
def server(request):
    server = ForkServer(**getattr(request, "param", {"guarded": True}))
    yield server
    server.close()


def parent_of(_):
    return os.getppid()


def test_a_process_with_threads_is_not_forked_for_isolated_calls(monkeypatch):
    end = threading.Event()
    threading.Thread(target=end.wait, daemon=True).start()
    monkeypatch.setattr("os.fork", lambda: pytest.fail("a process with threads was forked"))
    calls = IsolatedCalls(parent_of, 60)

    parent = calls(None)

    assert parent not in (os.getpid(), os.getppid())
    calls.close()
    end.set()


def test_a_guarded_child_says_where_it_hangs(server):
    child = server.fork(partial(hang, 1000))
    child.connection.recv()  # it has begun

    assert "in hang" in asyncio.run(child.stacks())
    assert not child.has_ended()
    assert child.kill() == child.kill() == -signal.SIGKILL


@pytest.mark.parametrize(("deed", "exit_code"), [("abort", -signal.SIGABRT), ("return", 0)])
def test_how_a_guarded_child_ended_is_known_and_its_daemons_end_with_it(server, deed, exit_code):
    child = server.fork(start_daemon)
    daemon = child.connection.recv()
    child.connection.send(deed)
    with pytest.raises(EOFError):
        child.connection.recv()
    end = time.monotonic() + 60
    while not child.has_ended():
        assert time.monotonic() < end
        time.sleep(0.01)

    assert child.kill() == exit_code
    assert ("Aborted" in child.crash_report()) == (deed == "abort")
    wait_until_gone(daemon)


def test_nothing_waits_for_a_child_whose_guardian_cannot_end_it(server):
    child, other = server.fork(partial(hang, 1000)), server.fork(partial(hang, 1000))
    child.connection.recv()
    is_ending = threading.Event()

    def hold_up():
        while not is_ending.wait(0.0005):
            os.kill(child.pid, signal.SIGSTOP)

    thread = threading.Thread(target=hold_up)
    thread.start()
    try:
        child.kill()

        assert not other.has_ended()
    finally:
        is_ending.set()
        thread.join()


def test_children_end_with_their_server_say_so_and_the_next_one_has_another(server):
    child = server.fork(partial(hang, 1000))
    child.connection.recv()
    pid = server.start().pid

    os.kill(pid, signal.SIGKILL)
    wait_until_ended(pid)
    with pytest.raises(EOFError):
        child.connection.recv()

    assert child.has_ended()
    assert child.describe_end() == "ended with the process that forks others"
    other = server.fork(partial(hang, 1000))
    assert other.connection.recv() == "begun" and server.start().pid != pid


@pytest.mark.parametrize("server", [{"state": State(partial(os._exit, 3))}], indirect=True)
def test_a_server_that_ends_while_it_loads_its_state_is_an_error_that_says_how(server):
    with pytest.raises(ChildEndedError, match="exited with status 3"):
        server.fork(partial(hang, 1000))


@pytest.mark.parametrize(
    "server", [{"state": State(partial(time.sleep, 1000)), "name": "the process of rows"}], indirect=True
)
def test_a_server_that_does_not_answer_is_ended_and_named(server, monkeypatch):
    monkeypatch.setattr(fork_server, "START_LIMIT_S", 0.5)

    with pytest.raises(RuntimeError, match=r"the process of rows did not answer within 0\.5 s"):
        server.fork(partial(hang, 1000))
