# SPDX-License-Identifier: Apache-2.0
"""An Android device or emulator, driven by `adb`: what is on its screen, and touches."""

import shlex
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from tempfile import gettempdir
from time import sleep

PNG = b"\x89PNG\r\n\x1a\n"
POLL_S = 0.2


class PhoneError(RuntimeError):
    """`adb` failed."""


class Phone:
    """A device by its serial number, as `adb devices` lists it.

    Args:
        adb: The program, by name or path.
        timeout_s: Limit of one command.

    Raises:
        PhoneError: From every method: a command failed or took too long.
    """

    def __init__(self, serial: str, adb: str = "adb", timeout_s: float = 20.0) -> None:
        self.serial, self.adb, self.timeout_s = serial, adb, timeout_s

    def screenshot(self) -> bytes:
        """Return the screen as a PNG."""
        picture = self._run("exec-out", "screencap", "-p")
        if not picture.startswith(PNG):
            raise PhoneError(f"{self.serial}: `screencap` returned no PNG but {picture[:80]!r}")
        return picture

    def tap(self, x: int, y: int) -> None:
        self._do("input", "tap", str(x), str(y))

    def swipe(self, x: int, y: int, to_x: int, to_y: int, milliseconds: int = 300) -> None:
        self._do("input", "swipe", *map(str, (x, y, to_x, to_y, milliseconds)))

    def type(self, text: str) -> None:
        """Type into the field that has the focus.

        Raises:
            ValueError: The text is not what `input text` can type: printable ASCII without `%s`, its space.
        """
        if not (text and text.isascii() and text.isprintable()) or "%s" in text:
            raise ValueError(f"only printable ASCII without %s can be typed, got {text!r}")
        self._do("input", "text", text.replace(" ", "%s"))

    def press(self, key: str) -> None:
        """Press a key by its name in Android: BACK, HOME, ENTER."""
        self._do("input", "keyevent", f"KEYCODE_{key}")

    def start(self, app: str) -> None:
        """Stop an app and start it, by its package or as `package/activity`."""
        package, _, activity = app.partition("/")
        self._do("am", "force-stop", package)
        if activity:
            self._do("am", "start", "-W", "-n", app)
        else:
            self._do("monkey", "-p", package, "-c", "android.intent.category.LAUNCHER", "1")

    def shell(self, command: str) -> str:
        """Run a command in the device's shell and return its output."""
        return self._run("shell", command).decode(errors="replace")

    def _do(self, *words: str) -> None:
        self.shell(shlex.join(words))

    def _run(self, *words: str) -> bytes:
        command = [self.adb, "-s", self.serial, *words]
        try:
            ended = subprocess.run(command, capture_output=True, timeout=self.timeout_s, check=False)
        except FileNotFoundError:
            raise PhoneError(f"no program {self.adb!r}; install Android's platform tools") from None
        except subprocess.TimeoutExpired:
            raise PhoneError(f"{shlex.join(command)} took more than {self.timeout_s:g} s") from None
        if ended.returncode:
            said = (ended.stderr or ended.stdout).decode(errors="replace").strip()
            raise PhoneError(f"{shlex.join(command)} failed: {said}")
        return ended.stdout


def size_of(png: bytes) -> tuple[int, int]:
    """Return the width and height of a PNG in pixels."""
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@contextmanager
def free_serial(serials: Sequence[str]) -> Iterator[str]:
    """Wait for a device that no other process of this machine holds, and hold it inside the block."""
    while True:
        for serial in serials:
            with Path(gettempdir(), f"android_agent_{serial.replace('/', '_')}.lock").open("w") as lock:
                try:
                    flock(lock, LOCK_EX | LOCK_NB)  # ends with the process, however it ends
                except BlockingIOError:
                    continue
                yield serial
                return
        sleep(POLL_S)
