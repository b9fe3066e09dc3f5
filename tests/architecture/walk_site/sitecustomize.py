# SPDX-License-Identifier: Apache-2.0
"""On PYTHONPATH of a run this records its walk through the files of `verl`; see `walk.py`."""

import fcntl
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = f"{ROOT / 'verl'}{os.sep}"
CONTROLLERS = ("verl.trainer.main", "--multiprocessing-fork")  # the command, and the child that trains


def write(station, files):
    with open(os.environ["WALK_FILE"], "a") as file:
        file.write(json.dumps({"station": station, "files": files}) + "\n")


def record(station, frame):
    files = []  # the command first
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            files.insert(0, os.path.relpath(frame.f_code.co_filename, ROOT))
        frame = frame.f_back
    write(station, files)


def is_given(frame, type_name):
    """Whether a function was called with an argument of a type."""
    code = frame.f_code
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any(type(frame.f_locals.get(name)).__name__ == type_name for name in arguments if name != "self")


def listen(stations, end, config):
    """Record the callers of stations, functions of files, until `end`, whose own file counts.

    And each file with a function that was called with an argument of the type named `config`.
    """
    names = {station.rpartition(":")[2].rpartition(".")[2] for station in (*stations, end)}
    given = set()

    def on_event(frame, event, argument):
        if event == "c_call" and argument is fcntl.lockf:
            record("fcntl.lockf", frame)
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        file = os.path.relpath(frame.f_code.co_filename, ROOT)
        if file not in given and is_given(frame, config):
            given.add(file)
            write(config, [file])
        if frame.f_code.co_name not in names:
            return
        station = f"{file}:{frame.f_code.co_qualname}"
        if station == end:
            sys.setprofile(None)
            record(station, frame)
        elif station in stations:
            record(station, frame.f_back)

    sys.setprofile(on_event)


if "WALK_FILE" in os.environ and any(name in sys.orig_argv for name in CONTROLLERS):
    listen(**json.loads(os.environ["WALK_STATIONS"]))
