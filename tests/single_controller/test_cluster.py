# SPDX-License-Identifier: Apache-2.0
"""Separate clusters, each in its own process, next to the Ray session of the tests."""

import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from verl.single_controller.ray.cluster import started_cluster
from verl.single_controller.ray.processes import PORTS, find_free_port
from verl.single_controller.ray.resource_pool import ResourcePool

pytestmark = pytest.mark.heavy

TWO_NODES = """
import logging, os
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
from ray.cluster_utils import Cluster
from tests.single_controller.workers import GlooWorker
from verl.single_controller.ray.cluster import connect
from verl.single_controller.ray.resource_pool import ResourcePool
from verl.single_controller.ray.worker_group import RayWorkerGroup

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
os.environ["RAY_ADDRESS"] = cluster.address
assert not connect()  # joins, starts none
try:
    ResourcePool(nnodes=2, processes_per_node=1, device="cpu").acquire()
except RuntimeError as error:
    print("ERROR", error)
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
pools = [ResourcePool(nodes, each, "cpu") for nodes, each in ((1, 1), (2, 1), (1, 2))]
print("FREE", [pool.num_free() for pool in pools])
with RayWorkerGroup(ResourcePool(nnodes=2, processes_per_node=1, device="cpu"), GlooWorker) as group:
    print("SUMS", group.sum_of_ranks())
    print("NODES", len({slot.node_id for slot in group.pool.slots()}))
    try:
        RayWorkerGroup(ResourcePool(nnodes=2, processes_per_node=1, device="cpu", timeout_s=1), GlooWorker)
    except RuntimeError as error:
        print("BUSY", error)
ray.shutdown()
cluster.shutdown()
"""

INTERRUPTED = """
from tests.single_controller.workers import OddWorker
from verl.single_controller.ray.cluster import connect
from verl.single_controller.ray.resource_pool import ResourcePool
from verl.single_controller.ray.worker_group import RayWorkerGroup

assert connect(num_cpus=2, num_gpus=2)
with RayWorkerGroup(ResourcePool(1, 2, "cuda"), OddWorker) as group:
    group.shout("from a worker")
    print("DEVICES", sorted(group.variable("CUDA_VISIBLE_DEVICES")), group.variable("LOCAL_RANK"))
    print("ALLOCATOR", *group.variable("PYTORCH_CUDA_ALLOC_CONF"))
    print("PIDS", *[info.pid for info in group.infos], flush=True)
    group.sleep(600)
"""


def run_driver(code):
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="module")
def two_nodes():
    """Output of a run on two raylets of this machine, one process each."""
    driver = run_driver(TWO_NODES)
    output, _ = driver.communicate(timeout=240)
    assert driver.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def interrupted():
    """Output of a run of two processes that is interrupted during a call."""
    driver = run_driver(INTERRUPTED)
    lines = []
    for awaited in ("PIDS", "from a worker"):  # Ray brings the workers' lines when it can
        while not any(awaited in line for line in lines):
            assert driver.poll() is None, "".join(lines)
            lines.append(driver.stdout.readline())
    time.sleep(1)  # for the call to begin
    driver.send_signal(signal.SIGINT)
    rest, _ = driver.communicate(timeout=120)
    assert driver.returncode != 0
    return "".join(lines) + rest


@pytest.mark.nightly
def test_two_raylets_form_one_group_of_two_nodes(two_nodes):
    assert "SUMS [3.0, 3.0]" in two_nodes
    assert "NODES 2" in two_nodes


@pytest.mark.nightly
def test_free_devices_of_two_nodes_do_not_count_for_one_node_of_a_pool(two_nodes):
    assert "FREE [2, 1, 0]" in two_nodes  # of 1 x 1, 2 x 1 and 1 x 2 processes


@pytest.mark.nightly
def test_too_few_nodes_is_an_error_with_found_needed_and_remedy(two_nodes):
    assert (
        "ERROR `trainer.nnodes` (2) x `trainer.n_gpus_per_node` (1) on cpu needs 2 nodes with 1 CPUs each,"
        " found 1 nodes" in two_nodes
    )
    assert "join nodes with `ray start --address=<head node>:6379`" in two_nodes


@pytest.mark.nightly
def test_a_busy_cluster_is_an_error_after_the_timeout(two_nodes):
    assert "only 0 CPUs are free in all of it after 1 seconds: end other runs on it" in two_nodes


@pytest.mark.nightly
def test_ctrl_c_during_a_call_ends_the_workers(interrupted):
    pids = [int(pid) for pid in re.search("^PIDS (.*)$", interrupted, re.MULTILINE)[1].split()]

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(map(psutil.pid_exists, pids)):
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))
    assert "KeyboardInterrupt" in interrupted


@pytest.mark.nightly
def test_worker_output_reaches_the_console_with_its_rank(interrupted):
    assert re.search(r"\(rank [01] pid=\d+\).*from a worker", interrupted)
    assert not [line for line in interrupted.splitlines() if "WARNING" in line or "usage stats" in line]


@pytest.mark.nightly
def test_each_process_of_a_cuda_pool_sees_one_gpu_as_its_device_zero(interrupted):
    assert "DEVICES ['0', '1'] ['0', '0']" in interrupted  # Ray hands out numbers; no GPU is touched
    assert "ALLOCATOR expandable_segments:True expandable_segments:True" in interrupted


def test_too_few_cpus_is_an_error_with_found_needed_and_remedy(ray_session):
    with pytest.raises(RuntimeError) as caught:
        ResourcePool(nnodes=1, processes_per_node=64, device="cpu").acquire()

    message = str(caught.value)
    assert "`trainer.n_gpus_per_node` (64)" in message
    assert "64 CPUs" in message
    assert "12 CPUs" in message
    assert "lower `trainer.n_gpus_per_node`" in message


def test_too_few_gpus_is_an_error_with_found_and_needed(ray_session):
    with pytest.raises(RuntimeError, match="needs 1 nodes with 99 GPUs and 99 CPUs each, found 1 nodes"):
        ResourcePool(nnodes=1, processes_per_node=99, device="cuda").acquire()


def test_the_rendezvous_port_is_free_and_not_ephemeral():
    port = find_free_port()

    assert port in PORTS
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


def test_the_cluster_of_ray_start_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert started_cluster() is None

    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379\n")

    assert started_cluster() == "10.0.0.1:6379"
