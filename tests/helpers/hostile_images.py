# SPDX-License-Identifier: Apache-2.0
"""Images that crash or block the process that reads them, in a custom format registered with Pillow.

A custom decoder, because decoders get fixed: a file that crashes one today may not crash it tomorrow.
"""

from pathlib import Path

from PIL import Image, ImageFile

from tests.helpers.endings import do
from verl.data.rl_dataset import RLHFDataset

MARK = b"HOSTILE"


class HostileImage(ImageFile.ImageFile):
    """56 x 56 black pixels, if the process survives."""

    format = "HOSTILE"

    def _open(self):
        _, self.stage, self.action = self.fp.read(64).decode().split()
        self._size, self._mode = (56, 56), "RGB"
        if self.stage == "header":
            do(self.action)

    def load(self):
        if self.action == "kill_once":
            self.kill_once()
        else:
            do(self.action)
        self.im = Image.new(self.mode, self.size).im
        return self.im.pixel_access(True)

    def kill_once(self):
        """Die only the first time, like a process killed for the memory use of others."""
        path = Path(f"{self.filename}.seen")
        if not path.exists():
            path.touch()
            do("kill")


Image.init()  # which registers its own decoders
Image.register_open("SGI", HostileImage, lambda prefix: prefix.startswith(MARK))  # an allowed format


def know_format(connection):
    """Do nothing: a process that can load this function has imported this module."""


def save_hostile(path: Path, action: str, stage: str = "pixels") -> str:
    """Save an image that performs an action when its header or its pixels are read."""
    path.write_bytes(b" ".join([MARK, stage.encode(), action.encode()]))
    return str(path)


class HostileRows(RLHFDataset):
    """Rows whose readers import this module, and so know the format."""
