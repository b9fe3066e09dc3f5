# SPDX-License-Identifier: Apache-2.0
"""What an attempt aims at: a process, sockets, files; and how an attempt is made and judged."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.sandbox import attempts
from verl.sandbox.outcome import Isolation, Limits, SandboxError
from verl.sandbox.runner import run

LIMITS = Limits(
    cpu_s=1, wall_s=1.2, memory_mb=256, threads=32, output_bytes=1 << 20, folder_mb=8, open_files=64
)
GRACE_S = 4.0  # what hangs does so for 9 s or for ever
MAX_TRIALS = 4


@contextmanager
def outside() -> Iterator[dict]:
    """Set up what attempts aim at; yields the description that they are given."""
    token = secrets.token_hex(8)
    name = f"sandbox-{token[:4]}"
    with (
        tempfile.TemporaryDirectory() as home,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        subprocess.Popen(["sleep", "1000"], env={"HIDDEN": token}, stdin=subprocess.DEVNULL) as sleeper,
    ):
        abstract.bind(f"\0{name}")
        abstract.listen()
        for file in ("secret", "__init__.py"):
            Path(home, file).write_text(token)
        os.environ["HIDDEN"] = token
        port = server.getsockname()[1]
        files = {"home": home, "secret": f"{home}/secret"}
        yield {"pid": sleeper.pid, "port": port, "name": name, "token": token[::-1], **files}
        assert sleeper.poll() is None, "an attempt killed a process outside"
        assert Path(home, "secret").read_text() == token
        del os.environ["HIDDEN"]
        sleeper.kill()


def works(isolation: Isolation) -> bool:
    """Whether this machine has it."""
    try:
        return run("print(1)", isolation=isolation).stdout == "1\n"
    except SandboxError:
        return False


def failure_of(source: str, target: dict, isolation: Isolation, processes: int = 1) -> str | None:
    """Make an attempt; what is wrong with how it ended, None when it failed in time as it should.

    One that took too long is made again, since the machine that tests may be busy: what hangs hangs always.
    """
    times = []
    while len(times) < MAX_TRIALS:
        start = time.monotonic()
        limits = replace(LIMITS, processes=processes)
        outcome = run(attempts.program(source, target), stdin="given", limits=limits, isolation=isolation)
        times.append(time.monotonic() - start)
        if "ESCAPED" in outcome.stdout:
            return f"it escaped: {outcome.stdout[:1000]}"
        if leftover := wait_for_launchers():
            return f"processes are left: {leftover}"
        if times[-1] <= LIMITS.wall_s + GRACE_S:
            return None
    return f"it took {times} s"


def wait_for_launchers(seconds: float = 30.0) -> list[str]:
    """What is left of sandboxes after a while: the kernel may take its time to bury what it killed."""
    end = time.monotonic() + seconds
    while (left := launchers()) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def launchers(*parents: int) -> list[str]:
    """Processes of sandboxes that `parents` started, by default this one and those whose parent is gone."""
    wanted = [str(parent) for parent in parents or (os.getpid(), 1)]
    return [
        f"{entry.name} {fields[0]}"
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (fields := _state(entry)) and fields[1] in wanted
        and b"sandbox.launcher" in _command(entry)
    ]  # fmt: skip


def _state(process: Path) -> list[str]:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def main() -> None:
    """Make the attempts named on the command line's second place, and write those that did not fail."""
    isolation, names = Isolation(sys.argv[1]), json.loads(sys.argv[2])
    with outside() as target:
        found = {name: failure_of(attempts.ATTEMPTS[name], target, isolation) for name in names}
    sys.stdout.write(json.dumps({name: why for name, why in found.items() if why}))


if __name__ == "__main__":
    main()
