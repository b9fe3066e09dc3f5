# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from ray.exceptions import RayTaskError

from tests.single_controller.workers import BrokenWorker, GlooWorker, OddWorker
from verl.distributed.weights.peer_lost import PeerLostError
from verl.single_controller.dispatch import Dispatch, RemoteMethod
from verl.single_controller.ray.failure import Failure, WorkerError, worker_error
from verl.single_controller.ray.worker_group import CHECK_S
from verl.single_controller.worker import WorkerInfo, read_stacks

pytestmark = pytest.mark.heavy

LIMIT_S = 60.0  # what hangs does so for an hour


@pytest.fixture
def joined(make_group):
    group = make_group(GlooWorker)
    assert group.sum_of_ranks() == [3.0, 3.0]
    return group


def failure_of(function, *args, limit_s=LIMIT_S):
    """Return the error of a call that must fail within the limit."""
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        function(*args)
    assert time.monotonic() - start < limit_s
    return caught.value


def assert_all_gone(pids):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(map(psutil.pid_exists, pids)):
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))


def test_an_exception_on_one_rank_ends_the_run_while_the_other_waits_in_a_barrier(joined):
    pids = [info.pid for info in joined.infos]

    error = failure_of(joined.raise_while_others_wait, 1)

    assert (error.rank, error.phase, error.died) == (1, "update_actor", False)
    assert "rank 1 of 2" in str(error)
    assert f"pid {pids[1]}" in str(error)
    assert "ValueError: the loss is not finite" in str(error)
    assert "in raise_while_others_wait" in str(error)  # the worker's traceback
    assert_all_gone(pids)
    with pytest.raises(RuntimeError, match="shut down"):
        joined.sum_of_ranks()


@pytest.mark.nightly
def test_a_killed_rank_is_named_although_its_partner_fails_too(joined):
    pids = [info.pid for info in joined.infos]

    error = failure_of(joined.die_while_others_wait, 0)

    assert (error.rank, error.phase, error.died) == (0, "update_actor", True)
    assert f"rank 0 of 2 (pid {pids[0]} on {os.uname().nodename}) died in phase `update_actor`" in str(error)
    assert "dmesg" in str(error)
    assert_all_gone(pids)


@pytest.mark.nightly
def test_an_exception_inside_a_stream_reaches_the_reader_after_the_items_before_it(joined):
    items = []

    error = failure_of(lambda: items.extend(joined.stream_until_failure(1, "raise")))

    assert (error.rank, error.phase) == (1, "rollout")
    assert "the engine stopped" in str(error)


@pytest.mark.nightly
def test_a_killed_rank_inside_a_stream_ends_the_run(joined):
    error = failure_of(lambda: list(joined.stream_until_failure(0, "kill")))

    assert (error.rank, error.phase, error.died) == (0, "rollout", True)


@pytest.mark.nightly
def test_an_exception_in_a_constructor_is_shown_while_the_other_rank_waits_for_it(make_group, tmp_path):
    with pytest.raises(WorkerError) as caught:
        make_group(BrokenWorker, 1, str(tmp_path / "clock"))
    assert (
        time.time() - float((tmp_path / "clock").read_text()) < LIMIT_S
    )  # starting the processes not counted

    error = caught.value
    assert (error.rank, error.phase, error.died) == (1, "start", False)
    assert "FileNotFoundError: no model at /models/none" in str(error)


@pytest.mark.nightly
def test_a_failure_of_an_older_call_ends_a_newer_one(joined):
    joined.start("raise_while_others_wait", 0)

    error = failure_of(joined.sum_of_ranks)

    assert (error.rank, error.phase) == (0, "update_actor")


@pytest.mark.nightly
def test_a_hang_ends_after_the_timeout_with_the_stacks_of_all_ranks(joined):
    joined.timeout_s = 3.0  # not for the start: that takes longer on a busy machine

    with pytest.raises(WorkerError) as caught:
        joined.hang_while_others_wait(0)

    assert "no rank made progress for 3 seconds in phase `update_actor`" in str(caught.value)
    assert "stacks of rank 0" in str(caught.value)
    assert "in hang_while_others_wait" in str(caught.value)
    assert "in barrier" in str(caught.value)


SLOW_TELLER = """
import os, signal, tempfile, time
file = tempfile.TemporaryFile()
def tell(*_):
    for name in ("barrier", "<module>"):
        time.sleep(0.4)
        os.write(file.fileno(), f'  File "a.py", line 1 in {name}\\n'.encode())
signal.signal(signal.SIGUSR1, tell)
print(file.fileno(), flush=True)
while True:
    time.sleep(0.05)
"""


def test_stacks_are_whole_however_slowly_a_worker_writes_them():
    with subprocess.Popen([sys.executable, "-c", SLOW_TELLER], stdout=subprocess.PIPE, text=True) as process:
        info = WorkerInfo(0, process.pid, "here", int(process.stdout.readline()))
        first, second = read_stacks(info), read_stacks(info)
        process.kill()

    assert first == second == '  File "a.py", line 1 in barrier\n  File "a.py", line 1 in <module>\n'


@pytest.mark.nightly
def test_a_stopped_rank_is_ended_even_without_a_timeout(joined):
    pids = [info.pid for info in joined.infos]
    call = joined.start("hang_while_others_wait", 0)
    os.kill(pids[1], signal.SIGSTOP)

    error = failure_of(call.result, limit_s=2 * CHECK_S + LIMIT_S)

    assert (error.rank, error.phase, error.hung) == (1, "update_actor", True)
    assert "the processes of ranks [1] are stopped" in str(error)
    assert "stacks of rank 0" in str(error)
    assert_all_gone(pids)


@pytest.mark.nightly
def test_an_exception_that_cannot_be_pickled_still_arrives(make_group):
    error = failure_of(make_group(OddWorker, processes=1).raise_unpicklable)

    assert "UnpicklableError: 1 and 2" in str(error)


@pytest.mark.nightly
def test_a_worker_that_exits_is_a_failure(make_group):
    error = failure_of(make_group(OddWorker, processes=1).exit)

    assert error.phase == "odd"


@pytest.mark.parametrize(("cause", "may_go_away"), [(PeerLostError("gone"), True), (OSError("gone"), False)])
def test_a_worker_that_lost_a_process_of_another_group_may_be_replaced(cause, may_go_away):
    method = RemoteMethod("load_weights", Dispatch.ALL, "sync_weights", streaming=False, axis="train")
    failure = Failure(0, method, RayTaskError("load_weights", "a traceback", cause))

    error = worker_error([failure], [], world_size=1)

    assert error.may_go_away is may_go_away and not error.died
    assert f"{type(cause).__name__}: gone" in str(error)
