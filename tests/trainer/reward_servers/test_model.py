# SPDX-License-Identifier: Apache-2.0
"""Restarts and sleep of a served model, with replicas that are small real servers in this process."""

import threading
import time

import pytest

from tests.helpers.chat_server import ChatServer
from verl.rewards.servers import AddressFile
from verl.trainer.reward_servers.servers import ServedModel

WAIT_S = 60.0


class LocalReplica:
    """A replica as `ServedModel` sees it; `die` ends its server, `is_closed` says that the model noted it."""

    def __init__(self, starts=100):
        self.starts = starts  # that succeed
        self.calls = []
        self.ended = threading.Event()
        self.is_closed = False
        self.server = None

    def start(self):
        self.calls.append("start")
        if self.calls.count("start") > self.starts:
            raise RuntimeError("it ended while it started")
        self.ended.clear()
        self.server = ChatServer().__enter__()
        return self.server.url

    def wait(self):
        self.ended.wait()
        return "was killed by SIGKILL"

    def sleep(self):
        self.calls.append("sleep")

    def wake(self):
        self.calls.append("wake")

    def close(self):
        self.die()
        self.is_closed = True

    def die(self):
        server, self.server = self.server, None
        if server is not None:
            server.__exit__()
        self.ended.set()


@pytest.fixture
def addresses(tmp_path):
    return AddressFile(tmp_path / "judge.json", "key", "owner/judge", 1.0)


def serve(addresses, *replicas, max_restarts=3, sleeps=False):
    model = ServedModel("judge", replicas, addresses, max_restarts=max_restarts, sleeps=sleeps)
    model.wait_until_started()
    return model


def wait_until(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_lost(addresses):
    try:
        addresses.living()
    except ConnectionError:
        return True
    return False


def test_all_replicas_are_in_the_file_after_the_start(addresses):
    first, second = LocalReplica(), LocalReplica()
    serve(addresses, first, second)

    assert addresses.living() == [first.server.url, second.server.url]


def test_a_replica_that_dies_leaves_the_file_and_starts_again(addresses):
    first, second = LocalReplica(), LocalReplica()
    model = serve(addresses, first, second)
    old = first.server.url
    first.die()

    wait_until(lambda: model.num_restarts == 1 and len(addresses.living()) == 2)
    assert old not in addresses.living()
    assert addresses.living() == [first.server.url, second.server.url]


def test_restarts_are_bounded_over_all_replicas_and_the_last_loss_says_why(addresses):
    first, second = LocalReplica(), LocalReplica()
    model = serve(addresses, first, second, max_restarts=1)
    first.die()
    wait_until(lambda: model.num_restarts == 1 and len(addresses.living()) == 2)
    first.die()
    wait_until(lambda: addresses.living() == [second.server.url])
    second.die()
    wait_until(lambda: is_lost(addresses))

    assert model.num_restarts == 1
    with pytest.raises(
        ConnectionError, match=r"all 2 .*`max_restarts` \(1\).* replica 1 was killed by SIGKILL"
    ):
        addresses.living()


def test_a_restart_that_fails_counts_and_is_tried_again(addresses):
    replica = LocalReplica(starts=1)
    model = serve(addresses, replica, max_restarts=2)
    replica.die()

    wait_until(lambda: is_lost(addresses))
    assert (model.num_restarts, replica.calls) == (2, ["start"] * 3)
    with pytest.raises(ConnectionError, match="it ended while it started"):
        addresses.living()


def test_the_first_start_that_fails_is_an_error(addresses):
    with pytest.raises(RuntimeError, match="it ended while it started"):
        serve(addresses, LocalReplica(starts=0))


def test_a_model_that_sleeps_has_addresses_only_while_it_is_awake(addresses):
    replica = LocalReplica()
    model = serve(addresses, replica, sleeps=True)
    assert addresses.living() == []
    model.wake()
    assert addresses.living() == [replica.server.url]
    model.sleep()

    assert addresses.living() == []
    assert replica.calls == ["start", "sleep", "wake", "sleep"]


def test_a_replica_that_dies_in_its_sleep_starts_when_the_model_wakes(addresses):
    replica = LocalReplica()
    model = serve(addresses, replica, sleeps=True)
    replica.die()
    wait_until(lambda: replica.is_closed)
    time.sleep(0.1)
    assert replica.calls == ["start", "sleep"]  # others have the devices
    model.wake()
    wait_until(addresses.living)
    model.sleep()

    assert replica.calls == ["start", "sleep", "start", "sleep"]


def test_a_model_does_not_sleep_before_a_replica_that_starts_can(addresses):
    replica = LocalReplica()
    model = serve(addresses, replica, sleeps=True)
    model.wake()
    replica.die()
    wait_until(lambda: model.num_restarts == 1)
    model.sleep()

    assert replica.calls[-2:] == ["start", "sleep"]


def test_nothing_starts_after_the_end(addresses):
    replica = LocalReplica()
    model = serve(addresses, replica)
    model.close()
    time.sleep(0.1)

    assert (replica.calls, model.num_restarts) == (["start"], 0)
