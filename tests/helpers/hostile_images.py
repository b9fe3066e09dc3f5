# SPDX-License-Identifier: Apache-2.0
"""Pictures that end or hold up the process that reads them: a format of their own, which Pillow opens.

The decoder is real to everything that calls it. It is written here because files that crash the decoders of
today are mended tomorrow.
"""

import ctypes
import faulthandler
import os
import signal
import time
from pathlib import Path

from PIL import Image, ImageFile

MARK = b"HOSTILE"
DEEDS = {
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(1000),
}
ENDINGS = {"abort": "SIGABRT", "segfault": "SIGSEGV", "kill": "SIGKILL"}


def do(deed: str) -> None:
    """Do a deed, without a stack on the screen."""
    faulthandler.disable()
    DEEDS[deed]()


class HostileImage(ImageFile.ImageFile):
    """56 x 56 black pixels, if anybody lives to see them."""

    format = "HOSTILE"

    def _open(self):
        _, self.stage, self.deed = self.fp.read(64).decode().split()
        self._size, self._mode = (56, 56), "RGB"
        if self.stage == "header":
            do(self.deed)

    def load(self):
        if self.deed == "kill_once":
            self.kill_once()
        else:
            do(self.deed)
        self.im = Image.new(self.mode, self.size).im
        return self.im.pixel_access(True)

    def kill_once(self):
        """Die as one does of others' memory, but not of one's own."""
        path = Path(f"{self.filename}.seen")
        if not path.exists():
            path.touch()
            do("kill")


Image.register_open(HostileImage.format, HostileImage, lambda prefix: prefix.startswith(MARK))


def save_hostile(path: Path, deed: str, stage: str = "pixels") -> str:
    """A picture that does a deed when its header or its pixels are read, `kill_once` a single time."""
    path.write_bytes(b" ".join([MARK, stage.encode(), deed.encode()]))
    return str(path)
