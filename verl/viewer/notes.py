# SPDX-License-Identifier: Apache-2.0
"""Notes and tags of a run, in `notes.json` in its folder; the only file that the viewer writes."""

import json
from pathlib import Path
from typing import Any

from verl.utils.shared_folder import write_whole
from verl.viewer.rollout_store import is_inside

NOTES_FILE = "notes.json"
MAX_NOTE, MAX_TAGS, MAX_TAG = 10_000, 20, 40  # characters, number, characters
MAX_BYTES = 6 * MAX_NOTE + 12 * MAX_TAGS * MAX_TAG  # of their JSON, escapes included


def checked_notes(content: bytes) -> dict[str, Any]:
    """Parse and check what a page sent or a file holds: `note` and `tags`; raise `ValueError` by name."""
    try:
        found = json.loads(content)
    except RecursionError as error:
        raise ValueError("notes are nested too deeply") from error
    if not isinstance(found, dict) or set(found) - {"note", "tags"}:
        raise ValueError('notes are an object with "note" and "tags"')
    note, tags = found.get("note", ""), found.get("tags", [])
    if not isinstance(note, str) or len(note) > MAX_NOTE:
        raise ValueError(f"`note` must be a text of at most {MAX_NOTE} characters")
    are_texts = isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)
    if not are_texts or len(tags) > MAX_TAGS or any(len(tag) > MAX_TAG for tag in tags):
        raise ValueError(f"`tags` must be at most {MAX_TAGS} texts of at most {MAX_TAG} characters")
    return {"note": note, "tags": list(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))}


def read_notes(run_folder: Path) -> dict[str, Any]:
    """Return the note, the tags, and the problem with the file, if any."""
    path = run_folder / NOTES_FILE
    notes, problem = checked_notes(b"{}"), ""
    try:
        if path.is_file() and is_inside(path, run_folder):
            with path.open("rb") as file:
                notes = checked_notes(file.read(MAX_BYTES))
    except (OSError, ValueError) as error:
        problem = f"{NOTES_FILE}: {error}"
    return notes | {"problem": problem}


def write_notes(run_folder: Path, notes: dict[str, Any]) -> None:
    """Write the file, complete or not at all; raise `OSError` with a reason for people."""
    if not run_folder.is_dir():  # else it would be made
        raise OSError(f"{run_folder} does not exist any more")
    content = json.dumps(notes, indent=2).encode() + b"\n"
    try:
        is_written = write_whole(run_folder / NOTES_FILE, content, make_room=lambda size: None)
    except OSError as error:
        raise OSError(f"{run_folder} cannot be written: {error.strerror}") from error
    if not is_written:
        raise OSError(f"{run_folder} cannot be written: its disk is full")
