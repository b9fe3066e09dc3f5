# SPDX-License-Identifier: Apache-2.0
"""Requests to child processes from one thread: every one has its answer or the end of its process."""

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress

import pytest

from verl.utils.processes import serving
from verl.utils.processes.child_process import ChildProcess
from verl.utils.processes.serving import (
    PoolBrokenError,
    ProcessEndedError,
    ServingProcess,
    ServingThread,
    run_together,
)


def serve(connection):
    """Answer with the request, the later ones first, and obey."""
    connection.send((0, "ready"))
    waiting = []
    with suppress(EOFError):
        while True:
            number, request = connection.recv()
            match request:
                case "wait":
                    waiting.append((number, request))
                case "hang":
                    time.sleep(1000)
                case "leave":
                    os._exit(3)
                case "write":
                    connection.send("something")
                case "fill":
                    connection.send((number, bytes(serving.MAX_ANSWER + 1)))
                case "twice":
                    connection.send((number, request))
                    connection.send((number, request))
                case _:
                    for message in [(number, request), *reversed(waiting)]:
                        connection.send(message)


def with_process(use):
    """Run a coroutine with a process that serves."""

    async def run():
        process = ServingProcess(ChildProcess.start(serve))
        try:
            assert await process.ready() == "ready"
            return await asyncio.wait_for(use(process), 60)
        finally:
            process.close()

    return asyncio.run(run())


def test_answers_reach_their_requests_in_any_order():
    async def use(process):
        waiting = [asyncio.create_task(process.ask("wait")) for _ in range(3)]
        await asyncio.sleep(0.1)
        return await process.ask("go"), await asyncio.gather(*waiting), await process.ask("twice")

    assert with_process(use) == ("go", ["wait"] * 3, "twice")


ENDS = {
    "leave": "exited with status 3",
    "write": r"sent a message that cannot be read .*",
    "fill": "sent a message of more than 64 MiB",
}


@pytest.mark.parametrize("deed", ENDS)
def test_the_end_of_a_process_is_raised_for_every_open_request_and_for_later_ones(deed):
    async def use(process):
        requests = [asyncio.create_task(process.ask(one)) for one in ("wait", deed)]
        watching = asyncio.create_task(process.watch())
        ends = await asyncio.gather(*requests, watching, return_exceptions=True)
        return [*ends, *await asyncio.gather(process.ask("late"), return_exceptions=True)]

    ends = with_process(use)

    assert [type(end) for end in ends] == [ProcessEndedError] * 4
    for end in ends:
        with pytest.raises(ProcessEndedError, match=ENDS[deed]):
            raise end


def test_a_process_that_closes_its_connection_and_lives_stopped_answering(monkeypatch):
    monkeypatch.setattr(serving, "EXIT_WAIT_S", 0.2)

    async def use(process):
        monkeypatch.setattr(process.child, "has_ended", lambda: False)
        with pytest.raises(ProcessEndedError, match="stopped answering"):
            await process.ask("leave")

    with_process(use)


def test_a_process_that_was_killed_while_it_waited_is_known_to_have_ended():
    async def use(process):
        assert not process.has_ended()
        os.kill(process.child.pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while not process.has_ended():
            assert time.monotonic() < end
            await asyncio.sleep(0.01)

    with_process(use)


def test_a_pool_says_to_all_that_use_it_later_why_it_ended():
    reasons, is_up = [], threading.Event()

    async def main():
        is_up.set()
        await run_together(asyncio.sleep(1000), fail())

    async def fail():
        raise PoolBrokenError(ValueError("no file"))

    thread = ServingThread("the pool", main(), reasons.append)
    assert is_up.wait(60)
    thread.close()

    for _ in range(2):
        with pytest.raises(ValueError, match="no file"):
            thread.call(print)
    assert [str(reason) for reason in reasons] == ["no file"]


def test_closing_a_pool_ends_what_runs_in_its_thread():
    ended, is_up = [], threading.Event()

    async def work():
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("work")

    async def main():
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        is_up.set()
        await task

    thread = ServingThread("the pool", main(), lambda reason: ended.append(str(reason)))
    assert is_up.wait(60)
    thread.close()
    thread.close()

    assert ended == ["work", "the pool was closed"]
    with pytest.raises(RuntimeError, match="the pool was closed"):
        thread.call(print)
