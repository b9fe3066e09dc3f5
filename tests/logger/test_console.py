# SPDX-License-Identifier: Apache-2.0
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from verl.logger import console as console_module
from verl.logger.base import Generation, Run
from verl.logger.console import ConsoleLogger, StepClock

RUN = Run("project", "experiment", Path("unused"), total_steps=4)


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def make_logger(terminal: bool) -> tuple[ConsoleLogger, io.StringIO]:
    output = io.StringIO()
    return ConsoleLogger(RUN, Console(file=output, force_terminal=terminal, width=160)), output


def test_the_time_left_is_the_mean_step_time_times_the_remaining_steps():
    now = Clock()
    clock = StepClock(10, now)
    now.seconds = 100.0  # loading
    assert clock.eta_s(0) is None

    for step, seconds in ((1, 4.0), (2, 6.0)):
        clock.begin_step(step)
        now.seconds += seconds
        clock.end_step()
    assert clock.eta_s(finished_step=2) == 8 * 5.0
    assert clock.elapsed_s() == 110.0

    clock.begin_step(3)
    now.seconds += 2.0
    assert clock.eta_s(finished_step=2) == 8 * 5.0 - 2.0
    now.seconds += 100.0  # slower than ever: at least the seven steps after this one
    assert clock.eta_s(finished_step=2) == 7 * 5.0


def test_the_steps_before_a_resume_do_not_count_into_the_pace():
    now = Clock()
    clock = StepClock(10, now)
    clock.begin_step(8)
    now.seconds += 3.0
    clock.end_step()

    assert clock.eta_s(finished_step=8) == 2 * 3.0


def test_without_a_terminal_each_step_and_area_is_a_plain_line():
    logger, output = make_logger(terminal=False)
    logger.begin_step(1)
    logger.stage("gen")
    logger.progress(8, 16, "responses")
    logger.log(
        {"reward/overall": 0.51234, "actor/pg_loss": 0.1, "actor/grad_norm": 2.0, "critic/score/mean": 1.0}, 1
    )
    logger.close()

    lines = output.getvalue().splitlines()
    assert re.fullmatch(r"step 1/4: 0\.0 s, elapsed 0:00:00, eta 0:00:00", lines[0])
    assert [line.split() for line in lines[1:]] == [
        ["reward", "overall", "0.5123"],
        ["actor", "pg_loss", "0.1", "·", "grad_norm", "2"],
        ["critic", "score/mean", "1"],
    ]
    assert "\x1b" not in output.getvalue()


def test_without_a_terminal_a_long_stage_prints_occasional_lines(monkeypatch):
    monkeypatch.setattr(console_module, "QUIET_S", 0.0)
    logger, output = make_logger(terminal=False)
    logger.begin_step(2)
    logger.stage("gen")
    logger.progress(96, 256, "responses")

    assert re.search(r"step 2/4: gen 96/256 responses 0 s · elapsed", output.getvalue())


def test_on_a_terminal_a_bar_shows_stage_times_and_key_metrics():
    logger, output = make_logger(terminal=True)
    logger.begin_step(1)
    logger.log({"reward/overall": 0.5, "response_length/mean": 120.0, "perf/cpu_memory_used_gb": 3.0}, 1)
    logger.begin_step(2)
    logger.stage("update_actor")
    logger.progress(1, 4, "micro-batches")
    logger._bar.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    logger.close()

    last = shown.split("\r")[-1]
    assert re.search(r"step 2/4 .*update_actor 1/4 micro-batches 0 s · elapsed 0:00:0\d, eta 0:00:0\d", last)
    assert "reward 0.5 · length 120" in last
    assert "cpu_memory" not in last
    assert logger._bar.tasks[0].completed == 1


def test_metrics_before_the_first_step_end_no_step():
    logger, output = make_logger(terminal=False)
    logger.log({"val/reward_score": 0.25}, 0)

    assert output.getvalue().splitlines() == ["step 0", "  val              reward_score 0.25"]
    assert logger._clock.num_finished_steps == 0


def test_generations_are_printed_verbatim():
    logger, output = make_logger(terminal=False)
    logger.log_generations([Generation("1 + 1?", "[bold]2[/bold]", "2", 1.0)], 3)

    assert output.getvalue().splitlines() == [
        "validation at step 3, response 1/1",
        "  [prompt] 1 + 1?",
        "  [response] [bold]2[/bold]",
        "  [ground_truth] 2",
        "  [score] 1.0",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_closing_twice_is_harmless(terminal):
    logger, _ = make_logger(terminal)
    logger.close()
    logger.close()
