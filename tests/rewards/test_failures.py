# SPDX-License-Identifier: Apache-2.0
"""Calls that fail: their responses, other responses, and the run. Uses real processes."""

import json
import math
from pathlib import Path

import pytest

from tests.helpers.nightly import by_day
from verl.config.worker import RewardConfig
from verl.rewards.manager import RewardManager

FAILS = """
    import ctypes, os, time
    REWARD_TYPE = "sequential"

    def raises():
        raise KeyError("no such answer")

    def hangs():
        time.sleep(1000)

    def aborts():
        os.abort()

    def fills_memory():
        held = []
        while True:
            held.append(bytearray(16 << 20))

    def returns_nonsense():
        return {"overall": float("nan")}

    def main(row):
        if row["response"] in globals():
            return globals()[row["response"]]()
        return {"overall": len(row["response"]), "accuracy": 1.0}
    """

WAYS = {
    "raises": (ValueError, r"raised KeyError: 'no such answer' at .*:5, in raises"),
    "hangs": (TimeoutError, r"did not return within `worker.reward.timeout_s` \(2 s\).* in hangs"),
    "aborts": (RuntimeError, "was killed by SIGABRT while it scored row 3"),
    "fills_memory": (
        ValueError,
        r"MemoryError.* in fills_memory.*`worker.reward.memory_limit_gb` \(0.25 GiB\)",
    ),
    "returns_nonsense": (ValueError, "`overall` must be a finite number, got nan for row 3"),
}


def make_manager(path, log=None, **options):
    options = {"timeout_s": 20.0, "memory_limit_gb": 0.25, "max_failure_ratio": 0.2, "num_cpus": 2} | options
    return RewardManager(RewardConfig(reward_function=path, **options), log)


def timeout_of(way):
    """Seconds that a call may take where one fails in this way."""
    return 2.0 if "hangs" in way or "sleep" in way else 20.0


def scored(manager, responses):
    job = manager.start()
    rows = [
        {"prompt": "say", "response": response, "ground_truth": "x", "uid": f"step1-0-{number // 2}"}
        for number, response in enumerate(responses)
    ]
    job.submit(range(len(rows)), rows)
    return job.result()


def five_with(way):
    """Five responses, the fourth of which makes the function fail in this way."""
    return ["", "a", "aa", way, "aaaa"]


@pytest.mark.parametrize("way", by_day(WAYS, "raises", "aborts"))
def test_a_call_that_fails_is_repeated_and_then_ends_the_run_by_its_reason(reward_file, way):
    error, reason = WAYS[way]
    with (
        make_manager(reward_file(FAILS), timeout_s=timeout_of(way)) as manager,
        pytest.raises(error, match=rf"(?s){reason}.*each of 2 attempts.*\n1 of \d finished calls failed"),
    ):
        scored(manager, five_with(way))


@pytest.mark.parametrize("way", by_day(WAYS, "raises", "aborts"))
def test_a_failure_may_mask_its_response_and_no_other(reward_file, way):
    with make_manager(reward_file(FAILS), on_failure="mask", timeout_s=timeout_of(way)) as manager:
        scores = scored(manager, five_with(way))
        again = scored(manager, ["aaa"] * 5)  # the pool keeps working

    overall, accuracy = scores["overall"], scores["accuracy"]
    assert math.isnan(overall[3]) and math.isnan(accuracy[3])
    assert overall[:3] + overall[4:] == [0.0, 1.0, 2.0, 4.0]
    assert accuracy[:3] + accuracy[4:] == [1.0] * 4
    assert scores["failures"] == scores["retries"] == [0.0, 0.0, 0.0, 1.0, 0.0]
    assert again == {"overall": [3.0] * 5, "accuracy": [1.0] * 5}


@pytest.mark.parametrize("way", by_day(WAYS, "raises", "aborts"))
def test_a_failure_may_get_a_score_and_no_other_value(reward_file, way):
    options = {"on_failure": "score", "failure_score": -0.5, "timeout_s": timeout_of(way)}
    with make_manager(reward_file(FAILS), **options) as manager:
        scores = scored(manager, five_with(way))

    assert scores["overall"] == [0.0, 1.0, 2.0, -0.5, 4.0]
    assert math.isnan(scores["accuracy"][3])
    assert scores["failures"] == [0.0, 0.0, 0.0, 1.0, 0.0]


FAILS_AT_FIRST = """
    import os, pathlib, time
    REWARD_TYPE = "sequential"
    def main(row):
        tries = pathlib.Path(__file__).with_name("tries of " + row["response"])
        tries.write_text(tries.read_text() + "." if tries.exists() else ".")
        if row["response"] == "b" and len(tries.read_text()) <= {failures}:
            {statement}
        return {{"overall": len(tries.read_text())}}
    """


@pytest.mark.parametrize(
    ("statement", "on_failure"),
    [
        ("1 / 0", "error"),
        ("1 / 0", "mask"),
        pytest.param("time.sleep(1000)", "mask", marks=pytest.mark.nightly),
        ("os.abort()", "mask"),
    ],
)
def test_a_call_that_succeeds_when_it_is_repeated_did_not_fail(reward_file, statement, on_failure):
    path = reward_file(FAILS_AT_FIRST.format(statement=statement, failures=2))
    timeout_s = timeout_of(statement)
    with make_manager(path, on_failure=on_failure, max_retries=2, timeout_s=timeout_s) as manager:
        scores = scored(manager, ["a", "b", "c"])

    assert scores == {"overall": [1.0, 3.0, 1.0], "failures": [0.0] * 3, "retries": [0.0, 2.0, 0.0]}


def test_without_retries_a_call_is_made_once(reward_file):
    path = reward_file(FAILS_AT_FIRST.format(statement="1 / 0", failures=1))
    with make_manager(path, on_failure="score", max_retries=0, max_failure_ratio=1.0) as manager:
        scores = scored(manager, ["a", "b"])

    assert scores == {"overall": [1.0, 0.0], "failures": [0.0, 1.0], "retries": [0.0, 0.0]}


def test_a_batch_function_fails_for_the_responses_of_its_call(reward_file):
    path = reward_file("def main(inputs): return [{'overall': 1 / len(row['response'])} for row in inputs]")
    with make_manager(path, on_failure="mask", max_failure_ratio=0.5) as manager:
        scores = scored(manager, ["a", "", "aa", "aa"])  # two groups of two

    assert [math.isnan(score) for score in scores["overall"]] == [True, True, False, False]
    assert scores["failures"] == scores["retries"] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.nightly
@pytest.mark.parametrize("statement", ["time.sleep(1000)", "os.abort()"], ids=["blocks", "crashes"])
def test_calls_that_share_a_process_with_one_that_ends_it_are_scored(reward_file, statement):
    path = reward_file(
        f"""
        import asyncio, os, time
        REWARD_TYPE = "sequential"
        async def main(row):
            await asyncio.sleep(0.1)
            if row["response"] == "end":
                {statement}
            await asyncio.sleep(0.1)
            return {{"overall": len(row["response"])}}
        """
    )
    options = {"num_cpus": 1, "max_retries": 0, "timeout_s": timeout_of(statement)}
    with make_manager(path, on_failure="mask", **options) as manager:
        scores = scored(manager, ["a", "aa", "end", "a", "a"])

    assert scores["failures"] == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert scores["overall"][:2] + scores["overall"][3:] == [1.0, 2.0, 1.0, 1.0]


def test_an_error_names_the_call_that_ended_a_shared_process(reward_file):
    path = reward_file(
        """
        import asyncio, os
        REWARD_TYPE = "sequential"
        async def main(row):
            await asyncio.sleep(0.1)
            if row["response"] == "end":
                os.abort()
            await asyncio.sleep(0.2)
            return {"overall": 1.0}
        """
    )
    with (
        make_manager(path, num_cpus=1) as manager,
        pytest.raises(RuntimeError, match=r"(?s)SIGABRT while it scored row 2\n.*response: 'end'"),
    ):
        scored(manager, ["a", "a", "end"])


@pytest.mark.nightly
def test_a_function_that_leaks_memory_scores_every_response(reward_file):
    path = reward_file(
        """
        REWARD_TYPE = "sequential"
        kept = []
        def main(row):
            kept.append(bytearray(60 << 20))
            return {"overall": len(kept)}
        """
    )
    with make_manager(path, num_cpus=1) as manager:
        scores = scored(manager, ["a"] * 10)

    # A process of 256 MiB holds less than five times 60 MiB; the call that does not fit begins a new process.
    assert 1 < max(scores["overall"]) <= 4 and scores["overall"].count(1.0) > 1
    assert scores.keys() == {"overall"}


def test_a_memory_limit_holds_while_the_file_is_imported_and_says_so(reward_file):
    path = reward_file("held = bytearray(300 << 20)\ndef main(inputs): ...")

    with pytest.raises(
        ValueError, match=r"(?s)importing .* MemoryError.*`worker.reward.memory_limit_gb` \(0.25 GiB"
    ):
        make_manager(path)


def test_without_a_limit_a_process_takes_what_it_needs(reward_file):
    path = reward_file(
        "held = bytearray(300 << 20)\ndef main(inputs): return [{'overall': 1.0} for _ in inputs]"
    )
    with make_manager(path, memory_limit_gb=None) as manager:
        assert scored(manager, ["a"]) == {"overall": [1.0]}


def test_too_many_failures_end_the_run_with_the_first_reasons(reward_file):
    with make_manager(reward_file(FAILS), on_failure="mask", num_cpus=1) as manager:
        two = scored(manager, ["raises", "aborts", *["a"] * 8])  # 0.2 are allowed

        with pytest.raises(RuntimeError) as caught:
            scored(manager, ["raises", "aborts", "returns_nonsense", *["a"] * 7])

    message = str(caught.value)
    assert sum(two["failures"]) == 2
    assert "failed for 3 of 10 responses, more than `worker.reward.max_failure_ratio` (0.2)" in message
    assert "KeyError: 'no such answer'" in message and "SIGABRT" in message and "got nan" in message


FAILS_EVERYWHERE = """
    import os, pathlib, time
    REWARD_TYPE = "sequential"
    def main(row):
        with pathlib.Path(__file__).with_suffix(".calls").open("a") as file:
            file.write(".")
        {statement}
    """
HANGS_EVERYWHERE = FAILS_EVERYWHERE.format(statement="time.sleep(1000)")


def num_calls(path):
    return len(Path(path).with_suffix(".calls").read_text())


@pytest.mark.nightly
def test_a_run_that_fails_too_often_ends_before_every_call_has_hung(reward_file):
    path = reward_file(HANGS_EVERYWHERE)
    with (
        make_manager(path, on_failure="mask", max_retries=0, timeout_s=1.0) as manager,
        pytest.raises(RuntimeError, match="max_failure_ratio"),
    ):
        scored(manager, ["a"] * 40)

    assert num_calls(path) <= 6  # five that hung, and the one of the other process


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("statement", "on_failure", "per_batch"),
    [("time.sleep(1000)", "mask", 40), ("os.abort()", "score", 40), ("time.sleep(1000)", "score", 2)],
)
def test_a_function_that_hangs_or_dies_in_every_call_ends_the_run_after_five(
    reward_file, statement, on_failure, per_batch
):
    path = reward_file(FAILS_EVERYWHERE.format(statement=statement))
    timeout_s = 1.0 if "sleep" in statement else 20.0
    options = {"max_failure_ratio": 1.0, "num_cpus": 1, "timeout_s": timeout_s}
    with (
        make_manager(path, on_failure=on_failure, **options) as manager,
        pytest.raises(RuntimeError, match=r"(?s)hung or died in 5 of 5 calls.*(in main|SIGABRT)"),
    ):
        for _ in range(5):
            scored(manager, ["a"] * per_batch)

    # Batches of two are over after 2 x 2 attempts, without a score, and the next ones fail as well.
    assert num_calls(path) <= (5 if per_batch == 40 else 9)


@pytest.mark.parametrize("statement", ["1 / 0", "return float('nan')"], ids=["raises", "returns nonsense"])
@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_a_function_that_fails_for_every_response_ends_the_run_whatever_is_allowed(
    reward_file, statement, ratio
):
    path = reward_file(FAILS_EVERYWHERE.format(statement=statement))
    message = {
        0.1: r"failed for 2 of 10 responses, more than .*max_failure_ratio` \(0.1\).*; 2 of 2 finished calls",
        1.0: "failed for 10 of 10 responses, which leaves none to learn from; 10 of 10 finished calls failed",
    }[ratio]
    with (
        make_manager(path, on_failure="mask", max_failure_ratio=ratio, num_cpus=1) as manager,
        pytest.raises(RuntimeError, match=message),
    ):
        scored(manager, ["a"] * 10)


@pytest.mark.nightly
def test_calls_that_hang_beside_others_that_succeed_do_not_end_the_run(reward_file):
    options = {"max_failure_ratio": 1.0, "max_retries": 0, "timeout_s": 1.5, "num_cpus": 3}
    with make_manager(reward_file(FAILS), on_failure="mask", **options) as manager:
        scores = scored(manager, ["a", *["hangs"] * 6, "aa"])

    assert scores["overall"][0] == 1.0 and scores["overall"][-1] == 2.0 and sum(scores["failures"]) == 6


@pytest.mark.nightly
def test_a_function_that_always_hangs_ends_the_run_after_two_time_limits(reward_file):
    path = reward_file(HANGS_EVERYWHERE)
    with (
        make_manager(path, timeout_s=1.0, num_cpus=1) as manager,
        pytest.raises(TimeoutError, match="in each of 2 attempts"),
    ):
        scored(manager, ["a"] * 40)

    assert num_calls(path) <= 2


def test_each_response_whose_call_failed_is_logged_with_every_reason(reward_file, tmp_path):
    log = tmp_path / "run" / "reward_failures.jsonl"
    with make_manager(reward_file(FAILS), log, on_failure="mask") as manager:
        scored(manager, five_with("raises"))
        scored(manager, ["a"] * 5)
        scored(manager, five_with("aborts"))

    first, second = [json.loads(line) for line in log.read_text().splitlines()]
    assert first | {"reasons": ...} == {
        "uid": "step1-0-1", "prompt": "say", "response": "raises", "ground_truth": "x", "on_failure": "mask",
        "reasons": ...,
    }  # fmt: skip
    assert len(first["reasons"]) == 2 and all("KeyError" in reason for reason in first["reasons"])
    assert second["response"] == "aborts" and "SIGABRT" in second["reasons"][1]


def test_values_that_the_function_calls_like_the_counts_are_refused(reward_file):
    path = reward_file("def main(inputs): return [{'overall': 1.0, 'failures': 2.0} for _ in inputs]")
    with make_manager(path) as manager, pytest.raises(ValueError, match=r"returns \['failures'\].*rename"):
        scored(manager, ["a"])
