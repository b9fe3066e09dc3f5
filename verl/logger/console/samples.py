# SPDX-License-Identifier: Apache-2.0
"""A few responses of a validation, short enough to read between two steps."""

import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.panel import Panel
from rich.text import Text

from verl.logger.base import Generation
from verl.logger.console.table import number

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
        wrapped = _wrapped(shortened(readable(text) or EMPTY, room * num_lines - spare), room)
        for index, line in enumerate(wrapped[:num_lines]):
            label = name if index == 0 else ""
            style = "not dim" if name == "response" else ""
            end = f"{'':<{room - len(line) + 2}}{score}" if name == "answer" else ""
            yield Text(f"{label:<{LABEL_WIDTH}}").append(line, style=style).append(end)


def _wrapped(text: str, width: int) -> list[str]:
    """Break a text between words; only a word longer than a line is broken."""
    lines = [""]
    for word in text.split(" "):
        while len(word) > width:
            if lines[-1]:
                lines.append("")
            lines[-1], word = word[:width], word[width:]
            lines.append("")
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return [line for line in lines if line] or [""]
