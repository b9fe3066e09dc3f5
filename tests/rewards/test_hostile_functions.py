# SPDX-License-Identifier: Apache-2.0
"""Reward functions that write to the pool's connection, raise without measure, or start daemons."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.helpers.nightly import by_day
from tests.rewards.test_failures import make_manager, scored
from tests.rewards.test_manager import is_alive, wait_until

HOSTILE = """
    import gc, os, struct, time
    from multiprocessing.connection import Connection
    REWARD_TYPE = "sequential"

    def write(content):
        connection = next(each for each in gc.get_objects() if isinstance(each, Connection))
        os.write(connection.fileno(), content)

    def half():
        write(struct.pack("!i", 1000) + b"half")
        time.sleep(1000)

    def two_gigabytes():
        write(struct.pack("!i", 2**31 - 1))
        time.sleep(1000)

    def garbage():
        write(struct.pack("!i", 5) + b"hello")
        time.sleep(1000)

    def long_names():
        return {"overall": 1.0} | {"name " * 2_000_000 + str(number): 1.0 for number in range(7)}

    def long_error():
        raise ValueError("long " * 20_000_000)

    def long_key():
        return {"long " * 20_000_000: 1.0}

    def daemon():
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open(__file__ + ".pid", "w") as file:
                    file.write(str(os.getpid()))
                time.sleep(1000)
            os._exit(0)
        time.sleep(1000)

    def main(row):
        if row["response"] in globals():
            return globals()[row["response"]]()
        return {"overall": len(row["response"])}
    """
REASONS = {
    "half": r"did not return within `worker.reward.timeout_s` \(2 s\)",
    "two_gigabytes": "sent a message of more than 64 MiB while it scored row 1",
    "garbage": "sent a message that cannot be read .UnpicklingError.* while it scored row 1",
    "long_names": "sent a message of more than 64 MiB while it scored row 1",
    "long_error": r"raised ValueError: long .* \(100000011 characters\) .* in long_error",
    "long_key": r"must return a dict with `overall` for each response, got the keys .'long ",
}


@pytest.mark.parametrize("way", by_day(REASONS, "garbage", "long_error"))
def test_a_message_or_error_without_measure_costs_its_own_call_and_a_short_line(reward_file, tmp_path, way):
    options = {"memory_limit_gb": None, "max_retries": 0, "max_failure_ratio": 0.3, "num_cpus": 1}
    timeout_s = 2.0 if way == "half" else 30.0
    log = tmp_path / "failures.jsonl"
    with make_manager(
        reward_file(HOSTILE), log, on_failure="mask", timeout_s=timeout_s, **options
    ) as manager:
        scores = scored(manager, ["a", way, "aa", "aaa"])

    assert scores["overall"][:1] + scores["overall"][2:] == [1.0, 2.0, 3.0]
    assert scores["failures"] == [0.0, 1.0, 0.0, 0.0]
    (entry,) = map(json.loads, log.read_text().splitlines())
    assert re.search(f"(?s){REASONS[way]}", entry["reasons"][0]), entry["reasons"][0]
    assert log.stat().st_size < 20_000


def test_a_process_that_stops_amid_a_message_stops_no_other(reward_file):
    with make_manager(reward_file(HOSTILE), timeout_s=60.0, num_cpus=2) as manager:
        stopped = manager.start()
        stopped.submit([0], [{"response": "half"}])
        start = time.monotonic()

        assert scored(manager, ["a"] * 100) == {"overall": [1.0] * 100}
        assert time.monotonic() - start < 30.0


@pytest.mark.nightly
def test_a_daemon_dies_with_the_process_that_started_it(reward_file):
    path = reward_file(HOSTILE)
    with make_manager(
        path, timeout_s=2.0, on_failure="mask", max_failure_ratio=1.0, max_retries=0
    ) as manager:
        scored(manager, ["daemon"])
        pid = int(Path(f"{path}.pid").read_text())

        wait_until(lambda: not is_alive(pid))


def test_an_answer_of_a_fork_is_no_second_answer(reward_file):
    path = reward_file("import os\ndef main(inputs): os.fork(); return [{'overall': 1.0} for _ in inputs]")
    with make_manager(path) as manager:
        assert scored(manager, ["a"]) == {"overall": [1.0]}
        time.sleep(0.2)
        assert manager.pool._processes
