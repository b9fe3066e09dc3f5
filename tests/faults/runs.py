# SPDX-License-Identifier: Apache-2.0
"""Runs of the trainer's command, watched and harmed from outside.

    run = Run(output, arguments)             # starts the command
    run.wait_for_step(3)                     # its third step is logged
    pid = run.catch("update_actor")          # a worker that is in this phase right now
    run.harm(lambda: os.kill(pid, SIGKILL))  # remembers when
    status = run.end()

Times are read where they arise: lines of stderr and of the log are stamped when they come.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from tests.helpers.training import ROOT, learned
from verl.checkpoint.storage import ShardReader, read_tensors
from verl.logger.base import flatten
from verl.logger.file import METRICS_FILE

RESUMED = re.compile(r"resumed: step=(\d+)")
LIMIT_S = 900.0  # for whatever a test waits for, on a machine that does other things too
GLANCE_S = 0.002  # between looks at a phase
SFT = "verl.trainer.sft"  # the other command
WORKERS = ("ray::WorkerProcess",)
READER = "pt_data_worker"
SCORER = "verl.rewards.worker_process"


class Line(NamedTuple):
    """A line that the command wrote to stderr."""

    moment: float  # seconds, of the monotonic clock
    text: str


class Logged(NamedTuple):
    """A step that the run finished."""

    moment: float
    step: int
    metrics: dict[str, float]


class Run:
    """The command as a user starts it; what it said and finished, and when.

    Attributes:
        told: Lines of stderr.
        steps: Finished steps, in the order of their end; one that was done again stands there again.
        harmed: When `harm` was called.
    """

    def __init__(
        self,
        output: Path,
        arguments: Sequence[str],
        *,
        module: str = "verl.trainer.main",
        env: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        log_folder: Callable[[int], Path] | None = None,
    ) -> None:
        """Start the command.

        Args:
            output: `trainer.save_checkpoint_path`.
            arguments: Of the command.
            module: The command.
            env: Added to the environment.
            prefix: Words before the command.
            log_folder: Where `output` is seen from here, from the process id; None is where it is.
        """
        self.output = output
        self.told: list[Line] = []
        self.steps: list[Logged] = []
        self.started = time.monotonic()
        self.harmed = self.started
        command = [sys.executable, "-m", module, *arguments]
        self.process = subprocess.Popen(
            [*prefix, *command, f"trainer.save_checkpoint_path={output}"],
            cwd=ROOT, env=os.environ | (env or {}), text=True, stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.pid = self.process.pid
        folder = output if log_folder is None else log_folder(self.pid)
        self._log = folder / METRICS_FILE
        self._place = self._log.stat().st_size if self._log.exists() else 0
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._listen, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.told.append(Line(time.monotonic(), line.rstrip("\n")))

    def _read(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(GLANCE_S)
            with suppress(OSError), self._log.open("rb") as file:  # not there yet, or not any more
                file.seek(self._place)
                new = file.read()
                whole = new[: new.rfind(b"\n") + 1]
                self._place += len(whole)
                for text in filter(None, whole.splitlines()):
                    entry = flatten(json.loads(text))
                    self.steps.append(Logged(time.monotonic(), int(entry.pop("step")), entry))

    @property
    def stderr(self) -> str:
        """Everything that was told."""
        return "\n".join(line.text for line in self.told)

    def wait(self, condition: Callable[[], object], pause_s: float = 0.02) -> None:
        """Wait until something is so; the run must still be there then."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, f"it ended before: {self.stderr[-6000:]}"
            assert time.monotonic() < deadline, f"it never came to that: {self.stderr[-6000:]}"
            time.sleep(pause_s)

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is finished."""
        self.wait(lambda: any(logged.step == step for logged in self.steps))

    def come_to(self, step: int, saved: int) -> None:
        """Wait until a step is under way and the checkpoint of another is there."""
        self.wait_for_step(step - 1)
        self.wait((self._log.parent / f"global_step_{saved}").is_dir)

    def processes(self, is_one: Callable[[psutil.Process], bool]) -> list[int]:
        """Process ids of the run's processes of some kind, lowest first."""
        found = []
        for child in descendants(self.pid):
            with suppress(psutil.NoSuchProcess):  # it ended while we looked
                if is_one(child):
                    found.append(child.pid)
        return sorted(found)

    def workers(self) -> list[int]:
        """Process ids of the ranks."""
        return self.processes(lambda child: "".join(child.cmdline()).startswith(WORKERS))

    def catch(self, phase: str) -> int:
        """Wait until a rank is in a phase; returns its process id at once."""
        names = [(pid, Path(f"/proc/{pid}/comm")) for pid in self.workers()]
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            for pid, name in names:
                if name.read_text().rstrip("\n") == phase:
                    return pid
            time.sleep(GLANCE_S)
        raise AssertionError(f"no rank was ever in {phase}: {self.stderr[-6000:]}")

    def harm(self, deed: Callable[[], object]) -> None:
        """Do something to the run, and remember when."""
        self.harmed = time.monotonic()
        deed()

    def end(self) -> int:
        """Wait for the end; returns the exit status."""
        status = self.process.wait(LIMIT_S)
        self._ended.set()
        for thread in self._threads:
            thread.join()
        return status

    def resumed_from(self) -> int:
        """The step of the checkpoint that the run went on from."""
        found = RESUMED.search(self.stderr)
        assert found is not None, f"it did not resume: {self.stderr[-6000:]}"
        return int(found[1])

    def noticed_s(self, text: str) -> float:
        """Seconds from the harm to the first line after it that contains a text."""
        moments = [line.moment for line in self.told if line.moment >= self.harmed and text in line.text]
        assert moments, f"nobody said {text!r}: {self.stderr[-6000:]}"
        return moments[0] - self.harmed

    def went_on_s(self) -> float:
        """Seconds from the harm to the end of the first step that ended after it."""
        return next(logged.moment for logged in self.steps if logged.moment > self.harmed) - self.harmed

    def waited_s(self) -> float:
        """Longest time from the harm on in which no step ended."""
        moments = [self.harmed, *(logged.moment for logged in self.steps if logged.moment > self.harmed)]
        return max(later - earlier for earlier, later in pairwise(moments))


def metrics_of(output: Path, arguments: Sequence[str], **how: Any) -> dict[int, dict[str, float]]:
    """The metrics, by step, of a run that nothing happens to."""
    run = Run(output, arguments, **how)
    assert run.end() == 0, run.stderr
    return {logged.step: logged.metrics for logged in run.steps}


def killed_and_resumed(output: Path, arguments: Sequence[str], step: int) -> tuple[Run, Run]:
    """A run whose controller is killed once the checkpoint of a step is there, and the one that resumes."""
    killed = Run(output, arguments)
    killed.wait((output / f"global_step_{step}").is_dir)
    os.kill(killed.pid, signal.SIGKILL)
    killed.end()
    resumed = Run(output, arguments)
    assert resumed.end() == 0, resumed.stderr
    assert resumed.resumed_from() == step
    return killed, resumed


def steps_again(run: Run, after: Run | None = None) -> int:
    """How many steps were done again, the one under way among them; those that were saved were done once.

    Args:
        run: Was harmed.
        after: The same command, started after it had ended; None if the run went on by itself.
    """
    steps = run.steps if after is None else [*run.steps, *after.steps]
    saved = (after or run).resumed_from()
    done = [logged.step for logged in steps]
    assert all(done.count(step) == 1 for step in range(1, saved + 1)), done
    last = max(logged.step for logged in run.steps if after is not None or logged.moment <= run.harmed)
    return last + 1 - saved


def descendants(pid: int) -> Iterator[psutil.Process]:
    """The living processes below one."""
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended while we looked
            if child.status() != psutil.STATUS_ZOMBIE and child.cmdline():
                yield child


def assert_same(
    steps: Sequence[Logged], expected: dict[int, dict[str, float]], but: Sequence[str] = ()
) -> None:
    """Every step of the expected ones was done, and each time with the expected numbers.

    Args:
        steps: What was done, before and after the fault.
        expected: Metrics of the undisturbed run.
        but: Names of metrics that the fault is to be seen in.
    """
    assert {logged.step for logged in steps} - {0} == set(expected) - {0}
    for logged in steps:
        if logged.step:
            found, wanted = learned(logged.metrics), learned(expected[logged.step])
            differing = {key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)}
            assert differing <= set(but), (logged.step, {k: (found.get(k), wanted.get(k)) for k in differing})


def saved_tensors(folder):
    """Weights and optimizer of a checkpoint, whole, by key."""
    reader = ShardReader(folder / "actor")
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in reader.tensors().items()
    }
    read_tensors(reader, tensors, is_alone=True)
    return tensors
