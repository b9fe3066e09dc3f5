# SPDX-License-Identifier: Apache-2.0
"""Nothing gets out of the sandbox, nothing hangs it: each attempt against the real thing."""

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.sandbox import attempts
from tests.sandbox.attempts import ATTEMPTS, SEVERAL_PROCESSES, TIME
from tests.sandbox.outside import failure_of, outside, works
from verl.sandbox.outcome import Isolation, Limits
from verl.sandbox.runner import run

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]
works = cache(works)
HARMLESS = (  # to the machine that runs the tests
    "home folder",
    "file by its path",
    "file by symbolic link",
    "other processes' environment",
    "root of another process",
    "memory of the outside",
    "files of another process",
    "loopback",
    "abstract socket",
    "datagram",
    "listening",
    "signal by way of a file",
    "signal by a process file",
    "priority of the outside",
    "executing a shell",
    "executing by subprocess",
    "executing by system",
    "executing by libc",
    "executing by posix_spawn",
    "memory by allocation",
    "memory by mapping",
    "calls of 32 bits",
)
OFTEN = (  # one each of files, network, processes, privileges, resources and time; the others are nightly
    "home folder",
    "loopback",
    "executing by subprocess",
    "new namespaces",
    "memory by allocation",
    "endless loop",
)
SYSTEM_PYTHON = "/usr/bin/python3"  # the user `nobody` may run it, unlike an interpreter in a home folder


def nightly_but(often, names):
    return [name if name in often else pytest.param(name, marks=pytest.mark.nightly) for name in names]


@pytest.fixture(scope="module")
def target():
    with outside() as target:
        yield target


def attempt(source, target, isolation, processes=1):
    if not works(isolation):
        pytest.skip(f"this machine has no {isolation}")
    failure = failure_of(source, target, isolation, processes)
    assert failure is None, failure


@pytest.mark.parametrize("name", nightly_but(OFTEN, ATTEMPTS))
def test_an_attempt_against_namespaces_fails_in_time(name, target):
    attempt(ATTEMPTS[name], target, Isolation.NAMESPACES)


@pytest.mark.parametrize("name", nightly_but(["fork bomb"], SEVERAL_PROCESSES))
def test_an_attempt_by_several_processes_fails_in_time(name, target):
    attempt(SEVERAL_PROCESSES[name], target, Isolation.NAMESPACES, processes=8)


@pytest.mark.parametrize("name", nightly_but(OFTEN, [name for name in ATTEMPTS if name not in TIME]))
def test_an_attempt_against_landlock_fails_in_time(name, target):
    attempt(ATTEMPTS[name], target, Isolation.LANDLOCK)


@pytest.mark.parametrize("name", nightly_but(OFTEN, HARMLESS))
def test_the_same_attempt_succeeds_without_isolation(name, target):
    source = attempts.program(ATTEMPTS[name], target)

    outcome = run(source, stdin="given", limits=Limits(memory_mb=4096), isolation=Isolation.NONE)

    assert "ESCAPED" in outcome.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("isolation", [Isolation.NAMESPACES, Isolation.LANDLOCK])
def test_every_attempt_fails_where_an_ordinary_user_runs_the_sandbox(isolation):
    if os.geteuid() != 0 or not shutil.which("setpriv") or not Path(SYSTEM_PYTHON).exists():
        pytest.skip("only the superuser can become another user")
    names = json.dumps([name for name in ATTEMPTS if name not in TIME])
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    command = [*nobody, SYSTEM_PYTHON, "-B", "-m", "tests.sandbox.outside", isolation, names]

    done = subprocess.run(command, cwd=ROOT, env={"HOME": "/nonexistent"}, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}
