# SPDX-License-Identifier: Apache-2.0
"""Processes that read rows may die: nothing is lost, and the run is not interrupted."""

import itertools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

from tests.data.test_loader import answers, make_train, readers, wait_until
from verl.data.rl_dataset import RLHFDataset
from verl.models.tiny import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


def kill(readers):
    for reader in readers:
        os.kill(reader.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, readers)))


def is_running(process):
    with suppress(psutil.NoSuchProcess):  # their server buries them
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_readers_that_are_killed_are_replaced_and_no_row_is_lost_or_read_twice(model, tmp_path):
    expected, others = answers(make_train(model, tmp_path, num_workers=0)), readers()
    batches = iter(make_train(model, tmp_path, num_workers=2))

    found = answers([next(batches)])
    wait_until(lambda: len(readers() - others) == 2)  # each takes its name when it begins
    kill(readers() - others)
    found += answers(batches)

    assert found == expected


class DeadlyRows(RLHFDataset):
    """Rows that end the process that reads them."""

    def __getitem__(self, index):
        os._exit(9)


def test_readers_that_die_again_and_again_end_the_run_with_the_option(model, tmp_path):
    loader = make_train(model, tmp_path, num_workers=1, shuffle=False)
    loader.dataset.__class__ = DeadlyRows

    with pytest.raises(RuntimeError, match=r"read row 0 exited with status 9, and so .*`data.num_workers`"):
        next(iter(loader))


def test_readers_start_at_any_time_in_a_process_with_threads_and_it_is_never_forked(
    model, tmp_path, monkeypatch
):
    end = threading.Event()
    threading.Thread(target=end.wait, daemon=True).start()
    loader = make_train(model, tmp_path, num_workers=2)
    monkeypatch.setattr("os.fork", lambda: pytest.fail("a process with threads was forked"))
    first, before = answers([next(iter(loader))]), readers()

    with ThreadPoolExecutor(1) as thread:  # readers outlive the thread that opened them
        batches = iter(loader)
        second = thread.submit(lambda: answers([next(batches)])).result()
    rest = answers(batches)
    end.set()

    assert before
    assert sorted(itertools.chain(*first, *second, *rest)) == sorted(
        set(itertools.chain(*first, *second, *rest))
    )


def test_a_data_set_that_cannot_be_pickled_is_an_error_with_the_remedy(model, tmp_path):
    loader = make_train(model, tmp_path, num_workers=1)
    loader.dataset.connection = threading.Lock()

    with pytest.raises(ValueError, match=r"RLHFDataset cannot: cannot pickle .*; set `data.num_workers=0`"):
        next(iter(loader))
