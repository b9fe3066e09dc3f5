# SPDX-License-Identifier: Apache-2.0
"""Environments and agents that fail in every way, and the process in which tools run, killed amid calls."""

import os
import re
import signal
from collections import Counter
from contextlib import suppress

import psutil
import pytest

from tests.helpers import world_faults
from tests.helpers.agent_faults import KINDS, WITH_TOOLS, num_calls, options_of, save_files, start
from tests.helpers.fault_checks import (
    check_failures_are_counted,
    check_nothing_is_lost,
    check_only_good_ones_count,
    rows_of,
)

pytestmark = pytest.mark.faults
STEPS, GROUPS = (1, 2), 8
HOST = "verl.agents.tools.host"
OPTIONS = (
    "worker.rollout.multi_turn.on_tool_error=end",
    "worker.rollout.val_override_config={temperature: 1.0, n: 12}",  # at the end; not all are to fail
)
DEEDS = {"complain": "raises", "hang": "hangs", "leave": "dies", "ask_in_a_loop": "asks the policy in a loop"}
WORLDS = {
    "environment": ("World", world_faults.ENVIRONMENT, world_faults.STEPS, world_faults.ANSWERED_STEPS),
    "agent": ("agent", world_faults.AGENT, world_faults.RUNS, world_faults.ANSWERED_RUNS),
}


@pytest.mark.parametrize("kind", WORLDS)
def test_faults_of_environments_and_agents_cost_their_own_conversations(kind, tmp_path, record):
    name, source, failing, answered = WORLDS[kind]
    save_files(tmp_path, world_faults.texts_of(failing, answered))
    (tmp_path / "world.py").write_text(source)
    function = {"environment": "World", "agent": "run"}[kind]
    limit_s = 30  # agents start at once, and to fill the memory took 10 s on a busy machine

    run = start(
        tmp_path, tmp_path / "run", *OPTIONS, "worker.rollout.n=12",
        f"worker.rollout.multi_turn.tool_timeout_s={limit_s}",
        f"worker.rollout.multi_turn.{kind}={tmp_path / 'world.py'}:{function}",
    )  # fmt: skip

    assert run.end() == 0, run.stderr[-8000:]
    metrics = {logged.step: logged.metrics for logged in run.steps}
    met, seconds = Counter(), {}
    for step in STEPS:
        rows = rows_of(tmp_path, "run", step)
        check_nothing_is_lost(rows, GROUPS, 12)
        check_only_good_ones_count(rows, metrics[step])
        check_failures_are_counted(rows, metrics[step])
        for row in rows:
            found = list(world_faults.happened(row, name, failing | answered))
            assert row["sample"] not in world_faults.BEGUN or found == [("beginning", True)]
            assert all(has_failed == (one not in answered) for one, has_failed in found if row["is_masked"])
            met.update(one for one, _ in found)
            if row["is_masked"] and found[-1][0] in DEEDS:
                seconds[found[-1][0]] = row["turns"][-1]["observations"][-1]["seconds"]
    silent = {"finish"} if kind == "agent" else set()  # nothing answers the last turn of an agent
    missing = (set(failing) | set(answered)) - silent - set(met)
    assert not missing
    assert seconds["hang"] >= limit_s - 0.1
    for deed, said in DEEDS.items():
        if deed in failing:
            record(f"an {kind} {said}", again=0, noticed_s=seconds[deed])


@pytest.fixture
def folder(tmp_path):
    return save_files(tmp_path, WITH_TOOLS)


def hosts(run):
    """The processes that import the tools: their parents, which guard them, have the same command line."""

    def is_host(child):
        family = (child, child.parent(), child.parent().parent())
        return [HOST in " ".join(each.cmdline()) for each in family] == [True, True, False]

    return run.processes(is_host)


def test_a_run_starts_the_process_of_its_tools_again(folder, record):
    run = start(folder, folder / "run", *options_of(folder), *OPTIONS)
    run.wait(lambda: num_calls(folder) > 0 and len(hosts(run)) == 2)

    first, second = hosts(run)
    guardian = psutil.Process(second).ppid()
    run.harm(lambda: [os.kill(pid, signal.SIGKILL) for pid in (first, guardian)])

    assert run.end() == 0, run.stderr[-8000:]
    metrics = {logged.step: logged.metrics for logged in run.steps}
    seconds, reasons = {}, []
    for step in STEPS:
        rows = rows_of(folder, "run", step)
        check_nothing_is_lost(rows, GROUPS, 8)
        check_only_good_ones_count(rows, metrics[step])
        for turn in (turn for row in rows for turn in row["turns"]):
            for one in turn["observations"]:
                if "in common" not in one["text"]:
                    seconds[KINDS[turn["text"]]] = one["seconds"]
                reasons.append(one["text"])
    assert any("ended with the process that all tools have in common" in reason for reason in reasons)
    assert "fine" in reasons
    noticed_s = run.noticed_s("the process that all tools have in common ended")
    fault = "the process that all tools have in common is killed"
    record(fault, again=0, noticed_s=noticed_s, went_on_s=run.went_on_s())
    for deed, said in DEEDS.items():
        if deed in seconds:
            record(f"a tool {said}", again=0, noticed_s=seconds[deed])


def test_a_run_ends_whose_tools_are_killed_every_time(folder, record):
    run = start(folder, folder / "run", *options_of(folder), *OPTIONS)
    run.wait(lambda: num_calls(folder) > 0)

    def kill_all():
        for pid in hosts(run):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    run.harm(kill_all)
    while run.process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            kill_all()

    assert run.end() == 1, run.stderr[-8000:]
    cause = re.search("in common ended 3 times|imports the tools was killed by SIGKILL", run.stderr)
    assert cause, run.stderr[-8000:]
    fault = "the process that all tools have in common is killed every time"
    record(fault, noticed_s=run.noticed_s(cause[0]))
