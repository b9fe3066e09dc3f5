# SPDX-License-Identifier: Apache-2.0
"""`scripts/ray_cluster.sh` and `scripts/slurm.sh`, on two nodes of this machine, without SLURM."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.distributed import free_port
from tests.helpers.training import QUICKSTART, ROOT, quickstart_arguments, read_metrics
from verl.logger.file import METRICS_FILE
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))

from shapes import write_questions

SCRIPT = ROOT / "scripts" / "ray_cluster.sh"
WAIT_S = 300
# In place of SLURM's: a step runs here, as the machine that it asks for; what is put back is written down.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
    [[ $1 == --nodelist=* ]] && host=${1#*=}
    shift
done
RAY_NODE_DIR=$RAY_NODE_DIR/$host exec "$@"
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) printf '%s\\n' ${3//,/ } ;;
    requeue) echo "$2" >>"$REQUEUED" ;;
esac
"""


@pytest.fixture
def folder():
    """A short one: the names of Ray's sockets may have some hundred letters only."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def environment(folder):
    """One in which Ray leads no other run of this machine to the cluster of a test."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    (folder / "home" / ".ray").mkdir(parents=True)
    (folder / "home" / ".ray" / "auth_token").write_text("5" * 64)  # as an earlier run leaves it
    own = {
        "HOME": str(folder / "home"),
        "PATH": path,
        "RAY_TMPDIR": str(folder),
        "RAY_PORT": str(free_port()),
    }
    return inherited | own | {"RAY_NODE_DIR": str(folder / "a")}


def run(environment, *arguments, **more):
    return subprocess.run(
        ["bash", SCRIPT, *arguments],
        env=environment | more, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_correct_bash(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""


def test_help_names_every_command(environment):
    text = run(environment, "--help").stdout

    assert [f"ray_cluster.sh {word}" in text for word in ("head", "worker", "wait", "stop")] == [True] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["worker"], "`worker` needs the address that `head` printed, got nothing"),
        (["wait"], "`wait` needs a number of machines, got nothing"),
        (["wait", "0"], "`wait` needs a number of machines, got 0"),
        (["wait", "2"], "no node was started here: set RAY_ADDRESS"),
    ],
)
def test_a_wrong_argument_is_told(environment, arguments, message):
    finished = run(environment, *arguments)

    assert finished.returncode == 1
    assert message in finished.stderr


def test_a_worker_whose_head_does_not_answer_gives_up_and_says_so(environment):
    finished = run(environment, "worker", f"127.0.0.1:{environment['RAY_PORT']}", RAY_WAIT_S="1")

    assert finished.returncode == 1
    assert "no head answers at" in finished.stderr


def test_stop_leaves_a_process_alone_that_got_the_number_of_the_node_that_was(environment, folder):
    with subprocess.Popen(["sleep", "60"]) as other:
        (folder / "a").mkdir()
        (folder / "a" / "process").write_text(f"{other.pid} 1\n")  # 1 tick after the machine started

        finished = run(environment, "stop")

        assert other.poll() is None
        other.kill()
    assert "no node that was started from" in finished.stdout
    assert not (folder / "a" / "process").exists()


def processes_of(folder):
    """Everything that runs in the session of a node: what it started, and what that started."""
    session = int((folder / "process").read_text().split()[0])
    return [process for process in psutil.process_iter() if session_of(process.pid) == session]


def session_of(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def alive(processes):
    return [process for process in processes if process.is_running() and process.status() != "zombie"]


@pytest.mark.slow
def test_machines_join_wait_returns_and_stop_ends_its_own_node_only(environment, folder):
    other = {"RAY_NODE_DIR": str(folder / "b")}
    try:
        head = run(environment, "head", "--num-cpus=1")
        address = head.stdout.strip()
        assert address.endswith(f":{environment['RAY_PORT']}"), head.stderr
        assert "runs here already" in run(environment, "head").stderr
        too_few = run(environment, "wait", "2", RAY_WAIT_S="1")
        assert (too_few.returncode, "1 of 2 machines joined" in too_few.stderr) == (1, True)

        worker = run(environment, "worker", address, "--num-cpus=1", **other)
        assert worker.returncode == 0, worker.stderr
        assert "2 of 2 machines have joined" in run(environment, "wait", "2").stdout
        of_head, of_worker = processes_of(folder / "a"), processes_of(folder / "b")
        assert len(of_head) > len(of_worker) >= 2

        assert f"the node of {address} is stopped" in run(environment, "stop", **other).stdout
        assert alive(of_worker) == []
        assert "1 of 1 machines have joined" in run(environment, "wait", "1").stdout

        assert (folder / "ray").exists()
        assert run(environment, "stop").returncode == 0
        assert alive(of_head) == []
        assert not (folder / "ray" / "ray_current_cluster").exists()
    finally:
        run(environment, "stop", **other)
        run(environment, "stop")


@pytest.fixture
def slurm(environment, folder):
    """The environment of a batch script on two machines."""
    commands = folder / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return environment | {
        "PATH": f"{commands}:{environment['PATH']}",
        "REQUEUED": str(folder / "requeued"),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "one,two",
        "SLURM_CPUS_ON_NODE": "1",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }


def submit(slurm, arguments, log):
    return subprocess.Popen(
        ["bash", ROOT / "scripts" / "slurm.sh", *arguments],
        env=slurm, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_job_whose_time_is_up_saves_goes_back_into_the_queue_and_goes_on(slurm, folder, tmp_path):
    write_questions(tmp_path, "train", 8, 1, with_images=False)
    write_questions(tmp_path, "val", 4, 2, with_images=False)
    save_tiny_model(tmp_path / "model", "qwen2")
    output, log = tmp_path / "run", tmp_path / "log"
    arguments = quickstart_arguments(
        tmp_path, tmp_path / "model", f"trainer.save_checkpoint_path={output}",
        "trainer.n_gpus_per_node=1", "trainer.max_steps=12",
    )  # fmt: skip

    job = submit(slurm, arguments, log)
    deadline = time.monotonic() + WAIT_S
    while not ((output / METRICS_FILE).exists() and 1 in read_metrics(output)):
        assert job.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.2)
    os.kill(job.pid, signal.SIGUSR1)  # as `--signal=B:USR1`: to the shell alone
    assert job.wait(WAIT_S) == 0, log.read_text()[-4000:]
    first = max(read_metrics(output))
    assert (folder / "requeued").read_text() == "77\n"
    assert left_of(job.pid) == []

    job = submit(slurm, arguments, log)
    assert job.wait(WAIT_S) == 0, log.read_text()[-4000:]
    assert 1 <= first < 12 and sorted(read_metrics(output)) == list(range(13))
    assert (folder / "requeued").read_text() == "77\n"
    assert left_of(job.pid) == []
    assert "2 of 2 machines have joined" in log.read_text()


def left_of(session):
    """What still runs of a job, after as long as processes need whose parent is gone."""
    deadline = time.monotonic() + 90
    while left := [process for process in psutil.process_iter() if runs_in(process, session)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.5)
    return []


def runs_in(process, session):
    """Whether a process of a session runs; one that ended and that nobody asked about does not."""
    try:
        return session_of(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
