# SPDX-License-Identifier: Apache-2.0
"""Clusters that cannot be joined are reported within seconds; each attempt runs in its own process."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.distributed import free_port
from verl.single_controller.ray.cluster import connect, why_unreachable
from verl.single_controller.ray.resource_pool import ClusterError

RAY = str(Path(sys.executable).with_name("ray"))
JOIN = """
from verl.single_controller.ray.cluster import connect
from verl.single_controller.ray.resource_pool import ClusterError
try:
    print("NEW", connect())
except ClusterError as error:
    print("ERROR", error)
"""


@pytest.fixture
def listener():
    """A port with a silent listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def no_session(monkeypatch):
    """Hide the Ray session of the tests."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A head that requires a token: environments with and without it."""
    folder = tmp_path_factory.mktemp("head")
    sockets = tempfile.mkdtemp(prefix="ray")  # a socket's path has 107 characters at most
    for home, token in (("own", "5" * 64), ("stranger", "6" * 64)):
        (folder / home / ".ray").mkdir(parents=True)
        (folder / home / ".ray" / "auth_token").write_text(token)
    (folder / "without").mkdir()
    port = free_port()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = inherited | {
        "HOME": str(folder / "own"),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    head = subprocess.Popen(
        [RAY, "start", "--head", "--block", f"--port={port}", "--num-cpus=1", "--include-dashboard=false",
         "--object-store-memory=80000000", f"--temp-dir={sockets}"],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    address = f"127.0.0.1:{port}"
    while "NEW False" not in join(environment | {"RAY_ADDRESS": address}):
        assert head.poll() is None
        time.sleep(0.2)
    yield folder, environment | {"RAY_ADDRESS": address}
    for process in [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its parent
            process.kill()
    head.wait()
    shutil.rmtree(sockets, ignore_errors=True)


def join(environment):
    command = [sys.executable, "-c", JOIN]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240).stdout


def test_a_cluster_that_is_down_is_an_error_with_address_and_remedy(monkeypatch, no_session):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    start = time.monotonic()

    with pytest.raises(ClusterError) as caught:
        connect()

    assert time.monotonic() - start < 20  # to join takes ANSWER_S, 25 s, at most
    message = str(caught.value)
    assert "cannot join the Ray cluster at 127.0.0.1:9 (from `RAY_ADDRESS`; unset it" in message
    assert "nothing answers there ([Errno 111] Connection refused)" in message


def test_a_stale_address_file_of_ray_start_is_named(monkeypatch, tmp_path, no_session):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:9\n")

    with pytest.raises(ClusterError, match="ray_current_cluster, written by `ray start`; `ray stop` removes"):
        connect()


def test_an_unknown_machine_is_an_error():
    assert "nothing answers there" in why_unreachable("no-such-machine.invalid:6379")


def test_another_program_on_the_port_is_an_error_after_the_time_limit(monkeypatch, listener):
    monkeypatch.setattr("verl.single_controller.ray.cluster.ANSWER_S", 2.0)
    start = time.monotonic()

    assert "did not let this machine join within 2 s" in why_unreachable(listener)

    assert time.monotonic() - start < 60
    assert not [child for child in psutil.Process().children() if listener in " ".join(child.cmdline())]


@pytest.mark.nightly
def test_the_right_token_joins(cluster):
    assert "NEW False" in join(cluster[1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "home, mode, remedy",
    [
        ("own", None, "which this process does not send: `export RAY_AUTH_MODE=token`"),
        ("without", None, "with a copy of the token in {folder}/without/.ray/auth_token"),
        ("without", "token", "there is none in {folder}/without/.ray/auth_token: copy it from the machine"),
        ("stranger", "token", "and this machine has a different one: copy it from the machine"),
    ],
)
def test_a_cluster_with_a_token_is_an_error_with_a_remedy(cluster, home, mode, remedy):
    folder, environment = cluster
    environment = environment | {"HOME": str(folder / home), "RAY_AUTH_MODE": mode or "disabled"}
    if mode is None:
        del environment["RAY_AUTH_MODE"]
    start = time.monotonic()

    message = join(environment)

    assert "it requires a token" in message
    assert remedy.format(folder=folder) in message
    assert time.monotonic() - start < 60  # most of it to import Ray; an attempt is given up after 25 s
