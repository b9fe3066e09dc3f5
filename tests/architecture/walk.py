# SPDX-License-Identifier: Apache-2.0
"""The walk from the command to the first `train_step`: as a run takes it, and as docs/core.md shows it.

A station is an act that every start comes by, in a room below the trainer or in the system. The walk is every
file of `verl/` on the stack of the controller when it gets to one of them, without the station's own file,
which does one thing and returns. On its way the run also records the files with a function that was given the
whole config.
"""

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from tests.architecture.source import ROOT

SITE = Path(__file__).parent / "walk_site"
PAGE = ROOT / "docs" / "core.md"
HEADING = "## From the command to the first step"
STATIONS = [
    "verl/config/schema.py:load_config",
    "fcntl.lockf",  # of the run's folder
    "verl/data/first_look.py:look_at_data",
    "verl/single_controller/ray/cluster.py:connect",
    "verl/single_controller/ray/processes.py:WorkerProcesses.__init__",
    "verl/data/loader.py:make_loaders",
    "verl/single_controller/ray/worker_group.py:RayWorkerGroup.__init__",
    "verl/logger/tracker.py:Tracker.__init__",
    "verl/trainer/run/checkpointing.py:RunState.load",
]
END = "verl/trainer/ray_trainer.py:RayPPOTrainer.train_step"  # the file counts: here the walk ends
CONFIG = (
    "PPOConfig"  # stands for a station in records of files with functions that were given the whole config
)
MAX_FILES_WITH_THE_CONFIG = 15  # a ceiling: lower it, never raise it
ROW = re.compile(r"^\| `(verl/[\w/]+\.py)` \| (.+) \| (.+\?) \|$", re.MULTILINE)


class Row(NamedTuple):
    """A line of the page."""

    file: str
    deed: str
    question: str


def rows_of_page() -> list[Row]:
    section = PAGE.read_text().split(f"{HEADING}\n")[1].split("\n## ")[0]
    return [Row(*found) for found in ROW.findall(section)]


def recording(file: Path) -> dict[str, str]:
    """Return the environment of a command that records its walk in a file."""
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    stations = {"stations": STATIONS, "end": END, "config": CONFIG}
    return {"PYTHONPATH": path, "WALK_FILE": str(file), "WALK_STATIONS": json.dumps(stations)}


def recorded_walk(file: Path) -> tuple[list[str], list[str]]:
    """Return the files of the walk in order, and the files that were given the whole config.

    Every station must have been reached.
    """
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert {record["station"] for record in records} == {*STATIONS, END, CONFIG}
    taken, given = (
        [name for record in records if (record["station"] == CONFIG) is chosen for name in record["files"]]
        for chosen in (False, True)
    )
    return list(dict.fromkeys(taken)), list(dict.fromkeys(given))
