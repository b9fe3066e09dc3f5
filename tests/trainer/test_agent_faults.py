# SPDX-License-Identifier: Apache-2.0
"""Runs whose policy makes calls that fail in every way: nothing is lost, nothing that failed is trained."""

import json
import os
import re
import signal
from collections import Counter, defaultdict

import numpy as np
import pytest

from tests.helpers.agent_faults import (
    FAILING,
    KINDS,
    REASONS,
    REFUSED,
    WITH_TOOLS,
    num_calls,
    options_of,
    save_files,
    start,
)
from tests.helpers.agent_runs import check_resumed
from tests.helpers.fault_checks import check_nothing_is_lost, check_only_good_ones_count, rows_of

pytestmark = [pytest.mark.heavy, pytest.mark.slow]  # each fault alone: tests/agents/test_tool_pool.py
STEPS, GROUPS, SAMPLES = (1, 2), 8, 8
MAX_TURNS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_files(tmp_path_factory.mktemp("faults"), WITH_TOOLS)


def finish(folder, name, *options):
    run = start(folder, folder / name, *options_of(folder), *options)
    assert run.end() == 0, run.stderr[-8000:]
    return {logged.step: logged.metrics for logged in run.steps}


@pytest.fixture(scope="module")
def ended(folder):
    """The metrics of a run that ends conversations whose calls fail."""
    return finish(folder, "end", "worker.rollout.multi_turn.on_tool_error=end")


def kinds_of(row):
    """The calls of a conversation, with their answers."""
    for turn in row["turns"]:
        for observation in turn["observations"]:
            yield KINDS[turn["text"]], observation


def failed_kinds(row):
    return [kind for kind, observation in kinds_of(row) if observation["failed"]]


def check_answers(row):
    for kind, observation in kinds_of(row):
        assert observation["failed"] == (kind in FAILING), (kind, observation)
        assert re.match(REASONS[kind], observation["text"]), (kind, observation)
        assert (observation["seconds"] is None) == (kind in REFUSED), (kind, observation)
    assert row["num_turns"] <= MAX_TURNS


def check_metrics(rows, metrics):
    by_tool = defaultdict(list)
    for row in rows:
        for kind, observation in kinds_of(row):
            if kind not in REFUSED:
                by_tool[kind if kind in ("kept", "unmade") else "fault"].append(observation["failed"])
    calls = sum(len(turn["calls"]) for row in rows for turn in row["turns"])
    failures = sum(len(failed_kinds(row)) for row in rows)
    assert metrics["agent/tool_failures"] == pytest.approx(failures / calls) and failures > 0
    assert metrics["agent/tool_calls"] == pytest.approx(calls / len(rows))
    for tool, failed in by_tool.items():
        assert metrics[f"agent/tool/{tool}/calls"] == len(failed)
        assert metrics[f"agent/tool/{tool}/failures"] == pytest.approx(np.mean(failed))


def test_every_fault_costs_its_own_conversation_and_nothing_else(folder, ended):
    assert set(ended) == set(STEPS)
    met = Counter()
    for step in STEPS:
        rows = rows_of(folder, "end", step)
        check_nothing_is_lost(rows, GROUPS, SAMPLES)
        check_metrics(rows, ended[step])
        check_only_good_ones_count(rows, ended[step])
        for row in rows:
            check_answers(row)
            met.update(kind for kind, _ in kinds_of(row))
            assert row["is_masked"] == (row["stop_reason"] == "tool"), row["stop_reason"]
            if row["is_masked"]:
                assert failed_kinds(row) == [list(kinds_of(row))[-1][0]]  # it is the last call
        assert max(row["num_turns"] for row in rows) == MAX_TURNS
        assert "turns" in {row["stop_reason"] for row in rows}  # cut, and trained like others
    assert set(met) == set(REASONS), set(REASONS) - set(met)


def interrupt(folder, name, number):
    """Send a signal to a process of a run that is in its second step, and start the command again."""
    options = (*options_of(folder), "worker.rollout.multi_turn.on_tool_error=end")
    calls, broken = num_calls(folder), start(folder, folder / name, *options)
    broken.wait(lambda: num_calls(folder) > calls)
    worker = broken.workers()[0]  # while its first calls hang; on a busy machine it takes seconds to find one
    broken.come_to(step=2, saved=1)
    broken.harm(lambda: os.kill(worker if number == signal.SIGKILL else broken.pid, number))
    status = broken.end()

    again = start(folder, folder / name, *options)
    assert again.end() == 0, again.stderr[-8000:]
    return status, broken, again


@pytest.mark.faults
def test_a_run_whose_worker_is_killed_amid_conversations_resumes_exactly(folder, ended):
    status, broken, again = interrupt(folder, "killed", signal.SIGKILL)

    assert status != 0 and "died in phase" in broken.stderr, broken.stderr[-4000:]
    assert again.resumed_from() == 1
    check_resumed(folder, "killed", {one.step: one.metrics for one in again.steps}, ended, "end")


@pytest.mark.faults
def test_a_run_that_is_cancelled_amid_conversations_has_lost_nothing(folder, ended):
    _, broken, again = interrupt(folder, "cancelled", signal.SIGTERM)

    steps = {one.step: one.metrics for one in (*broken.steps, *again.steps)}
    assert set(steps) == set(STEPS)
    check_resumed(folder, "cancelled", {2: steps[2]}, ended, "end")


@pytest.mark.faults
def test_a_run_that_stops_says_what_the_tool_did(folder):
    run = start(folder, folder / "stop", *options_of(folder), "worker.rollout.multi_turn.on_tool_error=stop")

    assert run.end() != 0
    said = re.search(r"`worker.rollout.multi_turn.on_tool_error=stop` ends the run then: (.*)", run.stderr)
    assert said and any(re.match(reason, said[1]) for reason in FAILING.values()), run.stderr[-4000:]
    assert not run.steps


@pytest.mark.faults
def test_a_policy_that_is_shown_failures_is_trained_on_all_its_turns(folder):
    metrics = finish(folder, "show", "trainer.max_steps=1", "worker.rollout.multi_turn.on_tool_error=show")[1]

    rows = rows_of(folder, "show", 1)
    check_nothing_is_lost(rows, GROUPS, SAMPLES)
    check_metrics(rows, metrics)
    for row in rows:
        check_answers(row)
        assert not row["is_masked"] and None not in (row["score"], row["advantage"])
        conversation = json.loads(row["contexts"][0]["messages"])
        shown = [one for turn in row["turns"] if turn["is_shown"] for one in turn["observations"]]
        read = ["".join(part.get("text", "") for part in one["content"]) for one in conversation[1:]]
        assert all(one["text"] in read for one in shown) and shown
    assert max(len(failed_kinds(row)) for row in rows) > 1  # it went on after a failure
