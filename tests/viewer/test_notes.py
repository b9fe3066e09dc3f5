# SPDX-License-Identifier: Apache-2.0
"""Notes: kept in the run's folder, and written for the viewer's own page alone."""

import json
from urllib.parse import urlsplit

import pytest

from tests.helpers.rollouts import write_log
from tests.helpers.viewer import request, viewer
from verl.viewer import runs
from verl.viewer.runs import read_notes, write_notes

NOTE = {"note": "lr too high <script>", "tags": ["keep", "lr"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_log(folder, range(1, 3))
    return folder


@pytest.fixture(scope="module")
def address(folder):
    with viewer(folder) as found:
        yield found


def own_headers(address):
    """The headers of a request that the viewer's own page sends."""
    return {
        "Origin": f"http://{urlsplit(address).netloc}",
        "Content_Type": "application/json",
        "X_Viewer_Key": request(address, "/api/session").json["key"],
    }


def send(address, content=NOTE, run=0, **changed):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = {name: value for name, value in (own_headers(address) | changed).items() if value is not None}
    return request(address, f"/api/runs/{run}/notes", "POST", body, **headers)


def test_notes_are_kept_in_the_runs_folder_and_shown(address, folder):
    before = request(address, "/api/runs").json[0]["version"]

    assert send(address).status == 200
    (line,) = request(address, "/api/overview").json

    assert (line["note"], line["tags"]) == (NOTE["note"], NOTE["tags"])
    assert json.loads((folder / "notes.json").read_text()) == NOTE
    assert not [*folder.glob("*.tmp")]
    assert request(address, "/api/runs").json[0]["version"] != before  # other pages show it


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),  # another port of this machine, which gets the cookie
        ({"Origin": "null"}, 403),
        ({"Origin": None}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"X_Viewer_Key": "guess"}, 403),
        ({"X_Viewer_Key": None}, 403),
        ({"Content_Type": "text/plain"}, 415),  # forms send it without asking
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Cookie": ""}, 403),
        ({"Host": "evil.example"}, 400),
    ],
    ids=str,
)
def test_requests_of_other_pages_write_nothing(address, folder, changed, status):
    (folder / "notes.json").unlink(missing_ok=True)

    answer = send(address, **changed)

    assert answer.status == status
    assert not (folder / "notes.json").exists()
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[" * 20_000, 400),
        (b"\xff", 400),
        ([], 400),
        ({"note": 3}, 400),
        ({"note": "x" * 10_001}, 400),
        ({"tags": "keep"}, 400),
        ({"tags": ["x" * 41]}, 400),
        ({"tags": [str(n) for n in range(21)]}, 400),
        ({"path": "../../other"}, 400),
        (b'"' + b"x" * 1_000_000 + b'"', 413),
    ],
    ids=lambda value: str(value)[:20],
)
def test_malformed_notes_are_refused(address, folder, content, status):
    (folder / "notes.json").unlink(missing_ok=True)

    assert send(address, content).status == status
    assert not (folder / "notes.json").exists()


def test_a_run_that_does_not_exist_has_no_notes(address):
    assert send(address, run=1).status == 404


def test_a_viewer_that_only_reads_says_so(folder):
    with viewer(folder, options=["--read-only"]) as address:
        session = request(address, "/api/session").json
        assert session == {"key": None, "reason": "this viewer was started with --read-only"}
        answer = send(address, X_Viewer_Key="None")
        assert answer.status == 403 and "--read-only" in answer.body.decode()


def test_a_folder_that_cannot_be_written_is_told(address, folder):
    (folder / "notes.json").unlink(missing_ok=True)
    (folder / "notes.json").mkdir()

    answer = send(address)

    (folder / "notes.json").rmdir()
    assert answer.status == 409 and f"{folder} cannot be written: Is a directory" in answer.body.decode()


def test_a_full_disk_is_told_and_a_removed_run_is_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "write_whole", lambda *args, **kwargs: False)
    with pytest.raises(OSError, match="its disk is full"):
        write_notes(tmp_path, {"note": "text", "tags": []})
    monkeypatch.undo()
    with pytest.raises(OSError, match="does not exist any more"):
        write_notes(tmp_path / "gone", {"note": "text", "tags": []})
    assert not (tmp_path / "gone").exists()


def test_a_link_out_of_the_runs_folder_is_neither_read_nor_written(tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text('{"note": "secret"}')
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.json").symlink_to(secret)

    assert read_notes(run)["note"] == ""
    write_notes(run, {"note": "mine", "tags": []})
    assert secret.read_text() == '{"note": "secret"}' and read_notes(run)["note"] == "mine"
