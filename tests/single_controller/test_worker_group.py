# SPDX-License-Identifier: Apache-2.0
import gc
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray
import torch

from tests.helpers.warm_runs import CPUS, WarmProcesses
from tests.single_controller.workers import ClosingWorker, EchoWorker, fail, import_shelve
from verl.protocol import DataProto, objects
from verl.single_controller.ray.failure import WorkerError
from verl.single_controller.ray.processes import WorkerProcesses
from verl.single_controller.ray.resource_pool import ResourcePool
from verl.single_controller.ray.worker_group import RayWorkerGroup

pytestmark = pytest.mark.heavy


def numbers(count):
    return DataProto.from_dict(
        {"numbers": torch.arange(count)}, {"uid": objects(range(count))}, {"temperature": 1.0}
    )


def test_a_call_to_all_returns_one_result_for_each_rank_in_order(group):
    assert group.say() == [(0, "hello", None), (1, "hello", None)]
    assert group.say({"a": [1]}) == [(0, "hello", {"a": [1]}), (1, "hello", {"a": [1]})]


@pytest.fixture(scope="module")
def four(ray_session):
    """Four workers, of which two and two are model-parallel."""
    with RayWorkerGroup(ResourcePool(1, 4, "cpu"), EchoWorker, "hello", 2) as group:
        yield group


@pytest.mark.nightly
def test_the_parts_of_an_axis_are_called_each_by_itself(four):
    first, second = four.parts("rollout")

    assert first.say() == [(0, "hello", None), (1, "hello", None)]
    assert second.say("you") == [(2, "hello", "you"), (3, "hello", "you")]
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda part: [part.say() for _ in range(20)][-1], (first, second)))
    assert both[0] + both[1] == four.say()


@pytest.mark.nightly
def test_model_parallel_ranks_get_the_same_part_and_count_once(four):
    result = four.add_rank_by_group(numbers(4))
    items = list(four.generate(numbers(4)))

    # Ranks 0 and 1 share rows 0, 1 and rank 0 answers for both; ranks 2 and 3 share rows 2, 3.
    assert result.batch["sums"].tolist() == [0, 1, 4, 5]
    assert sorted(items) == [(0, 0), (0, 1), (2, 2), (2, 3)]


@pytest.mark.nightly
def test_a_death_in_a_part_names_its_rank_and_ends_the_whole(make_group):
    group = make_group(EchoWorker)
    _, second = group.parts("rollout")
    os.kill(group.infos[1].pid, signal.SIGKILL)

    with pytest.raises(WorkerError, match=r"rank 1 of 2 .* died in phase `say`"):
        second.say()
    with pytest.raises(WorkerError, match="died"):
        group.say()


def names_of(group):
    return [Path(f"/proc/{info.pid}/comm").read_text().strip() for info in group.infos]


def test_processes_are_named_after_their_phase(group, tmp_path):
    gate = tmp_path / "gate"
    items = group.generate(numbers(8), gate=str(gate))
    assert {next(items), next(items)} == {(0, 0), (1, 4)}  # both ranks wait at the gate

    during = names_of(group)
    gate.touch()
    list(items)
    group.nothing()

    assert during == ["generate", "generate"]
    assert "generate" not in names_of(group)


def test_ranks_get_their_environment_before_they_start(group):
    first, second = group.environment()

    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    assert first["WORLD_SIZE"] == second["WORLD_SIZE"] == "2"
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "127.0.0.1"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["GLOO_SOCKET_IFNAME"] == "lo"
    assert first["OMP_NUM_THREADS"] == str(max(1, min(12, len(os.sched_getaffinity(0))) // 2))
    assert first["COLOUR"] == "blue"


def test_methods_run_on_the_main_thread_of_their_process(group):
    assert group.runs_on_main_thread() == [True, True]


def test_a_batch_is_split_along_the_axis_and_the_results_are_joined_in_order(group):
    result = group.add_rank(numbers(6))

    assert result.batch["sums"].tolist() == [0, 1, 2, 4, 5, 6]
    assert group.add_rank(numbers(6), amount=10).batch["sums"].tolist() == [0, 1, 2, 13, 14, 15]
    assert group.length(numbers(6)) == [3, 3]


def test_a_batch_is_returned_unchanged(group):
    batch = numbers(4)

    back = group.echo(batch)

    assert back.batch["numbers"].tolist() == [0, 1, 2, 3]
    assert back.non_tensor_batch["uid"].tolist() == [0, 1, 2, 3]
    assert back.meta_info == {"temperature": 1.0}
    assert group.echo_numbers(batch).keys() == ["numbers"]


def test_an_in_place_change_affects_only_the_workers_copy(group):
    batch = numbers(4)

    assert group.change_input(batch).batch["numbers"].tolist() == [1, 2, 3, 4]
    assert batch.batch["numbers"].tolist() == [0, 1, 2, 3]


def test_a_batch_that_does_not_divide_is_rejected_before_anything_runs(group):
    with pytest.raises(ValueError, match="5 rows cannot be split evenly over 2 data-parallel ranks"):
        group.add_rank(numbers(5))
    assert group.say()[0] == (0, "hello", None)


def test_an_axis_that_no_worker_has_set_is_named(group):
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] have not called `set_axis\('nowhere'"):
        group.on_unknown_axis(numbers(2))


def test_an_unregistered_method_is_an_attribute_error(group):
    with pytest.raises(AttributeError, match="'set_axis' is not a registered method"):
        group.set_axis("train", 0, 1, True)


def test_a_stream_yields_all_items_even_of_an_uneven_batch(group):
    items = list(group.generate(numbers(5)))

    assert sorted(uid for _, uid in items) == [0, 1, 2, 3, 4]
    assert {uid: rank for rank, uid in items} == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}


def test_an_empty_part_streams_nothing(group):
    assert list(group.generate(numbers(1))) == [(1, 0)]


def test_items_of_a_stream_arrive_while_the_workers_are_still_producing(group, tmp_path):
    gate = tmp_path / "gate"
    stream = group.generate(numbers(8), gate=str(gate))

    assert next(stream) in [(0, 0), (1, 4)]  # the first item of a rank, which waits before its second
    gate.touch()
    assert len(list(stream)) == 7


def test_a_stream_longer_than_its_window_is_complete(group):
    assert sorted(group.numbers(1000)) == sorted([*range(1000), *range(1000)])


def test_a_stream_left_early_does_not_block_the_next_call(group):
    stream = group.numbers(1000)
    assert next(stream) == 0
    stream.close()

    assert group.say()[1] == (1, "hello", None)


def test_a_call_may_be_made_while_a_stream_is_open(group):
    stream = group.numbers(1000)
    next(stream)

    assert group.say()[0] == (0, "hello", None)
    assert len(list(stream)) == 1999


def test_concurrent_calls_return_all_results(group):
    first, second = group.start("say", 1), group.start("say", 2)

    assert second.result() == [(0, "hello", 2), (1, "hello", 2)]
    assert first.result() == [(0, "hello", 1), (1, "hello", 1)]


def test_a_call_costs_milliseconds(group):
    def seconds():
        start = time.perf_counter()
        group.nothing()
        return time.perf_counter() - start

    # One of many, since others may have the processors: the fewer calls are undisturbed, the more are made.
    end = time.monotonic() + 30
    while seconds() >= 0.007:
        assert time.monotonic() < end, "no call took less than 7 milliseconds"


def test_no_object_references_stay_behind(group):
    def referenced():
        gc.collect()
        return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())

    group.echo(numbers(4))
    before = referenced()
    for _ in range(20):
        group.echo(numbers(4))
        list(group.numbers(20))

    assert referenced() <= before + 2


@pytest.mark.nightly
def test_shutdown_closes_workers_and_leaves_no_process_and_no_reserved_resource(ray_session, tmp_path):
    free = ray.available_resources()["CPU"]
    group = RayWorkerGroup(ResourcePool(1, 2, "cpu"), ClosingWorker, tmp_path)
    pids = [info.pid for info in group.infos]
    assert all(psutil.pid_exists(pid) for pid in pids)

    group.shutdown()

    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(map(psutil.pid_exists, pids)):
        time.sleep(0.05)
    while time.monotonic() < deadline and ray.available_resources().get("CPU", 0) < free:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))
    assert ray.available_resources()["CPU"] >= free  # those of a group before this one may return, too
    with pytest.raises(RuntimeError, match="shut down"):
        group.nothing()


@pytest.mark.nightly
def test_workers_are_not_closed_by_a_failure(ray_session, tmp_path):
    group = RayWorkerGroup(ResourcePool(1, 1, "cpu"), ClosingWorker, tmp_path)
    group.nothing()

    group.kill()

    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_processes_that_start_ahead_become_the_workers_with_their_own_environment(ray_session):
    pool = ResourcePool(1, 2, "cpu")
    processes = WorkerProcesses(pool, {"COLOUR": "green"}, import_shelve)

    with RayWorkerGroup(pool, EchoWorker, "ahead", processes=processes) as group:
        assert group.say() == [(0, "ahead", None), (1, "ahead", None)]
        assert [environment["COLOUR"] for environment in group.environment()] == ["green", "green"]
        assert group.has_imported("shelve") == [True, True]


@pytest.mark.nightly
def test_a_warm_up_that_fails_leaves_the_error_to_the_worker(ray_session):
    pool = ResourcePool(1, 1, "cpu")

    with RayWorkerGroup(pool, EchoWorker, "ahead", processes=WorkerProcesses(pool, {}, fail)) as group:
        assert group.say() == [(0, "ahead", None)]


def test_processes_that_get_no_worker_free_their_resources(group, four):
    pool = ResourcePool(1, 2, "cpu")
    free = CPUS - group.world_size - four.world_size - len(WarmProcesses.idle)

    await_free_cpus(free)
    processes = WorkerProcesses(pool, {})
    await_free_cpus(free - 2)
    processes.kill()

    await_free_cpus(free)
    assert pool.group is None


def await_free_cpus(expected):
    deadline = time.monotonic() + 120
    while (free := ray.available_resources().get("CPU", 0)) != expected:
        assert time.monotonic() < deadline, f"{free:g} CPUs are free, not {expected}"
        time.sleep(0.1)
