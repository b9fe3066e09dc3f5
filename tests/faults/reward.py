# SPDX-License-Identifier: Apache-2.0
"""A reward for random models that misbehaves in chosen steps: once, unless a deed is to be kept up.

Every response scores something, and responses differ. `deeds` are steps with what happens in them; `folder`
is where the function notes what it did and when, as files, and where it looks whether it was repaired.
"""

import os
import time
from pathlib import Path

REWARD_TYPE = "sequential"
HUGE = 1e30  # a finite score whose gradient is not


def hang():
    time.sleep(1000)


def fill_memory():
    bytearray(1 << 40)  # at once, and so before any limit of time


def fail():
    raise ValueError("no such luck")


DEEDS = {"raises": fail, "hangs": hang, "crashes": os.abort, "fills its memory": fill_memory}


def compute_score(entry, folder=None, deeds=None):
    letters = [ord(letter) for letter in entry["response"]]
    overall = 0.7 * (sum(letters) % 2) + 0.3 * (sum(letters) % 7) / 7
    for step, deed in (deeds or {}).items():
        if entry["uid"].startswith(f"step{step}-"):
            overall = misbehave(Path(folder), deed, entry, overall)
    return {"overall": overall, "accuracy": float(sum(letters) % 2)}


def misbehave(folder, deed, entry, overall):
    if deed == "huge":
        note(folder / deed, "")
        return overall * HUGE
    if deed == "always raises":
        if not (folder / "repaired").exists():
            note(folder / deed, "")
            fail()
        return overall
    who = f"{entry['uid']} {entry['response']}"
    if note(folder / deed, who):
        DEEDS[deed]()
    if (folder / deed).read_text() == who:
        note(folder / f"{deed} repeated", who)
    return overall


def note(path, text):
    """Write a file that says when; False if it was there."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True
