# SPDX-License-Identifier: Apache-2.0
"""CI runs the nightly tests of what the last commits changed, and names those that its time did not allow."""

import os
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT
from tests.helpers.nightly import changed_files, is_touched


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """Three commits, each of which writes a file of its number."""
    git(tmp_path, "init")
    for name in ("first", "second", "third"):
        (tmp_path / name).write_text(name)
        git(tmp_path, "add", name)
        git(tmp_path, "commit", "-m", name)
    return tmp_path


@pytest.mark.parametrize(
    ("commits", "files"), [(1, ["third"]), (2, ["second", "third"]), (9, ["second", "third"])]
)
def test_the_changed_files_are_those_of_the_last_commits_that_a_clone_has(repository, commits, files):
    assert changed_files(commits, repository) == files


def test_a_test_is_touched_by_its_file_and_by_what_is_below_its_folders():
    paths = ["tests/models/test_vila.py", "verl/models", "Dockerfile"]

    assert is_touched(paths, ["README.md", "verl/models/families/vila.py"])
    assert is_touched(paths, ["tests/models/test_vila.py"])
    assert is_touched(paths, ["Dockerfile"])
    assert not is_touched(paths, ["verl/models_of_others.py", "tests/models/test_gemma.py"])


def test_without_time_each_nightly_test_is_left_out_by_name():
    command = [sys.executable, "-m", "pytest", "-p", "tests.helpers.nightly", "-p", "no:cacheprovider"]
    command += ["-m", "nightly", "--minutes=0", "tests/packaging"]

    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)

    assert done.returncode == 0, done.stdout
    assert "tests/packaging/test_wheel.py::test_the_wheel_ships_the_examples_and_scripts" in done.stdout
    assert "passed" not in done.stdout
