# SPDX-License-Identifier: Apache-2.0
"""The phases of a run's start on its console."""

import io
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from tests.logger.test_console import CONTROL, Clock
from verl.config.trainer import RunConfig
from verl.logger.base import Run
from verl.logger.console import start_up as module
from verl.logger.console.logger import ConsoleLogger
from verl.logger.console.start_up import StartUp, finish_start_up, phase, shown_start_up

RUN = RunConfig(logger=("console",), nnodes=1, n_gpus_per_node=2, save_checkpoint_path="/runs/first")


def console_of(output, terminal=False):
    return Console(file=output, width=80, force_terminal=terminal, highlight=False)


@pytest.fixture
def output(monkeypatch):
    output = io.StringIO()
    monkeypatch.setattr(module, "stdout_console", lambda: console_of(output))
    return output


def test_each_phase_is_a_line_with_its_seconds(output, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "StartUp", partial(StartUp, now=clock))
    with shown_start_up(RUN):
        with phase("libraries"):
            clock.seconds += 0.25
        with phase("Ray"):
            clock.seconds += 12
        finish_start_up()
        finish_start_up()  # after a restart inside the same process, for example

    lines = output.getvalue().splitlines()
    assert lines[0] == "starting easy_r1/demo with 2 processes: /runs/first"
    assert lines[1] == "  libraries                 0.2 s"
    assert lines[2] == "  Ray                      12.0 s"
    assert lines[3] == "ready after 12.2 s"
    assert len(lines) == 4
    assert "\x1b" not in output.getvalue()


def test_a_run_without_the_console_shows_nothing(output):
    with shown_start_up(RunConfig(logger=("file",))), phase("data"):
        pass
    with phase("data"):  # no run is starting
        pass

    assert output.getvalue() == ""


def test_json_leaves_stdout_to_the_steps(monkeypatch, output):
    errors = io.StringIO()
    monkeypatch.setattr(module, "stderr_console", lambda: console_of(errors))
    with shown_start_up(RunConfig(logger=("console",), console="json")), phase("data"):
        pass

    assert output.getvalue() == "" and "  data  " in errors.getvalue()


def test_a_phase_that_fails_is_not_said_to_be_done(output):
    with pytest.raises(ValueError, match="bad"), shown_start_up(RUN), phase("data"):
        raise ValueError("bad")

    assert "data" not in output.getvalue() and "ready" not in output.getvalue()
    assert module._shown == []


def test_without_a_terminal_a_long_phase_is_not_silent():
    output = io.StringIO()
    start_up = StartUp(console_of(output), "starting", now=Clock(), quiet_s=0.05)
    with start_up.phase("models and engine"):
        deadline = time.monotonic() + 60
        while "..." not in output.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    start_up.finish()

    assert output.getvalue().splitlines()[1] == "  models and engine 0 s ..."


def test_on_a_terminal_a_line_below_shows_the_running_phases_until_the_steps_take_it():
    output = io.StringIO()
    console = console_of(output, terminal=True)
    start_up = StartUp(console, "starting", now=Clock())
    module._shown.append(start_up)
    try:
        with phase("Ray"), phase("data"):
            start_up._live.refresh()
            sys.stderr.write("a warning\n")
        logger = ConsoleLogger(Run("p", "e", Path("unused"), total_steps=4), console)
        with phase("first validation"):
            logger.stage("validation")
        finish_start_up()
        logger.close()
    finally:
        module._shown.clear()

    lines = [line.strip() for line in CONTROL.sub("", output.getvalue()).replace("\r", "\n").splitlines()]
    assert "Ray 0 s, data 0 s ..." in lines
    assert "a warning" in lines
    assert "first validation          0.0 s" in lines


@pytest.mark.parametrize("module_name", ["verl.trainer.main", "verl.trainer.sft"])
def test_the_first_line_is_there_before_anything_heavy_is_imported(tmp_path, module_name):
    code = f"""
import sys
from verl.config.trainer import RunConfig
from verl.logger.console.start_up import shown_start_up
import {module_name}
with shown_start_up(RunConfig(logger=("console",))):
    print("heavy" if {{"torch", "ray", "transformers"}} & set(sys.modules) else "light")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)

    assert done.stderr == ""
    assert done.stdout.splitlines()[0].startswith("starting easy_r1/demo with 8 processes: ")
    assert done.stdout.splitlines()[1] == "light"
