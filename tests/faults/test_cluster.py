# SPDX-License-Identifier: Apache-2.0
"""Machines of a Ray cluster that are lost: a node, or the head. Here each is a set of processes."""

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

from tests.faults.conftest import SFT_SAVED
from tests.faults.runs import SFT, Run, assert_same, descendants, steps_again
from tests.helpers.distributed import free_port

pytestmark = pytest.mark.faults
RAY = Path(sys.executable).with_name("ray")
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


class Cluster:
    """A head and other nodes of one CPU each, started by Ray's command and killed as a machine ends."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        self.nodes = []

    @property
    def environment(self):
        """Of a run on this cluster."""
        return ENVIRONMENT | {"RAY_ADDRESS": f"127.0.0.1:{self.port}", "RAY_TMPDIR": str(self.folder)}

    def start(self, is_head):
        """Start a node and wait until it belongs to the cluster."""
        where = [f"--port={self.port}", f"--temp-dir={self.folder}", "--include-dashboard=false"]
        kind = ["--head", *where] if is_head else [f"--address=127.0.0.1:{self.port}"]
        node = subprocess.Popen(
            [RAY, "start", "--block", "--num-cpus=1", "--node-ip-address=127.0.0.1", *kind],
            env=os.environ | self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.nodes.append(node)
        for line in node.stdout:
            if "--block" in line:
                return node
        raise AssertionError(f"the node ended with {node.wait()}")

    def samples(self, node):
        """Process id of the rollout engine on a node, if there is one that is sampling right now."""
        for process in descendants(node.pid):
            if Path(f"/proc/{process.pid}/comm").read_text().rstrip("\n") == "gen":
                return process.pid
        return None

    def kill(self, node):
        """End a node with everything that runs on it."""
        everything = [psutil.Process(node.pid), *descendants(node.pid)]
        for process in everything:
            with_its_end(process.kill)
        node.wait()
        node.stdout.close()
        self.nodes.remove(node)


def with_its_end(act):
    """Act on a process that may have ended."""
    try:
        act()
    except psutil.NoSuchProcess:
        return


@pytest.fixture
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # sockets in it have short names only
    cluster = Cluster(folder)
    cluster.start(is_head=True)
    yield cluster
    for node in list(cluster.nodes):
        cluster.kill(node)
    shutil.rmtree(folder)


def two_nodes(*options):
    return ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.max_restarts=3", *options]


def test_a_run_continues_with_the_remaining_nodes(cluster, tmp_path, text_arguments, undisturbed, record):
    node = cluster.start(is_head=False)
    options = two_nodes("trainer.elastic=true", "trainer.restart_wait_s=5")
    run = Run(tmp_path, [*text_arguments, *options], env=cluster.environment)
    run.come_to(step=4, saved=2)

    run.harm(lambda: cluster.kill(node))

    assert run.end() == 0, run.stderr
    assert "fewer devices than requested: nodes=1 of=2" in run.stderr
    before = [logged for logged in run.steps if logged.moment < run.harmed]
    assert_same(before, {step: undisturbed[step] for step in range(1, len(before) + 1)})
    assert [logged.step for logged in run.steps][-1] == max(undisturbed)
    record(
        "a node is lost, `trainer.elastic=true`",
        again=steps_again(run), noticed_s=run.noticed_s("restarting"), went_on_s=run.went_on_s(),
    )  # fmt: skip


def test_a_fine_tuning_run_continues_with_the_remaining_nodes(
    cluster, tmp_path, sft_arguments, sft_undisturbed, record
):
    node = cluster.start(is_head=False)
    options = two_nodes("trainer.elastic=true", "trainer.restart_wait_s=5")
    run = Run(tmp_path, [*sft_arguments, *options], module=SFT, env=cluster.environment)
    run.come_to(step=SFT_SAVED + 2, saved=SFT_SAVED)

    run.harm(lambda: cluster.kill(node))

    assert run.end() == 0, run.stderr
    assert "fewer devices than requested: nodes=1 of=2" in run.stderr
    before = [logged for logged in run.steps if logged.moment < run.harmed]
    assert_same(before, {step: sft_undisturbed[step] for step in range(1, len(before) + 1)})
    losses = {logged.step: logged.metrics["train/loss"] for logged in run.steps}
    assert losses == pytest.approx({step: sft_undisturbed[step]["train/loss"] for step in losses}, rel=1e-3)
    assert max(losses) == max(sft_undisturbed)
    record(
        "a node of a fine-tuning run is lost, `trainer.elastic=true`",
        again=steps_again(run), noticed_s=run.noticed_s("restarting"), went_on_s=run.went_on_s(),
    )  # fmt: skip


STREAM = [
    "worker.hybrid_engine=false",
    "trainer.n_gpus_per_node=1",
    "trainer.n_gpus_for_rollout=2",
    "trainer.async.mode=stream",
    "trainer.save_freq=-1",
    "trainer.max_steps=10000",  # it is stopped once the other engine is there
]


def streaming(cluster, folder, arguments, *options):
    """Start a run with two engines on three nodes; return it with a node that samples and is not the head."""
    for _ in range(2):
        cluster.start(is_head=False)
    run = Run(folder, [*arguments, *STREAM, *options], env=cluster.environment)
    run.wait_for_step(3)
    run.wait(lambda: any(map(cluster.samples, cluster.nodes[1:])))
    return run, next(node for node in cluster.nodes[1:] if cluster.samples(node))


def wait_for_engines(run, number, since):
    """Wait for the first step since a moment that had so many engines; return when it ended."""

    def moments():
        return [
            logged.moment
            for logged in run.steps
            if logged.moment > since and logged.metrics["async/engines"] == number
        ]

    run.wait(moments)
    return moments()[0]


def stop(run):
    """End a run; until then every step was made once and was recent enough."""
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.stderr
    steps = [logged.step for logged in run.steps if logged.step]
    assert steps == list(range(1, len(steps) + 1))
    assert all(logged.metrics["async/staleness_max"] <= 1.0 for logged in run.steps)


def test_a_stream_continues_with_the_engines_that_are_left_until_another_joins(
    cluster, tmp_path, text_arguments, record
):
    options = ("trainer.async.max_engine_restarts=0", "trainer.async.max_gpus_for_rollout=3")
    run, node = streaming(cluster, tmp_path, text_arguments, *options)
    pid = cluster.samples(node)

    run.harm(lambda: os.kill(pid, signal.SIGKILL))
    wait_for_engines(run, 2, since=wait_for_engines(run, 1, since=run.harmed))

    stop(run)
    assert run.steps[-1].metrics["async/engine_restarts"] == 0.0  # it is not where the lost one was
    record(
        "a rollout engine is killed, no restarts are left, `trainer.async.mode=stream`",
        again=0, noticed_s=run.noticed_s("is lost"), went_on_s=run.went_on_s(),
    )  # fmt: skip


def test_an_engine_of_a_stream_joins_on_a_node_that_joins(cluster, tmp_path, text_arguments, record):
    run, node = streaming(cluster, tmp_path, text_arguments)

    run.harm(lambda: cluster.kill(node))
    wait_for_engines(run, 1, since=run.harmed)
    lost = run.noticed_s("is lost"), run.went_on_s()
    run.harm(lambda: cluster.start(is_head=False))
    joined = wait_for_engines(run, 2, since=run.harmed)

    stop(run)
    assert run.steps[-1].metrics["async/engine_restarts"] == 1.0
    record(
        "a node with a rollout engine is lost, `trainer.async.mode=stream`",
        again=0, noticed_s=lost[0], went_on_s=lost[1],
    )  # fmt: skip
    record(
        "a node joins a stream that has lost an engine",
        again=0, noticed_s=joined - run.harmed, went_on_s=run.went_on_s(),
    )  # fmt: skip


def test_a_run_waits_for_a_node_that_comes_back(cluster, tmp_path, text_arguments, undisturbed, record):
    node = cluster.start(is_head=False)
    run = Run(tmp_path, [*text_arguments, *two_nodes()], env=cluster.environment)
    run.come_to(step=4, saved=2)

    run.harm(lambda: cluster.kill(node))
    time.sleep(5)
    cluster.start(is_head=False)

    assert run.end() == 0, run.stderr
    assert_same(run.steps, undisturbed)
    record(
        "a node is lost and another joins after 5 s",
        again=steps_again(run), noticed_s=run.noticed_s("restarting"), went_on_s=run.went_on_s(),
    )  # fmt: skip


def test_a_run_survives_a_restart_of_the_head(cluster, tmp_path, text_arguments, undisturbed, record):
    cluster.start(is_head=False)
    run = Run(tmp_path, [*text_arguments, *two_nodes()], env=cluster.environment)
    run.come_to(step=4, saved=2)

    run.harm(lambda: cluster.kill(cluster.nodes[0]))
    time.sleep(5)
    for node in list(cluster.nodes):
        cluster.kill(node)
    cluster.start(is_head=True)
    cluster.start(is_head=False)

    assert run.end() == 0, run.stderr
    assert_same(run.steps, undisturbed)
    record(
        "Ray's head is lost and restarts after 5 s",
        again=steps_again(run), noticed_s=run.noticed_s("restarting"), went_on_s=run.went_on_s(),
    )  # fmt: skip
