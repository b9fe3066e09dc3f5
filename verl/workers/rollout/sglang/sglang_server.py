# SPDX-License-Identifier: Apache-2.0
"""A process with an engine of SGLang, which takes commands and sends back responses as they finish.

SGLang changes signal handlers, logging, environment variables and libraries of its process and kills all of
its children when it ends, so it gets one of its own. It starts others, which run the model (`scheduler.py`).
"""

import asyncio
import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from verl.workers.rollout.sglang.scheduler import run_scheduler

STARTED = -1  # number of the reply that a server sends first
KERNELS = "sgl_kernel"  # SGLang's package
CPU_KERNELS = Path(__file__).with_name("cpu_kernels.py")


class Launch(NamedTuple):
    """Arguments and surroundings of an engine."""

    arguments: dict[str, Any]  # of SGLang's `ServerArgs`
    environment: dict[str, str]
    authkey: bytes  # of the process that sends weights, which share memory by file descriptors
    folder: Path  # for what belongs to the engine


class Command(NamedTuple):
    """A call of a method of the server."""

    number: int
    name: str  # of the method
    arguments: tuple[Any, ...]


class Reply(NamedTuple):
    """Result of a command."""

    number: int
    value: Any


class Sampled(NamedTuple):
    """A response that is finished, or was aborted."""

    name: str  # of its request
    token_ids: list[int]
    log_probs: list[float]
    reason: str  # SGLang's: stop, length or abort
    routes: Any = None  # as SGLang returns them


class Refused(NamedTuple):
    """A request that SGLang did not take, or dropped."""

    name: str
    why: str


class Failed(NamedTuple):
    """The engine cannot continue."""

    why: str
    is_error: bool = True  # raised by SGLang, or by what it was asked; else a process was killed or crashed


def serve(launch: Launch, connection: Connection) -> None:
    """Start an engine, and run commands until the connection ends."""
    os.environ.update(launch.environment)
    warnings.simplefilter("ignore", UserWarning)  # as in the processes that it starts
    multiprocessing.current_process().authkey = launch.authkey
    if launch.arguments["device"] == "cpu" and importlib.util.find_spec(KERNELS) is None:
        (launch.folder / f"{KERNELS}.py").symlink_to(CPU_KERNELS)
        sys.path.insert(0, str(launch.folder))  # schedulers inherit it
    reason = launch.folder / "reason"
    try:
        engine = _engine_class(str(reason))(**launch.arguments)
    except BaseException:
        connection.send(Failed(reason.read_text() if reason.exists() else traceback.format_exc()))
        raise
    Server(engine, connection, reason).run()


def _engine_class(reason: str) -> Any:
    sglang = importlib.import_module("sglang.srt.entrypoints.engine")

    class PatchedEngine(sglang.Engine):
        run_scheduler_process_func = staticmethod(partial(run_scheduler, reason))

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *args: Any, **named: Any) -> tuple[list[Any], list[str]]:
            return [], []  # tokens come as they are

    return PatchedEngine


class Server:
    """Runs commands on an engine; those without a result send no reply."""

    def __init__(self, engine: Any, connection: Connection, reason: Path) -> None:
        self.engine, self.connection, self.reason = engine, connection, reason
        self.loop, self.manager = engine.loop, engine.tokenizer_manager  # None but on the first rank
        self.tasks: dict[str, asyncio.Task[None]] = {}  # by name of the request
        self.running: set[asyncio.Task[None]] = set()  # commands
        self.io = importlib.import_module("sglang.srt.managers.io_struct")

    def run(self) -> None:
        if self.manager is not None:
            self.loop.call_soon(self._handle_signals)
        else:
            threading.Thread(target=self._watch, name="scheduler", daemon=True).start()
        infos = self.engine._scheduler_init_result.scheduler_infos
        self._send(Reply(STARTED, {name: infos[0][name] for name in ("wide", "routed")}))
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        self.loop.run_forever()

    def _handle_signals(self) -> None:
        self.manager.auto_create_handle_loop()  # sets SGLang's, which end this process without a word
        self.loop.add_signal_handler(signal.SIGQUIT, self._fail)
        self.loop.remove_signal_handler(signal.SIGTERM)

    def _watch(self) -> None:
        """Wait for the end of the scheduler of a rank that does not lead."""
        self.engine._scheduler_init_result.block_until_scheduler_exits()
        self._send_end("a scheduler has ended")

    def _fail(self) -> None:
        """Report that a scheduler has ended, as SGLang's watchdog found, and end."""
        watched = zip(
            *(getattr(self.manager._subprocess_watchdog, name) for name in ("_processes", "_names")),
            strict=True,
        )
        codes = [
            f"{name} ended with exit code {process.exitcode}" for process, name in watched if process.exitcode
        ]
        self._send_end(*codes)

    def _send_end(self, *ends: str) -> NoReturn:
        """Send why the schedulers ended, and end."""
        is_error = self.reason.exists()
        self._send(Failed("\n".join([*ends, self.reason.read_text() if is_error else ""]), is_error))
        os._exit(1)

    def _read(self) -> None:
        while True:
            try:
                command = self.connection.recv()
            except (EOFError, OSError):
                os._exit(0)  # the guardian ends the schedulers
            self.loop.call_soon_threadsafe(self._start, command)

    def _start(self, command: Command) -> None:
        running = self.loop.create_task(self._run(command))
        self.running.add(running)  # the loop alone would not keep it
        running.add_done_callback(self.running.discard)

    async def _run(self, command: Command) -> None:
        try:
            value = await getattr(self, command.name)(*command.arguments)
        except Exception:  # noqa: BLE001 - the other end raises it
            self._send(Failed(traceback.format_exc()))
            return
        if value is not None:
            self._send(Reply(command.number, value))

    def _send(self, message: Any) -> None:
        self.connection.send(message)

    async def sample(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Start requests: the name of each, and arguments of SGLang's `async_generate`."""
        for name, request in requests:
            self.tasks[name] = self.loop.create_task(self._sample(name, request))

    async def _sample(self, name: str, request: dict[str, Any]) -> None:
        try:
            output = await self.engine.async_generate(rid=name, return_logprob=True, **request)
        except Exception as error:  # noqa: BLE001 - the other end raises it
            self._send(Refused(name, f"{type(error).__name__}: {error}"))
            return
        finally:
            del self.tasks[name]
        info = output["meta_info"]
        values = info.get("output_token_logprobs") or []
        self._send(
            Sampled(
                name,
                list(output["output_ids"]),
                [value for value, *_ in values],
                info["finish_reason"]["type"],
                info.get("routed_experts"),
            )
        )

    async def abort(self, names: Sequence[str]) -> bool:
        """Abort requests; when it returns, a `Sampled` or `Refused` of each was sent."""
        tasks = {name: self.tasks[name] for name in names if name in self.tasks}
        for name, task in tasks.items():
            while not task.done() and not self._is_dispatched(name):
                await asyncio.sleep(0)  # the scheduler forgets an order to abort what it has not got yet
            self.manager.abort_request(name)
        if tasks:
            await asyncio.wait(tasks.values())
        return True

    def _is_dispatched(self, name: str) -> bool:
        state = self.manager.rid_to_state.get(name)
        return state is not None and state.dispatched

    async def begin_sync(self) -> tuple[bool, str]:
        return await self.manager.begin_weight_update(self.io.BeginWeightUpdateReqInput(selector="all"), None)

    async def load(self, payloads: list[bytes]) -> tuple[bool, str]:
        """Load a bucket of weights: what `ForkingPickler` made of it on each rank."""
        request = self.io.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, flush_cache=False
        )
        return await self.manager.update_weights_from_tensor(request, None)

    async def end_sync(self) -> tuple[bool, str]:
        ended = await self.manager.end_weight_update(self.io.EndWeightUpdateReqInput(), None)
        flushed = await self.manager.flush_cache()
        return (ended[0] and flushed.success, ended[1] if flushed.success else "the cache was not cleared")

    async def release(self, tags: Sequence[str]) -> tuple[bool, str]:
        request = self.io.ReleaseMemoryOccupationReqInput(tags=list(tags))
        await self.manager.release_memory_occupation(request, None)
        return True, ""

    async def resume(self, tags: Sequence[str]) -> tuple[bool, str]:
        request = self.io.ResumeMemoryOccupationReqInput(tags=list(tags))
        await self.manager.resume_memory_occupation(request, None)
        return True, ""
