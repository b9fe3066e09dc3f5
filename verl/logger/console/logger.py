# SPDX-License-Identifier: Apache-2.0
"""Console output of a run, in the form that `trainer.console` names.

    compact   an aligned line per step; on a terminal a live line with the reward and the stage below them
    full      every metric that means something in the run, grouped by area; the same live line
    json      one JSON object per step on stdout, as in `experiment_log.jsonl`, and nothing else

In a pipe or a file there are plain lines only, with an occasional one in a long stage.
"""

import re
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from verl.logger.base import LOGGERS, Generation, Logger, Metrics, Run, json_line
from verl.logger.console.bar import LiveBar, StepClock, hours, numbered, stdout_console
from verl.logger.console.start_up import release_live_line
from verl.logger.console.table import StepTable, area_lines, number

QUIET_S = 30.0  # without a terminal: longest silence of a stage that reports progress
REFRESHES = 2  # of the live line per second

# Responses of a validation, short enough to read between two steps.
LABEL_WIDTH = 10
LINES = {"prompt": 2, "response": 3, "answer": 1}  # shown of each, at most
MAX_WIDTH = 110  # of the panel: longer lines are hard to read
EDGES = 4  # characters of a panel's frame and padding
CUT, EMPTY = " … ", "(empty)"

MEDIA = re.compile(r"(?:<\|(?:vision_start|vision_end)\|>|<\|?(image|video)(?:_pad|_soft_token)?\|?>)+")
ROLE = re.compile(
    r"<\|im_start\|>\s*(?:system|user|assistant|tool)?\n?"
    r"|<\|start_header_id\|>\w*<\|end_header_id\|>\s*"
    r"|<start_of_turn>\s*(?:user|model)?\n?"
    r"|\[/?INST\]|<<?/?SYS>>?"
)
WIDE_BAR = "\uff5c"  # of DeepSeek's tokens
SPECIAL = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|</?s>|<(?:bos|eos|pad|end_of_turn)>"
    rf"|<{WIDE_BAR}[^<>{WIDE_BAR}\n]{{1,40}}{WIDE_BAR}>"
)


@LOGGERS.register("console")
class ConsoleLogger(Logger):
    """Lines for the steps, and on a terminal a live line below them."""

    is_local = True

    def __init__(self, run: Run, console: Console | None = None) -> None:
        super().__init__(run)
        self._console = console or stdout_console()
        release_live_line()
        self._clock = StepClock(run.total_steps)
        self._table = StepTable(run)
        self._metrics: dict[str, float] = {}  # last values
        self._samples: tuple[Sequence[Generation], int] | None = None  # to print after their step's line
        self._last_line = time.monotonic()
        self._live: Live | None = None
        if self._console.is_terminal and run.console != "json":
            bar = LiveBar(self._clock, lambda: self._metrics)
            self._live = Live(bar, console=self._console, refresh_per_second=REFRESHES, transient=True)
            self._live.start()

    def begin_step(self, step: int) -> None:
        self._clock.begin_step(step)

    def stage(self, name: str) -> None:
        self._clock.stage("" if name == "step" else name)  # between two stages

    def progress(self, done: int, total: int, unit: str) -> None:
        self._clock.units = f"{done}/{total} {unit}"
        is_silent = self._live is None and self.run.console != "json"
        if is_silent and time.monotonic() - self._last_line >= QUIET_S:
            self._print([f"step {self._clock.step_text()}: {self._clock.stage_text()}, {self._times()}"])

    def log(self, metrics: Metrics, step: int) -> None:
        """Print the lines of a step; the metrics of the running step end it."""
        self._metrics |= metrics
        # The first validation says nothing about the pace of the steps.
        is_running = step == self._clock.step > self._clock.finished_step
        is_step = is_running and not all(key.startswith("val") for key in metrics)
        seconds = self._clock.end_step() if is_step else None
        if self.run.console == "json":
            self._console.file.write(json_line(metrics, step))
            self._console.file.flush()
        elif self.run.console == "full":
            self._print([self._heading(step, seconds), *area_lines(metrics, self._console.width)])
        else:
            place = numbered(step, self.run.total_steps)
            self._print(self._table.lines(place, metrics, self._console.width))
        self._show_samples()

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        if generations and self.run.console != "json":
            self._samples = (generations, step)

    def close(self, failed: bool = False) -> None:
        self._show_samples()
        if self._live is not None:
            self._live.stop()

    def _show_samples(self) -> None:
        if self._samples is not None:
            width, framed = self._console.width, self._live is not None
            self._print([sample_panel(*self._samples, width, framed=framed)])
            self._table.count(2 + 4 * len(self._samples[0]))
        self._samples = None

    def _heading(self, step: int, seconds: float | None) -> Text:
        heading = f"step {numbered(step, self.run.total_steps)}"
        if seconds is not None:
            heading += f": {seconds:.1f} s, {self._times()}"
        return Text(heading, style="bold")

    def _times(self) -> str:
        eta = self._clock.eta_s()
        elapsed = f"elapsed {hours(self._clock.elapsed_s())}"
        return elapsed if eta is None else f"{elapsed}, eta {hours(eta)}"

    def _print(self, lines: Iterable[RenderableType]) -> None:
        for line in lines:
            self._console.print(Text(line) if isinstance(line, str) else line, soft_wrap=True)
        self._last_line = time.monotonic()


def readable(text: str) -> str:
    """Return a text in one line, without the tokens of a chat template and control characters."""
    text = MEDIA.sub(lambda found: f" [{found[1] or 'media'}] ", text)
    text = SPECIAL.sub(" ", ROLE.sub(" ", text))
    return "".join(letter if letter.isprintable() else "�" for letter in " ".join(text.split()))


def shortened(text: str, length: int) -> str:
    """Cut the middle out of a long text, between words: an answer often comes at the end."""
    if len(text) <= length:
        return text
    room = length - len(CUT)
    head, tail = text[: room - room // 3], text[-(room // 3) :]
    if " " in head:
        head = head.rpartition(" ")[0]
    if " " in tail:
        tail = tail.partition(" ")[2]
    return f"{head}{CUT}{tail}"


def sample_panel(generations: Sequence[Generation], step: int, width: int, *, framed: bool) -> RenderableType:
    """Return the responses to read after a validation, in a frame or as plain lines."""
    inner = min(width, MAX_WIDTH) - EDGES
    body = Text("\n").join(
        line
        for number_, generation in enumerate(generations)
        for line in [*([Text("")] if number_ else []), *_lines(generation, inner)]
    )
    title = f"validation at step {step}"
    if framed:
        return Panel(body, title=title, title_align="left", box=box.ROUNDED, width=inner + EDGES, style="dim")
    return Text("\n").join([Text(title), *(Text(f"  {line}".rstrip()) for line in body.plain.split("\n"))])


def _lines(generation: Generation, width: int) -> Iterator[Text]:
    """Yield the lines of a response, each at most `width` characters."""
    score = f"score {number(generation.score, 3, 6)}"
    texts = {
        "prompt": (generation.prompt, width - LABEL_WIDTH),
        "response": (generation.response, width - LABEL_WIDTH),
        "answer": (generation.ground_truth, width - LABEL_WIDTH - len(score) - 2),
    }
    for name, (text, room) in texts.items():
        num_lines = LINES[name]
        spare = (num_lines - 1) * room // 5  # lost at the ends of lines, which break between words
        wrapped = textwrap.wrap(
            shortened(readable(text) or EMPTY, room * num_lines - spare), room, break_on_hyphens=False
        )
        for index, line in enumerate(wrapped[:num_lines]):
            label = name if index == 0 else ""
            style = "not dim" if name == "response" else ""
            end = f"{'':<{room - len(line) + 2}}{score}" if name == "answer" else ""
            yield Text(f"{label:<{LABEL_WIDTH}}").append(line, style=style).append(end)
