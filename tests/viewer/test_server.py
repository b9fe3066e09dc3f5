# SPDX-License-Identifier: Apache-2.0
"""The viewer's command on real files, over HTTP."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.helpers.rollouts import rollout, with_media, write_log, write_steps
from tests.helpers.viewer import COMMAND, ROOT, request, token_of, viewer
from verl.viewer.process import viewer_process
from verl.viewer.rollout_store import RolloutStore
from verl.viewer.server import cookie_name, loopback_socket

HOSTILE = "<script>window.hacked = 1</script>\x00\ud800"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: three steps of two groups; one step with media, one hostile row and one damaged file."""
    folder = tmp_path_factory.mktemp("project")
    write_log(folder / "first", range(1, 4))
    write_steps(folder / "first", range(1, 4))
    write_steps(folder / "second", range(1, 2), groups=1, **with_media(folder / "second"))
    strange = np.array([np.nan, -np.inf, -1.0], dtype=np.float32)
    row = rollout(
        2, 0, 0, prompt=HOSTILE, response=HOSTILE, old_log_probs=strange, score=None, data_source="a/b"
    )
    RolloutStore(folder / "second").write(2, [row | {"group": "../..%2F"}])
    (folder / "second/rollouts/step_3.parquet").write_bytes(b"PAR1, and then nothing")
    return folder


@pytest.fixture(scope="module")
def address(runs):
    with viewer(runs) as found:
        yield found


def rows(address, query):
    answer = request(address, f"/api/rollouts?{query}")
    assert answer.status == 200, answer.body
    return answer.json


def test_runs_are_found_inside_the_folder_and_damaged_files_are_named(address):
    first, second = request(address, "/api/runs").json

    assert [(run["name"], run["num_rollouts"]) for run in (first, second)] == [("first", 24), ("second", 5)]
    assert first["problems"] == {}
    assert list(second["problems"]) == ["step_3.parquet"]


def test_metrics_are_columns(address):
    answer = request(address, "/api/runs/0/metrics").json

    assert answer["step"] == [1, 2, 3]
    assert answer["metrics"]["reward/overall"] == [0.01, 0.02, 0.03]
    assert request(address, "/api/runs/1/metrics").json == {"step": [], "metrics": {}}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("run=0", 24),
        ("run=0&run=1", 29),
        ("run=0&run=0", 24),
        ("run=0&score_min=0.5", 12),
        ("run=0&step_min=2&step_max=2&score_max=0.5", 4),
        ("run=0&response_length_min=9", 6),
        ("run=1&media=yes", 4),
        ("run=1&media=no", 1),
        ("run=0&run=1&data_source=a/b", 1),
        ("run=0&text=QUESTION+1+of+step+3", 4),
        ("run=1&text=window.hacked", 1),
        ("run=0&text=no+such+words", 0),
        ("", 0),
    ],
)
def test_filters_keep_the_rows_that_pass_all_of_them(address, query, expected):
    assert rows(address, query)["total"] == expected


def test_pages_follow_the_requested_order(address):
    query = "run=0&run=1&sort=response_length&order=down&limit=10&offset="
    pages = [rows(address, f"{query}{offset}")["rows"] for offset in (0, 10, 20)]

    lengths = [row["response_length"] for page in pages for row in page]
    assert [len(page) for page in pages] == [10, 10, 9]
    assert lengths == sorted(lengths, reverse=True)
    keys = [(row["run"], row["step"], row["group"], row["sample"]) for page in pages for row in page]
    assert len(set(keys)) == 29


def test_rows_without_a_score_come_last_in_both_orders(address):
    for order in ("up", "down"):
        assert rows(address, f"run=1&sort=score&order={order}")["rows"][-1]["score"] is None


def test_histograms_count_the_rows_that_pass(address):
    answer = request(address, "/api/distributions?run=0&run=1&step_max=1").json

    assert {run: sum(counts) for run, counts in answer["score"]["counts"].items()} == {"0": 8, "1": 4}
    assert answer["score"]["counts"]["0"][0] == 4 and answer["score"]["counts"]["0"][-1] == 4
    assert len(answer["score"]["edges"]) == len(answer["score"]["counts"]["0"]) + 1


def test_a_group_is_complete_with_json_numbers(address):
    group = request(address, "/api/runs/0/groups/train/2/step2-0-1").json
    assert [row["sample"] for row in group] == [0, 1, 2, 3]
    assert group[1]["response"] == "".join(group[1]["tokens"])
    assert group[1]["reward_values"] == {"overall": 0.0, "format": 1.0}

    (strange,) = request(address, "/api/runs/1/groups/train/2/..%2F..%252F").json
    assert strange["old_log_probs"] == [None, None, -1.0]
    assert strange["prompt"] == HOSTILE.replace("\ud800", "?")


def test_images_are_served_as_images(address):
    (medium, _) = request(address, "/api/runs/1/groups/train/1/step1-0-0").json[0]["media"]

    answer = request(address, f"/media/1/{medium['files'][0]}")

    assert answer.status == 200 and answer.headers["content-type"] == "image/jpeg"
    assert answer.body[:3] == b"\xff\xd8\xff"


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py",
        "/%2e%2e/server.py",
        "/..%2fserver.py",
        "/static/../../server.py",
        "/media/0/..%2f..%2fexperiment_log.jsonl",
        "/media/0/../../experiment_log.jsonl",
        "/media/0/step_1.parquet",
        f"/media/0/{'0' * 40}.jpg",
        "/media/7/x.jpg",
        "/api/runs/9/metrics",
        "/api/runs/0/groups/train/99/x",
        "/api/runs/0/groups/train/1/x",
        "//etc/passwd",
    ],
)
def test_nothing_else_is_served(address, path):
    answer = request(address, path)

    assert answer.status == 404
    assert b"SPDX" not in answer.body and b"reward/overall" not in answer.body


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("run=2", "`run`"),
        ("run=-1", "`run`"),
        ("run=0&limit=100000", "`limit`"),
        ("run=0&score_min=nan", "`score_min`"),
        ("run=0&sort=prompt", "`sort`"),
        ("run=0&media=maybe", "`media`"),
        ("run=0&colour=red", "colour"),
    ],
)
def test_an_invalid_query_is_rejected_by_name(address, query, named):
    answer = request(address, f"/api/rollouts?{query}")

    assert answer.status == 400 and named in answer.body.decode()


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "192.168.0.1:80", "localhost.evil"]
)
def test_foreign_host_names_are_rejected(address, host):
    for path in ("/", "/api/runs"):
        answer = request(address, path, Host=host)
        assert answer.status == 400 and b"first" not in answer.body


def test_local_host_names_are_accepted(address):
    port = urlsplit(address).port

    for host in (f"localhost:{port}", f"127.0.0.1:{port}", "localhost:8901"):  # the last through a tunnel
        assert request(address, "/api/runs", Host=host).status == 200


@pytest.mark.parametrize(
    "cookie", ["", "viewer_000000000000=guess", "viewer_{digest}=\xff", "viewer_{digest}="]
)
def test_requests_without_the_token_are_rejected(address, cookie):
    digest = cookie_name(token_of(address)).removeprefix("viewer_")
    for path in ("/", "/app.js", "/api/runs", "/media/1/x.jpg", "/?token=guess", "/?token="):
        answer = request(address, path, Cookie=cookie.format(digest=digest))
        assert answer.status == 403 and b"first" not in answer.body
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_the_printed_address_gives_a_cookie_that_scripts_and_other_sites_cannot_use(address):
    token = token_of(address)

    answer = request(address, f"/?token={token}", Cookie="")

    assert answer.status == 303 and answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "path=/" in cookie
    assert request(address, "/api/runs", Cookie=f"{cookie_name(token)}={token}").status == 200


def test_two_viewers_keep_their_own_cookies(address, runs):
    with viewer(runs) as other:
        both = "; ".join(f"{cookie_name(token)}={token}" for token in map(token_of, (address, other)))

        assert token_of(address) != token_of(other)
        assert [request(one, "/api/runs", Cookie=both).status for one in (address, other)] == [200, 200]
        assert request(other, f"/?token={token_of(address)}", Cookie="").status == 403


def test_the_token_is_not_in_any_process_arguments(tmp_path):
    with viewer_process(tmp_path, 0) as address:
        shown = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]

        assert request(address, "/api/runs").status == 200
        assert not [line for line in shown if token_of(address).encode() in line]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_requests_are_allowed(address, method):
    for path in ("/", "/api/runs", "/api/rollouts", "/media/0/x.jpg"):
        assert request(address, path, method).status == 405


def test_every_response_blocks_foreign_scripts_and_sites(address):
    for path, status in [
        ("/", 200),
        ("/app.js", 200),
        ("/api/runs", 200),
        ("/nothing", 404),
        ("/api/rollouts?x=1", 400),
    ]:
        answer = request(address, path, Origin="http://evil.example")
        policy = answer.headers["content-security-policy"]
        assert answer.status == status
        assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self';" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_it_listens_on_the_loopback_address_alone(address):
    port = urlsplit(address).port
    with open("/proc/net/tcp") as file:
        listening = [line.split()[1] for line in file if line.split()[3] == "0A"]

    assert [one for one in listening if one.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_new_data_of_a_run_is_shown(tmp_path):
    write_steps(tmp_path, range(1, 3))
    with viewer(tmp_path) as address:
        (before,) = request(address, "/api/runs").json
        write_steps(tmp_path, range(3, 4))
        write_steps(tmp_path, range(1, 2), groups=1)  # a resumed run repeats it
        write_log(tmp_path, range(1, 2))
        (after,) = request(address, "/api/runs").json

        assert (before["num_rollouts"], after["num_rollouts"]) == (16, 4 + 8 + 8)
        assert before["version"] != after["version"]
        assert request(address, "/api/runs/0/metrics").json["step"] == [1]


def test_a_folder_without_runs_is_an_error(tmp_path):
    ended = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True)

    assert ended.returncode == 1
    assert ended.stderr.startswith(f"no run in {tmp_path}")


def test_a_misspelled_folder_is_answered_with_its_neighbor(tmp_path):
    write_steps(tmp_path / "checkpoints", range(1, 2))

    ended = subprocess.run(
        [*COMMAND, "--text", str(tmp_path / "checkpointts")], capture_output=True, text=True
    )

    assert ended.returncode == 1
    said = f"no folder {tmp_path}/checkpointts; did you mean {tmp_path}/checkpoints?\n"
    assert ended.stderr == said


def test_a_busy_port_is_named_with_the_remedy(tmp_path):
    write_steps(tmp_path, range(1, 2))
    with loopback_socket(0) as busy:
        port = busy.getsockname()[1]
        ended = subprocess.run([*COMMAND, f"--port={port}", str(tmp_path)], capture_output=True, text=True)

    assert ended.returncode == 1
    assert f"port {port} is not available (Address already in use)" in ended.stderr
    assert ended.stderr.endswith("`--port=0` picks a free one\n")


@pytest.mark.nightly
def test_the_viewer_of_a_run_ends_with_the_block(tmp_path):
    with viewer_process(tmp_path, 0) as address:
        assert request(address, "/api/runs").json[0]["num_rollouts"] == 0

    with pytest.raises(ConnectionRefusedError):
        request(address, "/api/runs")


def test_the_viewer_of_a_run_ends_when_the_run_is_killed(tmp_path):
    code = (
        "import time; from pathlib import Path\n"
        "from verl.viewer.process import viewer_process\n"
        f"with viewer_process(Path({str(tmp_path)!r}), 0) as address:\n"
        "    print(address, flush=True)\n    time.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    address = run.stdout.readline().strip()
    assert request(address, "/api/runs").status == 200
    os.kill(run.pid, signal.SIGKILL)
    run.wait()

    def is_up():
        try:
            request(address, "/api/runs")
        except ConnectionError:
            return False
        return True

    deadline = time.monotonic() + 50
    while is_up():
        assert time.monotonic() < deadline, "it must end with the run"
        time.sleep(0.1)


def test_a_port_that_is_taken_is_named_by_its_option(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ValueError, match=rf"`trainer.viewer_port` \({port}\) is not available"),
            viewer_process(tmp_path, port),
        ):
            pass
