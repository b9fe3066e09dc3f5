# SPDX-License-Identifier: Apache-2.0
"""Overview, config differences and exports of run folders as the loggers write them."""

import csv
import io
import json
import os
import subprocess
import sys

import pytest

from tests.helpers.demo_runs import write_run
from tests.helpers.viewer import ROOT
from verl.logger.base import Run
from verl.logger.file import FileLogger
from verl.viewer.overview import compare_configs, overview
from verl.viewer.queries import exported_metrics
from verl.viewer.runs import open_runs, run_state, write_notes

SAID = {"data": {"n": 8, "files": ["a", "b"]}, "trainer": {"max_steps": 3, "name": "one"}}


def run_of(folder, *steps, config=None):
    logger = FileLogger(Run("demo", folder.name, folder, config or {}))
    for step, metrics in enumerate(steps, start=1):
        logger.log(metrics, step)
    (run,) = open_runs([folder])
    return run


def test_a_line_has_progress_results_times_and_notes(tmp_path):
    rewards, scores = (0.2, 0.8, 0.5), (None, 0.4, 0.3)
    steps = [
        {"reward/overall": reward, "perf/throughput": 100.0 * step, "timing_s/step": 2.0}
        | ({} if score is None else {"val/reward_score": score})
        for step, (reward, score) in enumerate(zip(rewards, scores, strict=True), start=1)
    ]
    run = run_of(tmp_path, *steps, config=SAID)
    os.utime(tmp_path / "experiment_config.json", (1000, 1000))
    write_notes(tmp_path, {"note": "short prompts", "tags": ["keep"]})

    line = overview(run)

    assert line.pop("updated") == pytest.approx((tmp_path / "experiment_log.jsonl").stat().st_mtime)
    assert line == {
        "state": "finished", "step": 3, "total_steps": 3, "started": 1000.0,
        "seconds": 6.0, "tokens_per_s": 200.0,
        "reward": {"name": "reward/overall", "last": 0.5, "best": 0.8, "best_step": 2},
        "validation": {"name": "val/reward_score", "last": 0.3, "best": 0.4, "best_step": 2},
        "note": "short prompts", "tags": ["keep"], "problem": "",
    }  # fmt: skip


def test_fine_tuning_is_best_where_its_loss_is_smallest(tmp_path):
    line = overview(
        run_of(tmp_path, *({"train/loss": loss, "val/loss": loss + 1} for loss in (3.0, 1.0, 2.0)))
    )

    assert line["reward"] == {"name": "train/loss", "last": 2.0, "best": 1.0, "best_step": 2}
    assert line["validation"]["best"] == 2.0


def test_an_empty_or_damaged_run_has_a_line_of_nothing(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "experiment_config.json").write_text('{"trainer": {"max_')
    (tmp_path / "notes.json").write_text('{"note": 7}')
    (run,) = open_runs([tmp_path])

    line = overview(run)

    assert (line["step"], line["reward"], line["total_steps"], line["seconds"]) == (None, None, None, None)
    assert line["problem"] == "notes.json: `note` must be a text of at most 10000 characters"


@pytest.mark.parametrize(("last", "state"), [(2, "stopped"), (3, "finished")])
def test_a_run_that_ended_before_its_last_step_is_not_finished(tmp_path, last, state):
    assert overview(run_of(tmp_path, *[{"reward/overall": 0.0}] * last, config=SAID))["state"] == state


def test_the_state_follows_the_lock_through_a_runs_life(tmp_path):
    assert run_state(tmp_path) == "ended"
    code = (
        "import sys; from types import SimpleNamespace\n"
        "from verl.trainer.run.run_lock import locked_run_folder\n"
        f"with locked_run_folder(SimpleNamespace(checkpoint_folder={str(tmp_path)!r})):\n"
        "    print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    for end, state in (("close", "ended"), ("kill", "killed")):
        run = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert run.stdout.readline() == "locked\n"
        assert run_state(tmp_path) == "running"
        assert run_state(tmp_path) == "running"  # asking did not release it
        run.stdin.close() if end == "close" else run.kill()
        run.wait(20)
        assert run_state(tmp_path) == state


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_something_else_named_like_the_lock_is_not_opened(tmp_path, kind):
    path = tmp_path / "run.lock"
    make = {
        "link": lambda: path.symlink_to("/dev/zero"),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    make[kind]()

    assert run_state(tmp_path) == "unknown"


def test_only_options_that_differ_are_compared_by_path(tmp_path):
    other = {"data": {"n": 8, "files": ["a"]}, "trainer": {"max_steps": 3}}
    runs = [run_of(tmp_path / name, {}, config=config) for name, config in (("x", SAID), ("y", other))]

    assert compare_configs(runs) == [
        {"option": "data.files", "values": ['["a", "b"]', '["a"]']},
        {"option": "trainer.name", "values": ['"one"', None]},
    ]
    assert [row["option"] for row in compare_configs(runs, with_equal=True)] == [
        "data.files", "data.n", "trainer.max_steps", "trainer.name",
    ]  # fmt: skip
    assert compare_configs(runs[:1]) == []


def test_exports_hold_what_was_logged(tmp_path):
    write_run(tmp_path / "a", steps=20)
    run_of(tmp_path / "b", {"reward/overall": 0.5}, {"=cmd|calc": 1.0})
    runs = open_runs([tmp_path])

    rows = [*csv.DictReader(io.StringIO("".join(exported_metrics(runs, "csv"))))]
    lines = [json.loads(line) for line in "".join(exported_metrics(runs, "jsonl")).splitlines()]

    assert [(row["run"], int(row["step"])) for row in rows] == [(line["run"], line["step"]) for line in lines]
    assert [line["step"] for line in lines] == [*range(21), 1, 2]
    for row, line in zip(rows, lines, strict=True):
        assert row["reward/overall"] == str(line.get("reward/overall", ""))
        assert row["val/reward_score"] == str(line.get("val/reward_score", ""))
    assert lines[-1] == {"run": "b", "step": 2, "=cmd|calc": 1.0}
    assert rows[-1]["'=cmd|calc"] == "1.0"  # a spreadsheet shows the name instead of computing it
