# SPDX-License-Identifier: Apache-2.0
"""The pool as the trainer uses it: real processes, real hangs, real deaths."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.nightly import by_day
from verl.config.worker import RewardConfig
from verl.rewards.manager import RewardManager, spread_groups
from verl.utils.processes.child_process import ChildProcess

LENGTH = """
    REWARD_TYPE = "sequential"
    def main(row):
        return {"overall": len(row["response"])}
    """


def make_manager(path: str, **options) -> RewardManager:
    return RewardManager(RewardConfig(reward_function=path, **options))


def rows(responses: list[str], **columns) -> list[dict]:
    return [{"prompt": "say", "response": response, "ground_truth": "x", **columns} for response in responses]


def pids_of(manager):
    return [process.pid for process in manager.pool._processes]


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def num_scored(job) -> int:
    job._collect()
    return len(job._scores)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_scores_come_in_index_order_whatever_the_order_of_submission(reward_file):
    with make_manager(reward_file(LENGTH), num_cpus=2) as manager:
        job = manager.start()
        job.submit([3, 2], rows(["aaa", "aa"]))
        job.submit([0], rows([""]))
        job.submit([1], rows(["a"]))

        assert job.result() == {"overall": [0.0, 1.0, 2.0, 3.0]}
        assert job.result() == {"overall": [0.0, 1.0, 2.0, 3.0]}


def test_an_empty_job_has_no_scores(reward_file):
    with make_manager(reward_file(LENGTH)) as manager:
        assert manager.start().result() == {"overall": []}


def test_scoring_continues_while_the_caller_does_something_else(reward_file, tmp_path):
    path = reward_file(
        """
        import pathlib, time
        REWARD_TYPE = "sequential"
        def main(row):
            while not pathlib.Path(row["gate"]).exists():
                time.sleep(0.01)
            return {"overall": 1.0}
        """
    )
    gate = tmp_path / "gate"
    with make_manager(path, num_cpus=2) as manager:
        job = manager.start()
        for index in range(6):
            job.submit([index], rows(["a"], gate=str(gate)))  # returns, although nothing can be scored yet
        assert num_scored(job) == 0
        gate.touch()

        wait_until(lambda: num_scored(job) == 6)  # `result` has not been called yet
        assert job.result() == {"overall": [1.0] * 6}


def test_a_sequential_function_is_spread_over_all_processes(reward_file):
    path = reward_file(
        """
        import os, time
        REWARD_TYPE = "sequential"
        def main(row):
            time.sleep(0.05)
            return {"overall": os.getpid()}
        """
    )
    with make_manager(path, num_cpus=3) as manager:

        def all_took_part() -> bool:  # not so at first if one of them starts later than the others
            job = manager.start()
            job.submit(range(12), rows(["a"] * 12))
            return {int(pid) for pid in job.result()["overall"]} == set(pids_of(manager))

        assert len(pids_of(manager)) == 3
        wait_until(all_took_part)


@pytest.mark.parametrize(("options", "bound"), [({}, 32), ({"max_concurrency": 5}, 5)])
def test_an_async_function_runs_concurrently_but_not_without_bound(reward_file, options, bound):
    path = reward_file(
        f"""
        import asyncio
        REWARD_TYPE = "sequential"
        running = most = 0
        async def main(row):
            global running, most
            running += 1
            most = max(most, running)
            seen = running
            while most < {bound}:  # for ever, if fewer may run
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            running -= 1
            return {{"overall": seen}}
        """
    )
    with make_manager(path, **options) as manager:
        job = manager.start()
        job.submit(range(64), rows(["a"] * 64))
        seen = job.result()["overall"]

    assert max(seen) == bound


def test_a_batch_function_is_called_with_each_group_as_it_comes(reward_file):
    path = reward_file("def main(inputs): return [{'overall': len(inputs)} for _ in inputs]")
    with make_manager(path) as manager:
        job = manager.start()
        job.submit([2, 3, 4], rows(["a"] * 3))
        job.submit([0, 1], rows(["b"] * 2))

        assert job.result() == {"overall": [2.0, 2.0, 3.0, 3.0, 3.0]}


def test_groups_submitted_together_are_spread_over_the_processes_whole(reward_file):
    path = reward_file(
        "def main(inputs): return [{'overall': len({row['uid'] for row in inputs})} for _ in inputs]"
    )
    groups = [row for uid in "abc" for row in rows(["x", "y"], uid=uid)]
    with make_manager(path, num_cpus=2) as manager:
        job = manager.start()
        job.submit(range(6), groups)

        assert job.result() == {"overall": [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]}  # one group, and two


def test_groups_are_spread_in_order_and_without_loss():
    numbered = [(row, {"uid": row // 4}) for row in range(28)]  # 7 groups of 4

    parts = spread_groups(numbered, 3)

    assert [len(part) for part in parts] == [8, 8, 12]
    assert [row for part in parts for row in part] == numbered
    assert spread_groups(numbered[:4], 3) == [numbered[:4]]
    assert spread_groups([], 3) == []


def test_batch_size_says_how_many_responses_a_call_gets(reward_file):
    path = reward_file("def main(inputs): return [{'overall': len(inputs)} for _ in inputs]")
    with make_manager(path, batch_size=3) as manager:
        job = manager.start()
        for index in range(8):
            job.submit([index], rows(["a"]))
        wait_until(lambda: num_scored(job) == 6)  # two full calls, before the result is asked for

        assert job.result() == {"overall": [3.0] * 6 + [2.0] * 2}


def test_a_dataproto_function_is_called_once_with_everything_in_index_order(reward_file):
    path = reward_file(
        """
        import torch
        REWARD_TYPE = "dataproto"
        def main(data):
            assert data.responses == ["", "a", "aa"], data.responses
            return {"reward": torch.tensor([len(r) for r in data.responses]), "calls": [1] * len(data)}
        """
    )
    with make_manager(path) as manager:
        job = manager.start()
        job.submit([2, 0], rows(["aa", ""]))
        job.submit([1], rows(["a"]))

        assert job.result() == {"overall": [0.0, 1.0, 2.0], "calls": [1.0, 1.0, 1.0]}


def test_a_key_that_only_some_responses_have_is_nan_for_the_others(reward_file):
    path = reward_file(
        """
        REWARD_TYPE = "sequential"
        def main(row):
            return {"overall": 1.0} | ({"bonus": 2.0} if row["response"] == "b" else {})
        """
    )
    with make_manager(path) as manager:
        job = manager.start()
        job.submit([0, 1], rows(["a", "b"]))
        scores = job.result()

    assert scores["overall"] == [1.0, 1.0]
    assert math.isnan(scores["bonus"][0]) and scores["bonus"][1] == 2.0


def test_two_jobs_at_a_time_keep_their_scores_apart(reward_file):
    with make_manager(reward_file(LENGTH), num_cpus=2) as manager:
        train, validation = manager.start(), manager.start()
        for index in range(20):
            train.submit([index], rows(["a"]))
            validation.submit([index], rows(["bb"]))

        assert validation.result() == {"overall": [2.0] * 20}
        assert train.result() == {"overall": [1.0] * 20}


def test_images_and_kwargs_reach_the_function(reward_file):
    path = reward_file(
        """
        REWARD_TYPE = "sequential"
        def main(row, factor):
            return {"overall": factor * row["image"].width, "media": len(row["multi_modal_data"]["images"])}
        """
    )
    row = rows(["a"], image=Image.new("RGB", (7, 2)), multi_modal_data={"images": ["a.png", b"png"]})
    with make_manager(path, reward_function_kwargs={"factor": 2}) as manager:
        job = manager.start()
        job.submit([0], row)

        assert job.result() == {"overall": [14.0], "media": [2.0]}


def test_a_value_that_cannot_be_sent_is_named(reward_file):
    with make_manager(reward_file(LENGTH)) as manager:
        job = manager.start()

        with pytest.raises(ValueError, match=r"row 4: column `check` .function. must be picklable"):
            job.submit([4], rows(["a"], check=lambda: 1))


def test_the_processes_do_not_import_torch(reward_file):
    path = reward_file(
        """
        import sys
        REWARD_TYPE = "sequential"
        def main(row):
            return {"overall": bool({"torch", "ray", "numpy"} & set(sys.modules))}
        """
    )
    with make_manager(path) as manager:
        job = manager.start()
        job.submit([0], rows(["a"]))

        assert job.result() == {"overall": [0.0]}


RAISES = """
    REWARD_TYPE = "sequential"
    def parse(text):
        return int(text)
    def main(row):
        return {"overall": parse(row["response"])}
    """


def test_an_exception_names_file_line_row_and_response(reward_file):
    path = reward_file(RAISES)
    with make_manager(path, num_cpus=2) as manager:
        job = manager.start()
        job.submit([7, 8], rows(["1", "one"]))

        with pytest.raises(ValueError) as caught:
            job.result()

    message = str(caught.value)
    assert f"reward function {path}:main raised ValueError: invalid literal for int()" in message
    assert f"at {path}:3, in parse" in message
    assert f'File "{path}", line 5, in main\n    return {{"overall": parse(row["response"])}}' in message
    assert "for row 8\n  prompt: 'say'\n  response: 'one'\n  ground_truth: 'x'" in message


def test_an_exception_in_a_batch_names_the_rows_of_the_call(reward_file):
    with make_manager(reward_file("def main(inputs): return inputs[9]")) as manager:
        job = manager.start()
        job.submit([4, 5], rows(["a", "b"]))

        with pytest.raises(
            ValueError, match=r"(?s)IndexError.*2 responses \(rows 4 to 5\), .* row 4\n.*response: 'a'"
        ):
            job.result()


def test_a_failure_surfaces_at_the_next_submit(reward_file):
    with make_manager(reward_file(RAISES)) as manager:
        job = manager.start()
        job.submit([0], rows(["one"]))
        wait_until(lambda: job._batch.finished.qsize() == 1)

        with pytest.raises(ValueError, match="raised ValueError: invalid literal"):
            job.submit([1], rows(["1"]))


def test_after_a_failure_the_next_job_is_scored(reward_file):
    with make_manager(reward_file(RAISES)) as manager:
        failed = manager.start()
        failed.submit(range(50), rows(["one"] * 50))
        job = manager.start()
        job.submit([0], rows(["5"]))

        assert job.result() == {"overall": [5.0]}
        with pytest.raises(ValueError, match="raised"):
            failed.result()


def test_a_wrong_score_is_reported_with_its_row(reward_file):
    path = reward_file("def main(inputs): return [{'overall': 1.0}, {'overall': float('nan')}]")
    with make_manager(path) as manager:
        job = manager.start()
        job.submit([10, 11], rows(["a", "b"]))

        with pytest.raises(
            ValueError, match=r"(?s)`overall` must be a finite number, got nan for row 11.*response: 'b'"
        ):
            job.result()


HANGS = {
    "in python": ("while True: time.sleep(1)", "time.sleep(1)"),
    "in a regular expression, which holds the interpreter": ("re.match('(a+)+b', 'a' * 64)", ""),
}


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param(statement, marks=[pytest.mark.nightly] * (name == "in python"), id=name)
        for name, (statement, _) in HANGS.items()
    ],
)
def test_a_hanging_call_is_killed_and_its_line_and_row_are_named(reward_file, statement):
    path = reward_file(
        f"""
        import re, time
        REWARD_TYPE = "sequential"
        def judge():
            {statement}
        def main(row):
            if row["response"] == "hang":
                judge()
            return {{"overall": 1.0}}
        """
    )
    with make_manager(path, timeout_s=2.0) as manager:
        (hanging,) = pids_of(manager)
        job = manager.start()
        job.submit([6], rows(["hang"]))

        with pytest.raises(TimeoutError) as caught:
            job.result()
        message = str(caught.value)
        assert f"reward function {path}:main did not return within `worker.reward.timeout_s` (2 s)" in message
        assert f"it is at {path}:4, in judge" in message
        assert f'File "{path}", line 7, in main' in message
        assert "for row 6\n  prompt: 'say'\n  response: 'hang'" in message
        assert not is_alive(hanging)

        job = manager.start()  # the pool continues with another process
        job.submit([0], rows(["fine"]))
        assert job.result() == {"overall": [1.0]}


@pytest.mark.parametrize(
    "statement",
    by_day(["await asyncio.sleep(100)", "time.sleep(100)"], "await asyncio.sleep(100)"),
    ids=["waiting", "blocking"],
)
def test_a_hanging_async_call_is_named(reward_file, statement):
    path = reward_file(
        f"""
        import asyncio, time
        REWARD_TYPE = "sequential"
        async def main(row):
            {statement}
            return {{"overall": 1.0}}
        """
    )
    with make_manager(path, timeout_s=0.3) as manager:
        job = manager.start()
        job.submit([6], rows(["hang"]))

        with pytest.raises(
            TimeoutError, match=rf"(?s)it is at {path}:4, in main.*for row 6\n.*response: 'hang'"
        ):
            job.result()


@pytest.mark.parametrize(
    ("statement", "how"),
    [
        ("os._exit(3)", r"exited with status 3 \(did the function call `exit`\?\)"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL, as the kernel does when memory runs out"),
        ("ctypes.string_at(0)", "was killed by SIGSEGV"),
    ],
)
def test_the_death_of_a_process_is_reported_at_once(reward_file, statement, how):
    path = reward_file(
        f"""
        import ctypes, os
        REWARD_TYPE = "sequential"
        def main(row):
            if row["response"] == "die":
                {statement}
            return {{"overall": 1.0}}
        """
    )
    with make_manager(path, timeout_s=60) as manager:
        job = manager.start()
        start = time.monotonic()
        job.submit([2], rows(["die"]))
        with pytest.raises(
            RuntimeError, match=rf"(?s)reward function {path}:main {how} while it scored row 2.*'die'"
        ):
            job.result()
        assert time.monotonic() - start < 30.0

        job = manager.start()
        job.submit([0], rows(["fine"]))
        assert job.result() == {"overall": [1.0]}


def test_a_crash_shows_the_line_of_the_crash(reward_file):
    path = reward_file("import ctypes\ndef main(inputs):\n    ctypes.string_at(0)\n")
    with make_manager(path) as manager:
        job = manager.start()
        job.submit([2], rows(["die"]))

        with pytest.raises(RuntimeError, match=rf'(?s)Segmentation fault.*File "{path}", line 3 in main'):
            job.result()


def test_an_idle_process_that_is_killed_is_replaced(reward_file):
    with make_manager(reward_file(LENGTH)) as manager:
        (first,) = pids_of(manager)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: pids_of(manager) not in ([], [first]))
        job = manager.start()
        job.submit([0], rows(["a"]))

        assert job.result() == {"overall": [1.0]}


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("import os\nos._exit(7)", RuntimeError, "the process that imports .*reward.py exited with status 7"),
        ("1 / 0", ValueError, "importing .*reward.py failed: ZeroDivisionError: division by zero at .*:1"),
        ("def compute_score(inputs): ...", ValueError, "write .*:compute_score"),
    ],
)
def test_a_file_that_cannot_be_imported_fails_the_start(reward_file, source, error, message):
    with pytest.raises(error, match=message):
        make_manager(reward_file(source), num_cpus=2)


def test_the_reason_arrives_though_its_process_ended_before_it_was_read(reward_file, monkeypatch):
    start = ChildProcess.start

    def start_and_wait(serve):
        child = start(serve)
        wait_until(child.has_ended)
        return child

    monkeypatch.setattr(ChildProcess, "start", start_and_wait)
    with pytest.raises(ValueError, match=r"importing .*reward.py failed: ZeroDivisionError"):
        make_manager(reward_file("1 / 0"))


def test_closing_leaves_no_process_not_even_those_of_the_function(reward_file, tmp_path):
    path = reward_file(
        """
        import pathlib, subprocess
        REWARD_TYPE = "sequential"
        def main(row):
            child = subprocess.Popen(["sleep", "1000"])
            pathlib.Path(row["note"]).write_text(str(child.pid))
            child.wait()
        """
    )
    note = tmp_path / "pid"
    manager = make_manager(path, num_cpus=2)
    job = manager.start()
    job.submit([0], rows(["a"], note=str(note)))
    wait_until(lambda: note.exists() and note.read_text())
    pids = [*pids_of(manager), int(note.read_text())]
    assert all(is_alive(pid) for pid in pids)

    manager.close()

    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    with pytest.raises(RuntimeError, match="the reward pool was closed"):
        job.result()
    with pytest.raises(RuntimeError, match="the reward pool was closed"):
        manager.start().submit([1], rows(["a"]))
    manager.close()


def test_a_killed_controller_leaves_no_process_even_amid_a_call(reward_file):
    path = reward_file("import re\nREWARD_TYPE = 'sequential'\ndef main(row): re.match('(a+)+b', 'a' * 64)")
    controller = f"""
import time
from verl.config.worker import RewardConfig
from verl.rewards.manager import RewardManager
manager = RewardManager(RewardConfig(reward_function={path!r}, num_cpus=2))
job = manager.start()
job.submit([0], [{{"response": "hang"}}])
time.sleep(0.2)
print(*[process.pid for process in manager.pool._processes], flush=True)
time.sleep(1000)
"""
    process = subprocess.Popen([sys.executable, "-c", controller], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2 and all(is_alive(pid) for pid in pids)

    process.kill()
    process.wait()

    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_the_pool_starts_faster_than_torch_is_imported(reward_file):
    path = reward_file(
        """
        import time
        REWARD_TYPE = "sequential"
        SECONDS = time.process_time()
        def main(row):
            return {"overall": SECONDS}
        """
    )
    start = time.process_time()
    with make_manager(path) as manager:
        seconds = time.process_time() - start
        job = manager.start()
        job.submit([0], rows(["a"]))
        (seconds_there,) = job.result()["overall"]

    assert seconds + seconds_there < 1.0  # 0.1 s of the processors on an idle machine, torch takes 2 s
