# SPDX-License-Identifier: Apache-2.0
"""On PYTHONPATH of a run this records the files of `verl` on its stack at each station; see `walk.py`."""

import fcntl
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = f"{ROOT / 'verl'}{os.sep}"
CONTROLLERS = ("verl.trainer.main", "--multiprocessing-fork")  # the command, and the child that trains


def record(station, frame):
    files = []  # the command first
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            files.insert(0, os.path.relpath(frame.f_code.co_filename, ROOT))
        frame = frame.f_back
    with open(os.environ["WALK_FILE"], "a") as file:
        file.write(json.dumps({"station": station, "files": files}) + "\n")


def listen(stations, end):
    """Record the callers of stations, functions of files, until `end`, whose own file counts."""
    names = {station.rpartition(":")[2].rpartition(".")[2] for station in (*stations, end)}

    def on_event(frame, event, argument):
        if event == "c_call" and argument is fcntl.lockf:
            record("fcntl.lockf", frame)
        if event != "call" or frame.f_code.co_name not in names:
            return
        station = f"{os.path.relpath(frame.f_code.co_filename, ROOT)}:{frame.f_code.co_qualname}"
        if station == end:
            sys.setprofile(None)
            record(station, frame)
        elif station in stations:
            record(station, frame.f_back)

    sys.setprofile(on_event)


if "WALK_FILE" in os.environ and any(name in sys.orig_argv for name in CONTROLLERS):
    listen(**json.loads(os.environ["WALK_STATIONS"]))
