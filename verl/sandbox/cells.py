# SPDX-License-Identifier: Apache-2.0
"""The program of a session: runs cells of code in one namespace, as a notebook does.

It is not imported: `session.py` runs its text inside the sandbox. Messages on file descriptor 3 are JSON
after 4 bytes with its size:

    in    {"code": text, "limit_s": seconds, "max_characters": number, "max_images": number}
    out   {"text": what it printed, "images": [PNG in base 64]}
"""

import ast
import base64
import io
import json
import linecache
import os
import signal
import struct
import sys
import traceback
import warnings
from types import ModuleType
from typing import Any, NoReturn

CONNECTION = 3
SIZE = struct.Struct("!I")


class Output(io.TextIOBase):
    """Keeps the start and the end of a text."""

    def __init__(self, max_characters: int) -> None:
        self.half = max_characters // 2
        self.head, self.tail, self.num_cut = "", "", 0

    def write(self, text: str) -> int:
        room = self.half - len(self.head)
        self.head += text[:room]
        rest = self.tail + text[room:]
        self.tail = rest[-self.half :]
        self.num_cut += len(rest) - len(self.tail)
        return len(text)

    def text(self) -> str:
        cut = f"\n[... {self.num_cut} characters ...]\n" if self.num_cut else ""
        return self.head + cut + self.tail

    def isatty(self) -> bool:
        return False


class Cells:
    """Runs cells one after another in the namespace of a module."""

    def __init__(self) -> None:
        self.module = ModuleType("__main__")
        sys.modules["__main__"] = self.module
        self.images: list[bytes] = []
        self.number = 0

    def run(self, code: str, limit_s: float, max_characters: int, max_images: int) -> dict[str, Any]:
        output = Output(max_characters)
        sys.stdout = sys.stderr = output
        self.images, self.number = [], self.number + 1
        try:
            signal.signal(signal.SIGALRM, lambda *_: self._stop(limit_s))
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            self._execute(code)
        except SystemExit as error:
            output.write(f"SystemExit: {error.code}")
        except BaseException as error:  # noqa: BLE001 (code raises anything)
            signal.setitimer(signal.ITIMER_REAL, 0)
            output.write(self._described(error))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            self._take_figures()
        except Exception as error:  # noqa: BLE001 (drawing may fail in any way)
            output.write(f"a figure cannot be drawn: {error}")
        images = [base64.b64encode(image).decode() for image in self.images[:max_images]]
        text = output.text().encode(errors="replace").decode()
        return {"text": text, "images": images}

    def _execute(self, code: str) -> None:
        name = f"<cell {self.number}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # for tracebacks
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, name, "exec"), self.module.__dict__)
        if not isinstance(last, ast.Expr):
            return
        value = eval(compile(ast.Expression(last.value), name, "eval"), self.module.__dict__)
        if value is not None and not self._take_picture(value):
            sys.stdout.write(f"{value!r}\n")

    def _stop(self, limit_s: float) -> NoReturn:
        raise TimeoutError(f"the code ran for over {limit_s:g} s")

    def _described(self, error: BaseException) -> str:
        described = traceback.TracebackException.from_exception(error)
        own = Cells.run.__code__.co_filename
        frames = [frame for frame in described.stack if frame.filename != own]
        described.stack = traceback.StackSummary.from_list(frames)
        return "".join(described.format())

    def _take_picture(self, value: Any) -> bool:
        pillow = sys.modules.get("PIL.Image")
        if pillow is None or not isinstance(value, pillow.Image):
            return False
        file = io.BytesIO()
        value.save(file, "PNG")
        self.images.append(file.getvalue())
        return True

    def _take_figures(self) -> None:
        plots = sys.modules.get("matplotlib.pyplot")
        if plots is None:
            return
        for number in plots.get_fignums():
            file = io.BytesIO()
            plots.figure(number).savefig(file, format="png")
            self.images.append(file.getvalue())
        plots.close("all")


def main() -> None:
    os.environ["MPLBACKEND"] = "Agg"  # `show` would wait for a window
    warnings.filterwarnings("ignore", message=".*non-interactive.*")
    cells = Cells()
    with open(CONNECTION, "rb") as requests, open(CONNECTION, "wb", closefd=False) as answers:
        while head := requests.read(SIZE.size):
            (size,) = SIZE.unpack(head)
            answer = json.dumps(cells.run(**json.loads(requests.read(size)))).encode()
            answers.write(SIZE.pack(len(answer)) + answer)
            answers.flush()


if __name__ == "__main__":
    main()
