# SPDX-License-Identifier: Apache-2.0
"""A logger that raises or never answers costs its own lines and one warning, and holds up nothing."""

import resource
import subprocess
import sys
import threading
import time

import pytest
from safetensors.torch import save_file

from tests.helpers.training import ROOT
from verl.logger.base import LOGGERS, Generation, Logger, Run
from verl.logger.file import read_log
from verl.logger.tracker import Tracker

PLACES = ["__init__", "log", "log_generations", "close"]
WAIT_S = 1.0  # instead of a minute


@pytest.fixture
def released():
    """An event that hanging loggers wait for: no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("logger "):
            thread.join(5)


def register(monkeypatch, name, place, deed, *, is_local=False):
    """Register a logger that records its calls and does `deed` in one of them; return the record."""
    calls = []

    def method(called):
        def call(self, *arguments):
            if called == place:
                deed()
            calls.append((called, *arguments))

        return call

    members = {called: method(called) for called in PLACES} | {"is_local": is_local}
    monkeypatch.setitem(LOGGERS._functions, name, type(name, (Logger,), members))
    return calls


def log_three_steps(names, folder):
    with Tracker(names, Run("project", "experiment", folder)) as tracker:
        for step in (1, 2, 3):
            tracker.begin_step(step)
            tracker.log({"actor/pg_loss": step / 2}, step)
            tracker.log_generations([Generation("q", "r", "g", 1.0)], step)


def fail():
    raise ConnectionError("the service is down")


def leave():
    raise SystemExit(1)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "loses lines" in record.getMessage()]


@pytest.mark.parametrize("is_local", [True, False], ids=["in the run's thread", "in its own"])
@pytest.mark.parametrize("place", PLACES)
def test_a_logger_that_raises_costs_its_own_lines_and_one_warning(
    place, is_local, tmp_path, monkeypatch, caplog
):
    broken = register(monkeypatch, "broken", place, fail, is_local=is_local)
    sound = register(monkeypatch, "sound", None, None, is_local=is_local)

    log_three_steps(["broken", "file", "sound"], tmp_path)

    (warning,) = warnings_of(caplog)
    assert "logger=broken cause=ConnectionError: the service is down" in warning
    assert [entry["actor/pg_loss"] for entry in read_log(tmp_path)] == [0.5, 1.0, 1.5]
    assert [called for called, *_ in sound] == ["__init__", *["log", "log_generations"] * 3, "close"]
    expected = [] if place == "__init__" else [call for call, *_ in sound if call != place]
    assert [called for called, *_ in broken] == expected


@pytest.mark.parametrize("place", PLACES)
def test_a_logger_that_hangs_holds_up_nothing(place, tmp_path, monkeypatch, caplog, released):
    monkeypatch.setattr("verl.logger.tracker.OPEN_S", WAIT_S)
    monkeypatch.setattr("verl.logger.tracker.CLOSE_S", WAIT_S)
    register(monkeypatch, "hanging", place, released.wait)
    sound = register(monkeypatch, "sound", None, None)

    started = time.monotonic()
    log_three_steps(["hanging", "file", "sound"], tmp_path)

    # At most one wait at the start and one at the end; steps wait for nothing: a call that hangs has no end.
    assert time.monotonic() - started < 2 * WAIT_S + 30
    assert len(warnings_of(caplog)) == 1 and "logger=hanging" in caplog.text
    assert [entry["actor/pg_loss"] for entry in read_log(tmp_path)] == [0.5, 1.0, 1.5]
    assert [arguments for called, *arguments in sound if called == "log"] == [
        [{"actor/pg_loss": step / 2}, step] for step in (1, 2, 3)
    ]


def test_a_package_that_ends_the_process_ends_only_its_own_lines(tmp_path, monkeypatch, caplog):
    register(monkeypatch, "leaving", "log", leave)

    log_three_steps(["leaving", "file"], tmp_path)

    assert len(warnings_of(caplog)) == 1 and len(read_log(tmp_path)) == 3


def test_a_logger_that_never_answers_keeps_a_bounded_number_of_lines(tmp_path, monkeypatch, caplog, released):
    monkeypatch.setattr("verl.logger.tracker.MAX_WAITING", 5)
    monkeypatch.setattr("verl.logger.tracker.CLOSE_S", WAIT_S)
    calls = register(monkeypatch, "slow", "log", released.wait)

    with Tracker(["slow"], Run("p", "e", tmp_path)) as tracker:
        for step in range(1, 101):
            tracker.log({"a": 1.0}, step)
        released.set()

    # The first line is in the hanging call, five wait behind it; the end is never dropped.
    steps = [step for called, *_, step in calls if called == "log"]
    assert steps[:5] == [1, 2, 3, 4, 5] and len(steps) <= 6
    assert calls[-1] == ("close", False)
    assert len(warnings_of(caplog)) == 1 and "5 calls wait for it" in caplog.text


def test_the_file_loses_only_the_lines_for_which_there_was_no_room(tmp_path, caplog):
    with Tracker(["file"], Run("p", "e", tmp_path)) as tracker:
        tracker.log({"a": 1.0}, 1)
        size = (tmp_path / "experiment_log.jsonl").stat().st_size
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 7, before[1]))  # cuts off a write, as a full disk
        try:
            for step in (2, 3):
                tracker.log({"a": 1.0}, step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        tracker.log({"a": 1.0}, 4)

    assert [entry["step"] for entry in read_log(tmp_path)] == [1, 4]
    assert len((tmp_path / "experiment_log.jsonl").read_text().splitlines()) == 2
    assert len(warnings_of(caplog)) == 1


def test_the_file_opens_once_its_folder_can_be_made(tmp_path, caplog):
    (tmp_path / "run").touch()  # in the place of the folder

    with Tracker(["file"], Run("p", "e", tmp_path / "run", {"a": 1})) as tracker:
        tracker.log({"a": 1.0}, 1)
        (tmp_path / "run").unlink()
        tracker.log({"a": 1.0}, 2)

    assert [entry["step"] for entry in read_log(tmp_path / "run")] == [2]
    assert (tmp_path / "run" / "experiment_config.json").is_file()
    assert len(warnings_of(caplog)) == 1


HANGING_RUN = """
import atexit, sys, threading
from verl.config.sft import SFTConfig
from verl.logger import tracker
from verl.logger.base import LOGGERS, Logger, Run
from verl.planning.planned_run import planned_sft
from verl.trainer import command
from verl.trainer.run.exit_status import ExitStatus

never = threading.Event()
tracker.CLOSE_S = tracker.HURRY_S = 0.3

@LOGGERS.register("hanging")
class Hanging(Logger):
    def close(self, failed=False):
        atexit.register(never.wait)  # as packages do that wait until everything is sent
        never.wait()

def train_once(config):
    with tracker.Tracker(["hanging"], Run("p", "e", None)):
        if sys.argv[1] == "interrupted":
            raise SystemExit(143)
        return ExitStatus(int(sys.argv[1]), "the last line")

arguments = ["data.train_files=x.jsonl", "worker.actor.model.model_path=model", "trainer.logger=[file]",
             "data.val_files=", "trainer.val_before_train=false", "trainer.device=cpu",
             "trainer.n_gpus_per_node=1", "trainer.save_checkpoint_path=run"]
command.train_once = train_once
sys.exit(command.TrainingCommand(SFTConfig, "", planned_sft, None).run(arguments))
"""


@pytest.mark.parametrize(("end", "status"), [("0", 0), ("1", 1), ("interrupted", 143)])
def test_a_hanging_service_changes_neither_the_end_of_a_run_nor_its_exit_status(end, status, tmp_path):
    (tmp_path / "x.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    save_file({}, tmp_path / "model" / "model.safetensors")
    env = {"PYTHONPATH": str(ROOT)}

    finished = subprocess.run(
        [sys.executable, "-c", HANGING_RUN, end], cwd=tmp_path, env=env, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip

    assert finished.returncode == status, finished.stderr
    assert "logger=hanging cause=it did not end in time" in finished.stderr
    assert "Traceback" not in finished.stderr
