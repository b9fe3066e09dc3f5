# SPDX-License-Identifier: Apache-2.0
"""What runs inside a reward process: load the function once, then answer calls until the other end closes.

The process is a plain `python -c`, neither forked nor spawned by multiprocessing: it imports nothing of the
controller (no torch, no Ray) and starts as fast as Python does. Messages on the connection:

    in    `Setup`, once; for each call its number and pickled (rows, inputs)
    out   Ready or Failure, once; for each call an Answer, in any order if the function is `async def`
"""

import asyncio
import faulthandler
import pickle
import signal
import struct
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from verl.rewards.function import (
    RewardFunction,
    Scores,
    describe,
    describe_error,
    describe_place,
    load_reward_function,
)
from verl.rewards.memory import Memory
from verl.utils.child_process import end_with_parent

Inputs = list[dict[str, Any]]

CALL_NUMBER = struct.Struct("<q")
STACK_SIGNAL = (
    signal.SIGUSR1
)  # makes the process write where it is; answered in C, even amid an endless regex


class Setup(NamedTuple):
    """What a process is started with."""

    function: str  # path.py:function
    kwargs: dict[str, Any]
    default_type: str
    timeout_s: float
    memory_limit_gb: float | None


class Ready(NamedTuple):
    """The function is loaded."""

    name: str
    reward_type: str
    is_async: bool


class Failure(NamedTuple):
    """Why something went wrong, as the exception that the controller raises."""

    kind: type[Exception]
    message: str
    is_final: bool = False  # it is the pool's, not that of one call, and repeating a call is of no use


class Answer(NamedTuple):
    """The scores of one call, or why there are none."""

    call_number: int
    scores: list[Scores] | None
    failure: Failure | None
    is_full: bool = False  # the process has little memory left: it should be replaced


def main(connection_fd: int, report_fd: int, controller_pid: int) -> None:
    """Serve calls on an inherited socket.

    Args:
        connection_fd: Socket to the controller.
        report_fd: File that receives the Python stacks on a crash and on `STACK_SIGNAL`.
        controller_pid: The process dies with this one.
    """
    end_with_parent(controller_pid)
    faulthandler.enable(report_fd, all_threads=True)
    faulthandler.register(STACK_SIGNAL, report_fd, all_threads=True, chain=False)
    connection = Connection(connection_fd)
    setup: Setup = connection.recv()
    memory = Memory(setup.memory_limit_gb)
    memory.limit()
    try:
        reward = load_reward_function(setup.function, setup.kwargs, setup.default_type)
    except (ValueError, OSError) as error:
        memory.lift_limit()
        connection.send(Failure(type(error), f"{error}{memory.hint(error.__cause__)}"))
        return
    connection.send(Ready(reward.name, reward.reward_type, reward.is_async))
    if reward.is_async:
        asyncio.run(_serve_concurrently(connection, reward, memory, setup.timeout_s))
    else:
        _serve(connection, reward, memory)


def _serve(connection: Connection, reward: RewardFunction, memory: Memory) -> None:
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        (call_number,) = CALL_NUMBER.unpack_from(message)
        inputs: Inputs = []
        rows: list[int] = []
        try:
            rows, inputs = pickle.loads(message[CALL_NUMBER.size :])
            returned = reward.call(inputs)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's function raises anything)
            connection.send(_raised(reward, memory, call_number, error, rows, inputs))
        else:
            connection.send(_checked(reward, call_number, returned, rows, inputs))


async def _serve_concurrently(
    connection: Connection, reward: RewardFunction, memory: Memory, timeout_s: float
) -> None:
    """Run every call that has arrived at the same time; the controller bounds their number."""
    loop = asyncio.get_running_loop()
    closed: asyncio.Future[None] = loop.create_future()
    running: set[asyncio.Task[None]] = set()  # the loop itself keeps weak references only

    def begin(message: bytes) -> None:
        task = loop.create_task(_answer(connection, reward, memory, message, timeout_s))
        running.add(task)
        task.add_done_callback(end)

    def end(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if not task.cancelled() and not closed.done() and (error := task.exception()):
            closed.set_exception(error)  # ends the process, which the controller sees at once

    def close() -> None:
        if not closed.done():
            closed.set_result(None)

    def read() -> None:  # a thread, so that the controller can send while the user's code holds the loop
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                loop.call_soon_threadsafe(close)
                return
            loop.call_soon_threadsafe(begin, message)

    threading.Thread(target=read, daemon=True).start()
    await closed


async def _answer(
    connection: Connection, reward: RewardFunction, memory: Memory, message: bytes, timeout_s: float
) -> None:
    (call_number,) = CALL_NUMBER.unpack_from(message)
    inputs: Inputs = []
    rows: list[int] = []
    limit = asyncio.timeout(timeout_s)
    try:
        rows, inputs = pickle.loads(message[CALL_NUMBER.size :])
        async with limit:
            returned = await reward.call(inputs)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's function raises anything)
        if limit.expired() and isinstance(error, TimeoutError):
            where = f"it is{describe_place(error.__cause__ or error, reward.path)}"
            why = timeout_message(str(reward), timeout_s, where, rows, inputs)
            connection.send(Answer(call_number, None, Failure(TimeoutError, why)))
        else:
            connection.send(_raised(reward, memory, call_number, error, rows, inputs))
    else:
        connection.send(_checked(reward, call_number, [returned], rows, inputs))


def _checked(
    reward: RewardFunction, call_number: int, returned: Any, rows: list[int], inputs: Inputs
) -> Answer:
    if reward.reward_type == "sequential" and not reward.is_async:
        returned = [returned]
    try:
        return Answer(call_number, reward.check(returned, rows, inputs), None)
    except ValueError as error:
        return Answer(call_number, None, Failure(ValueError, str(error)))


def _raised(
    reward: RewardFunction,
    memory: Memory,
    call_number: int,
    error: BaseException,
    rows: list[int],
    inputs: Inputs,
) -> Answer:
    is_full = memory.is_scarce(error)
    memory.lift_limit()  # to describe it takes memory
    what = describe_error(error, reward.path) + memory.hint(error)
    memory.limit()
    why = (
        f"reward function {reward} raised {what}for {describe(rows, inputs)}"
        if rows
        else f"a reward process cannot read the inputs of {reward}: {what}"
    )
    return Answer(call_number, None, Failure(ValueError, why), is_full)


def timeout_message(function: str, timeout_s: float, where: str, rows: list[int], inputs: Inputs) -> str:
    """The error for a call that did not return in time, wherever it was noticed."""
    limit = f"`worker.reward.timeout_s` ({timeout_s:g} s)"
    return f"reward function {function} did not return within {limit}: {where}\nfor {describe(rows, inputs)}"
