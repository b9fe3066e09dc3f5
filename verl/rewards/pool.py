# SPDX-License-Identifier: Apache-2.0
"""A pool of reward processes that can be killed.

One thread owns the processes: it starts them, hands out calls, collects answers, kills what is late and
replaces what died. Everything else only appends to its queue. The thread lives as long as the pool, on
purpose: Linux kills a child when the *thread* that started it ends, and that leaves no orphan behind a
controller that was killed.
"""

import itertools
import os
import pickle
import re
import selectors
import socket
import threading
import time
from collections import deque

from verl.config.worker import RewardConfig
from verl.rewards.function import OPTION, TRACEBACK_HEADING, describe, split_spec
from verl.rewards.pool_process import NEVER, Call, ChildProcess
from verl.rewards.worker_process import Answer, Failure, Ready, Setup, timeout_message
from verl.utils.rank_logger import get_logger

LOAD_TIMEOUT_S = 120.0  # at least this long to import the user's file: it may import torch on a busy machine

logger = get_logger(__name__)


class RewardPool:
    """Processes that call one reward function.

    Consumes calls from any thread, waits for processes, tells scores and failures on the pool's own thread. A
    call that fails is repeated `max_retries` times before that is told. Of several calls in a process that
    ended, each is repeated alone first, so that one that ends its process fails and the others do not.
    """

    def __init__(self, spec: str, config: RewardConfig) -> None:
        """Start the processes; returns at once. `max_concurrency` calls of an `async def` share a process."""
        path, function_name = split_spec(spec)
        self.function = f"{path}:{function_name}"
        self.path = str(path)
        self.timeout_s = config.timeout_s
        self.num_processes = config.num_cpus
        self.max_concurrency = config.max_concurrency
        self.max_retries = config.max_retries
        kwargs = dict(config.reward_function_kwargs)
        setup = Setup(self.function, kwargs, config.reward_type, config.timeout_s, config.memory_limit_gb)
        self._setup = pickle.dumps(setup)
        self._numbers = itertools.count()
        self._queue: deque[Call] = deque()
        self._processes: list[ChildProcess] = []
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._drain_wake_ups)
        self._loaded = threading.Event()
        self._ready: Ready | None = None
        self._broken: Failure | None = None
        self._closing = False
        self._lock = threading.Lock()  # guards `_queue`, `_broken` and `_closing` against late submissions
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    def wait_until_loaded(self) -> Ready:
        """Wait for the first process to have imported the user's file; raises why it could not."""
        self._loaded.wait()
        if self._ready is None:
            assert self._broken is not None, "a pool without a function must know why"
            raise self._broken.kind(self._broken.message)
        return self._ready

    def submit(self, calls: list[Call]) -> None:
        """Queue calls; returns at once."""
        with self._lock:
            if self._closing:
                raise RuntimeError("the reward pool is closed")
            broken = self._broken
            if broken is None:
                self._queue.extend(calls)
        if broken is not None:
            raise broken.kind(broken.message)
        self._wake_up()

    def pids(self) -> list[int]:
        """Process ids of the processes that are alive now."""
        return [process.popen.pid for process in list(self._processes)]

    def close(self) -> None:
        """Kill every process and wait for their end; calls under way fail. Safe to call twice."""
        with self._lock:
            self._closing = True
        self._wake_up()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake_up(self) -> None:
        try:
            self._wake_sender.send(b"\0")
        except BlockingIOError:
            return  # so many are unread that the thread wakes anyway
        except OSError:
            if not self._closing:
                raise

    # Everything below runs on the pool's own thread.

    def _run(self) -> None:
        reason = Failure(RuntimeError, "the reward pool was closed")
        try:
            for _ in range(self.num_processes):
                self._start_process()
            while not self._closing:
                self._hand_out()
                for key, _ in self._selector.select(self._seconds_to_deadline()):
                    key.data()
                self._kill_late()
        except BaseException as error:
            reason = Failure(RuntimeError, f"the reward pool stopped: {error!r}")
            raise
        finally:
            self._break(reason)
            for process in list(self._processes):
                self._remove(process)
            self._selector.close()
            self._wake_receiver.close()
            self._wake_sender.close()

    def _drain_wake_ups(self) -> None:
        self._wake_receiver.recv(4096)

    def _start_process(self) -> None:
        deadline = time.monotonic() + max(LOAD_TIMEOUT_S, self.timeout_s)
        process = ChildProcess(self._setup, deadline)
        self._processes.append(process)
        self._selector.register(process.connection, selectors.EVENT_READ, lambda: self._receive(process))
        self._selector.register(process.pidfd, selectors.EVENT_READ, lambda: self._bury(process))

    def _remove(self, process: ChildProcess) -> None:
        self._processes.remove(process)
        self._selector.unregister(process.connection)
        self._selector.unregister(process.pidfd)
        process.stop()

    def _hand_out(self) -> None:
        while self._queue:
            call = self._queue[0]  # only this thread takes calls away
            free = [process for process in self._processes if process.has_room_for(call)]
            if call.is_wanted() and not free:
                return
            with self._lock:
                self._queue.popleft()
            if not call.is_wanted():
                continue
            process = min(free, key=lambda one: len(one.calls))
            call.deadline = time.monotonic() + self.timeout_s + process.grace_s
            try:
                process.send(next(self._numbers), call)
            except OSError:  # it died or reads nothing: its exit code tells more than this
                self._bury(process)

    def _receive(self, process: ChildProcess) -> None:
        if process not in self._processes:
            return
        try:
            message = process.connection.recv()
        except (EOFError, OSError):
            self._bury(process)
            return
        if isinstance(message, Ready):
            process.loaded(message, self.max_concurrency)
            self._ready = message
            self._loaded.set()
        elif isinstance(message, Failure):
            self._break(message)
        else:
            self._deliver(process, message)
            if message.is_full:
                self._remove(process)
                self._repeat_alone(process)
                self._start_process()

    def _deliver(self, process: ChildProcess, answer: Answer) -> None:
        call = process.calls.pop(answer.call_number, None)
        if call is None:  # the pool has given up
            return
        process.num_answers += 1
        if answer.failure is None:
            assert answer.scores is not None, "an answer must hold scores or a failure"
            call.on_scores(call, answer.scores)
        elif answer.is_full and (process.calls or process.num_answers > 1):
            process.calls[answer.call_number] = (
                call  # others may have filled the memory: it is repeated with them
            )
        else:
            self._fail(call, answer.failure)

    def _fail(self, call: Call, failure: Failure) -> None:
        """Repeat a call that failed, behind all others; tell of it when that is of no use."""
        call.failures.append(failure)
        if len(call.failures) <= self.max_retries:
            with self._lock:
                self._queue.append(call)
        else:
            call.on_failure(call, failure)

    def _repeat_alone(self, process: ChildProcess) -> None:
        """Repeat what a process had under way when it ended."""
        for call in process.calls.values():
            call.is_alone = True
        with self._lock:
            self._queue.extendleft(process.calls.values())

    def _bury(self, process: ChildProcess) -> None:
        """Replace a process that died, after taking the answers it still gave."""
        if process not in self._processes:
            return
        while process.has_message():
            try:
                message = process.connection.recv()
            except (EOFError, OSError):
                break
            if isinstance(message, Answer):
                self._deliver(process, message)
            elif isinstance(message, Failure):
                self._break(message)
        how = process.how_it_ended()
        report = process.report()
        self._remove(process)
        if not process.is_loaded:
            self._break(
                Failure(RuntimeError, f"`{OPTION}`: the process that imports {self.path} {how}{report}")
            )
            return
        if not process.calls:
            logger.warning("an idle reward process %s and is replaced: pid=%d", how, process.popen.pid)
        elif len(process.calls) > 1:
            self._repeat_alone(process)
        else:
            (call,) = process.calls.values()
            what = f"while it scored {describe(call.rows, call.inputs)}{report}"
            message = f"the process of reward function {self.function} {how} {what}"
            self._fail(call, Failure(RuntimeError, message))
        self._start_process()

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [process.next_deadline() for process in self._processes]
        first = min(deadlines, default=NEVER)
        return None if first == NEVER else max(0.0, first - time.monotonic())

    def _kill_late(self) -> None:
        now = time.monotonic()
        for process in list(self._processes):
            if process.next_deadline() > now:
                continue
            what = _where_it_hangs(process.stacks(), self.path)
            self._remove(process)
            if not process.is_loaded:
                limit = max(LOAD_TIMEOUT_S, self.timeout_s)
                self._break(
                    Failure(TimeoutError, f"`{OPTION}`: importing {self.path} took over {limit:g} s: {what}")
                )
                continue
            if len(process.calls) > 1:
                self._repeat_alone(process)
            else:
                (call,) = process.calls.values()
                message = timeout_message(self.function, self.timeout_s, what, call.rows, call.inputs)
                self._fail(call, Failure(TimeoutError, message))
            self._start_process()

    def _break(self, failure: Failure) -> None:
        """Give up for good: fail what waits and whatever comes later."""
        with self._lock:
            self._broken = self._broken or failure
            waiting = list(self._queue)
            self._queue.clear()
        for process in self._processes:
            waiting.extend(process.calls.values())
            process.calls.clear()
        for call in waiting:
            call.on_failure(call, failure._replace(is_final=True))
        self._loaded.set()


def _where_it_hangs(stacks: str, path: str) -> str:
    """Find the user's line in the stacks that faulthandler wrote, innermost frame first."""
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', stacks)
    users = [idx for idx, (file, _, _) in enumerate(frames) if file == path]
    if not users:
        return (
            f"its process is outside of {path}\n{stacks}"
            if frames
            else "its process does not say where it is"
        )
    innermost = users[0]
    own = os.path.dirname(__file__)
    outermost = next(
        (idx for idx in range(innermost, len(frames)) if frames[idx][0].startswith(own)), len(frames)
    )
    trace = [f'  File "{file}", line {line}, in {name}' for file, line, name in reversed(frames[:outermost])]
    file, line, name = frames[innermost]
    return "\n".join([f"it is at {file}:{line}, in {name}", TRACEBACK_HEADING, *trace])
