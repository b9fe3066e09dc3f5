# SPDX-License-Identifier: Apache-2.0
"""Processes that read rows may die: nothing is lost, and the run is not interrupted."""

import os
import signal
import time

import psutil
import pytest

from tests.data.test_loader import answers, make_train, wait_until
from verl.models.tiny import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


def readers():
    return {child for child in psutil.Process().children() if child.name() == "pt_data_worker"}


def kill(readers):
    for reader in readers:
        os.kill(reader.pid, signal.SIGKILL)
    while any(reader.status() != psutil.STATUS_ZOMBIE for reader in readers):  # the loader is to bury them
        time.sleep(0.01)


def test_readers_that_are_killed_are_replaced_and_no_row_is_lost_or_read_twice(model, tmp_path):
    expected, others = answers(make_train(model, tmp_path, num_workers=0)), readers()
    batches = iter(make_train(model, tmp_path, num_workers=2))

    found = answers([next(batches)])
    wait_until(lambda: len(readers() - others) == 2)  # each takes its name when it begins
    kill(readers() - others)
    time.sleep(0.1)  # torch's own handler of SIGCHLD would raise here
    found += answers(batches)

    assert found == expected


@pytest.mark.slow  # torch looks after its processes every five seconds
def test_readers_that_die_again_and_again_end_the_run_with_the_option(model, tmp_path, monkeypatch):
    loader = make_train(model, tmp_path, num_workers=1)
    monkeypatch.setattr(type(loader.dataset), "__getitem__", lambda dataset, row: os._exit(9))

    with pytest.raises(
        RuntimeError, match=r"died twice before the row at position 0 .*`data.num_workers` \(1\)"
    ):
        next(iter(loader))
