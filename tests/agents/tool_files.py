# SPDX-License-Identifier: Apache-2.0
"""Tools that tests write to files: useful ones, and one for each way to fail."""

from tests.agents.failures import WAYS_TO_FAIL

GOOD = (
    '''
import asyncio, os, signal, subprocess, sys, time

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

async def wait(seconds: float, answer: str) -> str:
    """Wait.

    Args:
        seconds: Duration.
        answer: What to answer.
    """
    await asyncio.sleep(seconds)
    return answer

async def relay(waits_for: str = "", leaves: str = "") -> str:
    """Wait for a file and leave another one.

    Args:
        waits_for: Path of the file that must be there; none if empty.
        leaves: Path of the file to make; none if empty.
    """
    while waits_for and not os.path.exists(waits_for):
        await asyncio.sleep(0.01)
    if leaves:
        open(leaves, "w").close()
    return leaves

def fail(kind: str) -> str:
    """Fail.

    Args:
        kind: Function of this file.
    """
    return globals()[kind]()

def large_image():
    from PIL import Image
    return Image.new("1", (10_000, 10_000))

def number_of_images():
    from PIL import Image
    return [Image.new("RGB", (2, 2))] * 17

def garbage():
    import gc
    from multiprocessing.connection import Connection
    for each in gc.get_objects():
        if isinstance(each, Connection):
            os.write(each.fileno(), bytes([0, 0, 0, 5]) + b"hello")
    time.sleep(1000)

def kill_guardian():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)

def leave_a_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(__file__ + ".pid", "w") as file:
                file.write(str(os.getpid()))
            time.sleep(1000)
        os._exit(0)
    time.sleep(1000)

class Count:
    """Counts the calls of a conversation."""

    name = "count"

    def __init__(self, step: int = 1):
        self.step = step

    def create(self, row):
        if row.get("refuse"):
            raise KeyError("no such row")
        return {"count": row.get("start", 0), "log": row.get("log")}

    async def __call__(self, state, seconds: float = 0.0, kind: str = "") -> str:
        """Count.

        Args:
            seconds: Time that it takes.
            kind: Way to fail.
        """
        await asyncio.sleep(seconds)
        state["count"] += self.step
        if kind:
            globals()[kind]()
        return f"{state['count']} in {os.getpid()}"

    async def close(self, state):
        with open(state["log"], "a") as file:
            file.write(f"closed at {state['count']}\\\\n")
'''.replace("\\\\n", "\\n")
    + WAYS_TO_FAIL
)
