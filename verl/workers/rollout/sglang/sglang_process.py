# SPDX-License-Identifier: Apache-2.0
"""An engine's process of SGLang, as a rank of the engine sees it, and the ranks of one engine."""

import multiprocessing
import socket
import tempfile
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port

from verl.distributed.weights.peer_lost import PeerLostError
from verl.utils.processes.child_process import ChildProcess
from verl.workers.rollout.sglang.sglang_server import (
    STARTED,
    Command,
    Failed,
    Launch,
    Refused,
    Reply,
    Sampled,
    serve,
)


class SGLangDiedError(PeerLostError):
    """A process of SGLang was killed or crashed, with all that it sampled; another engine may do better."""


class SGLangFailedError(RuntimeError):
    """SGLang has ended by an error of its own or of its requests, which would come again."""


class EngineProcess:
    """Sends commands and receives responses.

    Attributes:
        wide: Names of the weights that SGLang keeps in float32.
        routed: Layers that have experts.
    """

    def __init__(self, arguments: dict[str, Any], environment: dict[str, str]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="verl-sglang-")
        key = bytes(multiprocessing.current_process().authkey)
        launch = Launch(arguments, environment, key, Path(self.folder.name))
        self.child = ChildProcess.start(partial(serve, launch))
        self.numbers = count()
        self.failure: SGLangFailedError | SGLangDiedError | None = None  # the end that SGLang reported
        self.sampled: deque[Sampled | Refused] = deque()  # not taken yet
        try:
            model = self._reply_to(STARTED)
        except SGLangFailedError as error:
            raise SGLangFailedError(
                f"{error}\n\nSGLang did not start with the model {arguments['model_path']}: if it does not"
                " know the model, set `worker.rollout.name` to vllm, in an environment of its own, or hf"
            ) from None
        self.wide: list[str] = model["wide"]
        self.routed: list[int] = model["routed"]

    def start_sampling(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Start requests: the name of each, and arguments of SGLang's `async_generate`."""
        self._send("sample", requests)

    def take(self, wait_s: float) -> list[Sampled | Refused]:
        """Return the responses that are there; if there is none, wait for one so long."""
        while self.child.connection.poll(0 if self.sampled else wait_s):
            self._receive()
        taken = list(self.sampled)
        self.sampled.clear()
        return taken

    def abort(self, names: Sequence[str]) -> None:
        """Abort requests: their responses, finished or not, are there to take then."""
        self._reply_to(self._send("abort", names))

    def forget(self, names: Sequence[str]) -> None:
        """Drop what was sampled for requests and not taken."""
        dropped = set(names)
        self.sampled = deque(each for each in self.sampled if each.name not in dropped)

    def do(self, name: str, *arguments: Any) -> None:
        """Run a command of `Server` that returns whether it succeeded, and why not; raise if not."""
        succeeded, message = self._reply_to(self._send(name, *arguments))
        if not succeeded:
            raise RuntimeError(f"SGLang's {name} failed: {message}")

    def check(self) -> None:
        """Raise if the process has ended; it says so itself on ranks that get no responses."""
        while self.child.connection.poll():
            self._receive()

    def close(self) -> None:
        self.child.kill()
        self.folder.cleanup()

    def _send(self, name: str, *arguments: Any) -> int:
        self._raise_failure()
        number = next(self.numbers)
        try:
            self.child.connection.send(Command(number, name, arguments))
        except (BrokenPipeError, OSError) as error:
            raise self._death() from error
        return number

    def _reply_to(self, number: int) -> Any:
        while True:
            reply = self._receive()
            if reply is not None:
                assert reply.number == number, "commands are answered one after another"
                return reply.value

    def _receive(self) -> Reply | None:
        self._raise_failure()
        try:
            message = self.child.connection.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if isinstance(message, Failed):
            self._end()
            error = SGLangFailedError if message.is_error else SGLangDiedError
            self.failure = error(f"SGLang failed:\n{message.why.rstrip()}")
            raise self.failure
        if isinstance(message, Reply):
            return message
        self.sampled.append(message)
        return None

    def _raise_failure(self) -> None:
        """Raise again how SGLang ended, also to those who clean up after it."""
        if self.failure is not None:
            raise self.failure

    def _death(self) -> SGLangDiedError:
        end = self._end()
        return SGLangDiedError(f"SGLang's process {end}\n{self.child.crash_report()}".rstrip())

    def _end(self) -> str:
        end = self.child.describe_end()
        self.folder.cleanup()
        return end


class EngineGroup:
    """Consecutive ranks; a group of one needs no process group.

    Attributes:
        index: Of this rank in the group.
    """

    def __init__(self, size: int) -> None:
        self.size, self.index = size, dist.get_rank() % size if size > 1 else 0
        self.group: dist.ProcessGroup | None = None
        if size > 1:
            own, _ = dist.new_subgroups(size, backend="gloo")
            assert isinstance(own, dist.ProcessGroup), "each rank is in a group"
            self.group = own

    @property
    def leads(self) -> bool:
        return self.index == 0

    def agree(self, value: Any) -> Any:
        """Return the value of the first rank."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on the first one; elsewhere nothing."""
        if self.group is None:
            return [value]
        values = [None] * self.size if self.leads else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values or []

    def address(self) -> str | None:
        """Return where the parts of an engine meet, on the first rank's node; None for a whole one."""
        if self.group is None:
            return None
        host = socket.gethostbyname(socket.gethostname()) if self.leads else ""
        return self.agree(f"{host}:{get_free_port()}" if self.leads else None)
