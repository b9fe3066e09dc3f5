# SPDX-License-Identifier: Apache-2.0
"""The table of docs/reliability.md: a row for each fault, written when its test has passed."""

import os
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from tests.helpers.training import ROOT

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- make test-faults writes from here -->", "<!-- to here -->"
HEADER = (
    "| fault | what the run does | steps done again | noticed after | training continues after |",
    "|---|---|---|---|---|",
)
AGAIN = "restarts by itself (`trainer.max_restarts=1`)"
NEXT = "reports why; the same command resumes"
FEWER = "continues with the rest (`trainer.restart_wait_s=5`)"
ANOTHER = "starts another for its prompts"
OTHERS = "continues with the other engine, which takes over the prompts"
RETRY = "repeats the call"
MASKED = "does not count its conversation (`on_tool_error=end`)"
KILLED = f"kills it after `tool_timeout_s`; {MASKED}"
REFUSED = "refuses it by the file's name, and names the newest checkpoint that is whole"

FAULTS = {  # what the run does, by fault, in the order of the table
    "a worker is killed in `sync_weights`": AGAIN,
    "a worker is killed in `gen`": AGAIN,
    "a worker is killed in `old`": AGAIN,
    "a worker is killed in `update_actor`": AGAIN,
    "a worker is killed in `save_checkpoint`": AGAIN,
    "a worker is killed while a checkpoint is written in the background": AGAIN,
    "a worker is stopped (SIGSTOP)": AGAIN,
    "a worker is killed, no restarts": f"ends with rank, phase and cause; {NEXT}",
    "a rollout engine is killed, `trainer.async.mode=stream`": ANOTHER,
    "a rollout engine is killed, `trainer.async.mode=stream`, `collective` weights": ANOTHER,
    "a rollout engine is killed, `trainer.async.mode=stream`, `delta` weights": ANOTHER,
    "a rollout engine is stopped (SIGSTOP), `trainer.async.mode=stream`": ANOTHER,
    "a rollout engine is killed, `trainer.async.mode=off`": ANOTHER,
    "a rollout engine is killed, no restarts are left, `trainer.async.mode=stream`": OTHERS,
    "a node with a rollout engine is lost, `trainer.async.mode=stream`": OTHERS,
    "a worker that trains is killed, `trainer.async.mode=stream`": AGAIN,
    "a node joins a stream that has lost an engine": "starts an engine on it, in the background",
    "a worker of a fine-tuning run is killed": AGAIN,
    "a worker raises": f"ends with its traceback; {NEXT}",
    "the training process is killed": AGAIN,
    "the controller is killed": "ends with its workers; the same command resumes",
    "a node is lost, `trainer.elastic=true`": FEWER,
    "a node of a fine-tuning run is lost, `trainer.elastic=true`": FEWER,
    "a node is lost and another joins after 5 s": "waits for it (`trainer.restart_wait_s`), then as above",
    "Ray's head is lost and restarts after 5 s": "waits for it (`trainer.restart_wait_s`), then as above",
    "a second Ctrl-C": "ends at once; the same command resumes",
    "a process of the reward function is killed": "replaces it",
    "a process that reads rows is killed": "replaces it, which reads the same rows",
    "the reward function raises once": RETRY,
    "the reward function hangs once": f"kills it after `worker.reward.timeout_s` (2); {RETRY}",
    "the reward function crashes once": RETRY,
    "the reward function fills its memory once": f"{RETRY} in a new process",
    "the reward function raises every time": f"ends with its line; {NEXT}, once it is fixed",
    "a tool raises": MASKED,
    "a tool hangs": KILLED,
    "a tool dies": MASKED,
    "an environment raises": MASKED,
    "an environment hangs": KILLED,
    "an environment dies": MASKED,
    "an agent raises": MASKED,
    "an agent hangs": KILLED,
    "an agent dies": MASKED,
    "an agent asks the policy in a loop": KILLED,
    "the process that all tools have in common is killed": "starts another; its conversations do not count",
    "the process that all tools have in common is killed every time": "ends with the cause",
    "an image is damaged during the run": f"ends with the row; {NEXT}, once it is fixed",
    "a video is damaged during the run": f"ends with the row; {NEXT}, once it is fixed",
    "a parquet file is damaged": "names it and starts nothing",
    "a gradient is not finite": "skips those updates (`actor/skipped_updates`)",
    "the disk is full when a checkpoint is due": "warns, removes the incomplete one, tries again every step",
    "a file of the last checkpoint is cut off": REFUSED,
    "a bit of the last checkpoint is flipped": REFUSED,
}


class Row(NamedTuple):
    """What a fault cost; None where there is nothing to tell."""

    steps_again: int | None
    noticed_s: float | None
    went_on_s: float | None

    def cells(self) -> list[str]:
        """The last columns of the table."""
        times = [f"{value:.1f} s" if value is not None else "" for value in self[1:]]
        return ["" if self.steps_again is None else str(self.steps_again), *times]


def write_row(fault: str, row: Row, page: Path = PAGE) -> None:
    """Put a row into the table of the page; others stay, but those of faults that are no more.

    Raises:
        ValueError: The page has no place for a table.
        KeyError: There is no such fault.
    """
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} must hold the lines {BEGIN!r} and {END!r}, between which the table goes")
    head, _, rest = text.partition(BEGIN)
    old, _, tail = rest.partition(END)
    rows = rows_of(old) | {fault: "| " + " | ".join([fault, FAULTS[fault], *row.cells()]) + " |"}
    table = "\n".join((*HEADER, *(rows[name] for name in FAULTS if name in rows)))
    page.write_text(f"{head}{BEGIN}\n\n{table}\n\n{measured_on()}\n\n{END}{tail}")


def rows_of(text: str) -> dict[str, str]:
    """The lines of a table, by fault."""
    lines = [line for line in text.splitlines() if re.match(r"\| (?!fault )[^-]", line)]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def measured_on() -> str:
    """The last measurement: when, on what, with what."""
    python = ".".join(map(str, sys.version_info[:2]))
    packages = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "ray"))
    return (
        f"Last measured {time.strftime('%Y-%m-%d')}: {os.cpu_count()} CPU cores, Python {python}, {packages}."
    )
