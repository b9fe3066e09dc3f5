# SPDX-License-Identifier: Apache-2.0
"""The console of a run, line by line."""

import io
import json
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from verl.logger.base import Generation, Run
from verl.logger.console import logger as console_module
from verl.logger.console.bar import LiveBar, StepClock
from verl.logger.console.logger import ConsoleLogger
from verl.logger.console.table import number
from verl.utils.rank_logger import get_logger

VALIDATION = {"val/reward_score": 0.25, "val_response_length/mean": 9.0}
STEP = {
    "reward/overall": 0.51234,
    "response_length/mean": 120.25,
    "response_length/clip_ratio": 0.125,
    "actor/entropy": 1.5,
    "actor/grad_norm": 0.03,
    "actor/lr": 1e-6,
    "rollout/log_probs_diff_mean": 4.1e-7,
    "perf/throughput": 12345.6,
    "perf/time_per_step": 7.25,
    "critic/score/mean": 0.5,
}
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture(autouse=True)
def still(monkeypatch):
    """A clock for the loggers that stands still: lines do not depend on what else the machine does."""
    monkeypatch.setattr(console_module, "StepClock", partial(StepClock, now=Clock()))


def make_logger(*, terminal=False, width=80, console="compact", total_steps=150, config=None):
    output = io.StringIO()
    run = Run("project", "experiment", Path("unused"), config or {}, total_steps, console=console)
    return ConsoleLogger(run, Console(file=output, force_terminal=terminal, width=width)), output


def log_steps(logger, *steps, first=1):
    for step, metrics in enumerate(steps, start=first):
        logger.begin_step(step)
        logger.log(metrics, step)
    logger.close()


def lines_of(output):
    return output.getvalue().splitlines()


def test_the_time_left_is_the_mean_step_time_times_the_remaining_steps():
    now = Clock()
    clock = StepClock(10, now)
    now.seconds = 100.0  # loading
    assert clock.eta_s() is None

    for step, seconds in ((1, 4.0), (2, 6.0)):
        clock.begin_step(step)
        now.seconds += seconds
        clock.end_step()
    assert clock.eta_s() == 8 * 5.0
    assert clock.elapsed_s() == 110.0

    clock.begin_step(3)
    now.seconds += 2.0
    assert clock.eta_s() == 8 * 5.0 - 2.0
    now.seconds += 100.0  # slower than ever: at least the seven steps after this one
    assert clock.eta_s() == 7 * 5.0


def test_the_steps_before_a_resume_do_not_count_into_the_pace():
    now = Clock()
    clock = StepClock(10, now)
    clock.begin_step(8)
    now.seconds += 3.0
    clock.end_step()

    assert clock.eta_s() == 2 * 3.0


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (0.51234, 3, "0.512"),
        (-0.25, 3, "-0.250"),
        (-12.5, 3, "-12.50"),
        (0.0, 4, "0.0000"),
        (4.1e-7, 4, "4e-07"),  # zero would be wrong
        (123456.0, 0, "123456"),
        (1234567.0, 0, "1235k"),  # 1234.6k has seven characters
        (0.0009312, None, "9e-04"),
        (float("nan"), 3, "nan"),
        (float("-inf"), 3, "-inf"),
    ],
)
def test_a_number_fits_its_column(value, decimals, text):
    assert number(value, decimals, 6) == text


def test_conversations_have_columns_for_their_turns_and_calls():
    logger, output = make_logger(width=80)
    log_steps(logger, STEP | {"agent/turns_mean": 2.5, "agent/tool_calls": 1.25})

    header, row = lines_of(output)
    columns = dict(zip(header.split(), row.split(), strict=True))
    assert (columns["turns"], columns["calls"]) == ("2.5", "1.2")


def test_at_80_columns_a_step_is_one_line_with_all_that_matters():
    logger, output = make_logger(width=80)
    log_steps(logger, VALIDATION, STEP, STEP | {"val/reward_score": 0.75}, first=0)

    assert lines_of(output) == [
        "step     reward     val  length    cut  entropy    grad  mismatch  seconds",
        "0/150             0.250",
        "1/150     0.512           120.2   0.12    1.500   0.030   4.1e-07      7.2",
        "2/150     0.512   0.750   120.2   0.12    1.500   0.030   4.1e-07      7.2",
    ]


WITH_KL = {"algorithm": {"disable_kl": False}}
WITHOUT_KL = {"algorithm": {"disable_kl": True}}
LATE_VALIDATION = {"trainer": {"val_before_train": False, "val_freq": 2}}
WITH_TOOLS = {"worker": {"rollout": {"multi_turn": {"enable": True}}}}


@pytest.mark.parametrize("width", [200, 80, 60, 40])
@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (WITH_KL, (VALIDATION, STEP | {"actor/kl_loss": 0.002}, STEP | {"actor/kl_loss": 0.003})),
        (WITHOUT_KL, (VALIDATION, STEP, STEP)),
        (WITH_KL | LATE_VALIDATION, (STEP | {"actor/kl_penalty": 0.1}, STEP | VALIDATION)),
        (WITH_TOOLS, (VALIDATION, STEP | {"agent/turns_mean": 2.5, "agent/tool_calls": 1.25}, STEP)),
    ],
)
def test_the_first_header_has_the_columns_of_all_later_rows_of_the_run(config, steps, width):
    logger, output = make_logger(width=width, config=config)
    log_steps(logger, *steps, first=0)

    header, *rows = lines_of(output)
    assert header.startswith("step") and not any(row.startswith("step") for row in rows)
    for title in re.finditer(r"\S+", header):
        assert any(row[title.end() - 4 : title.end()].strip() for row in rows), f"{title[0]} is always empty"


def test_a_share_of_cut_responses_below_a_percent_keeps_its_place():
    logger, output = make_logger(width=80)
    log_steps(logger, STEP | {"response_length/clip_ratio": 1 / 256}, STEP)  # 0.0039

    header, few, many = lines_of(output)
    assert [line[: header.index("  entropy")].split()[-1] for line in (few, many)] == ["4e-03", "0.12"]
    assert len(header) == len(few) == len(many)


def test_at_120_columns_there_is_room_for_the_throughput_and_the_learning_rate():
    logger, output = make_logger(width=120)
    log_steps(logger, STEP | {"actor/kl_loss": 0.002})

    assert lines_of(output) == [
        "step     reward  length    cut      kl  entropy    grad  mismatch       lr  tokens/s  seconds",
        "1/150     0.512   120.2   0.12  0.0020    1.500   0.030   4.1e-07  1.0e-06     12346      7.2",
    ]


@pytest.mark.parametrize("width", [80, 60, 40, 20])
def test_on_a_narrow_terminal_columns_are_left_out_and_none_is_cut(width):
    logger, output = make_logger(width=width)
    log_steps(logger, STEP | VALIDATION | {"actor/kl_loss": 0.002})
    header, row = lines_of(output)

    kept = {
        80: "step reward val length cut kl grad mismatch seconds",
        60: "step reward val length kl grad seconds",
        40: "step reward val length seconds",
        20: "step reward",
    }
    assert header.split() == kept[width].split()
    assert len(row) == len(header) <= width
    assert [match.end() for match in re.finditer(r"\S+", header)][1:] == [
        match.end() for match in re.finditer(r"\S+", row)
    ][1:]


def test_the_header_is_repeated_after_twenty_rows():
    logger, output = make_logger(total_steps=45)
    log_steps(logger, *[STEP] * 45)

    headers = [index for index, line in enumerate(lines_of(output)) if line.startswith("step")]
    assert headers == [0, 21, 42]


def test_a_column_of_a_metric_that_appears_later_gets_a_header():
    logger, output = make_logger()
    log_steps(logger, STEP, STEP | VALIDATION)

    titles = [line.split() for line in lines_of(output) if line.startswith("step")]
    assert ["val" in header for header in titles] == [False, True]


def test_fine_tuning_has_its_own_columns():
    logger, output = make_logger()
    step = {
        "train/loss": 2.125, "train/grad_norm": 1.5, "train/lr": 1e-5, "train/num_tokens": 8.0,
        "perf/throughput": 850.0, "perf/time_per_step": 0.5,
    }  # fmt: skip
    log_steps(logger, {"val/loss": 2.5}, step, first=0)

    assert lines_of(output) == [
        "step       loss  val loss    grad       lr  tokens/s  seconds",
        "0/150              2.5000",
        "1/150    2.1250             1.500  1.0e-05       850      0.5",
    ]


@pytest.mark.parametrize("console", ["compact", "full", "json"])
def test_a_pipe_gets_no_control_codes(console):
    logger, output = make_logger(console=console)
    logger.stage("gen")
    logger.progress(8, 16, "responses")
    logger.log_generations([Generation("1 + 1?", "2", "2", 1.0)], 0)
    log_steps(logger, STEP)

    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", output.getvalue())


@pytest.mark.parametrize("console", ["compact", "full"])
def test_without_a_terminal_a_long_stage_prints_occasional_lines(monkeypatch, console):
    monkeypatch.setattr(console_module, "QUIET_S", 0.0)
    logger, output = make_logger(console=console)
    logger.begin_step(2)
    logger.stage("gen")
    logger.progress(96, 256, "responses")

    assert lines_of(output) == ["step 2/150: gen 96/256 responses 0 s, elapsed 0:00:00"]


def test_json_is_one_object_per_step_and_nothing_else(monkeypatch):
    monkeypatch.setattr(console_module, "QUIET_S", 0.0)
    logger, output = make_logger(console="json", terminal=True)
    logger.stage("gen")
    logger.progress(96, 256, "responses")
    logger.log_generations([Generation("1 + 1?", "2", "2", 1.0)], 1)
    log_steps(logger, STEP | {"actor/kl": float("nan")}, STEP)

    first, second = map(json.loads, lines_of(output))
    assert first["step"] == 1 and first["reward"] == {"overall": 0.51234}
    assert first["actor"]["kl"] is None
    assert second["step"] == 2


def make_bar(now, metrics):
    clock = StepClock(150, now)
    clock.begin_step(17)
    now.seconds += 4.0
    clock.end_step()
    clock.begin_step(18)
    clock.stage("gen")
    clock.units = "128/256 responses"
    now.seconds += 1.0
    return LiveBar(clock, lambda: metrics)


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (120, "reward 0.126  gen 128/256 responses 1 s   step 18/150 ━━──────────────────  eta 0:08:51"
              "  val 0.500  elapsed 0:00:05"),
        (80, "reward 0.126  gen 128/256 responses 1 s   step 18/150  eta 0:08:51  val 0.500"),
        (60, "reward 0.126  gen 128/256 responses 1 s   step 18/150"),
        (42, "reward 0.126  gen 128/256 responses 1 s"),
    ],
)  # fmt: skip
def test_the_live_line_has_the_reward_first_and_drops_whole_parts(width, line):
    bar = make_bar(Clock(), {"reward/overall": 0.1258, "val/reward_score": 0.5})

    text = bar.line(width).plain

    assert text == line
    assert len(text) <= width


def test_the_live_line_of_fine_tuning_shows_the_loss():
    bar = make_bar(Clock(), {"train/loss": 2.5, "val/loss": 2.25})

    assert re.match(r"loss 2\.5000  gen .*  val loss 2\.2500  elapsed", bar.line(120).plain)


def test_on_a_terminal_the_live_line_is_below_the_rows_and_other_lines():
    logger, output = make_logger(terminal=True)
    logger.begin_step(1)
    logger.log(STEP | VALIDATION, 1)
    logger.begin_step(2)
    logger.stage("update_actor")
    sys.stdout.write("a line of another package\n")  # stdout and stderr are the live line's while it is shown
    get_logger("verl.tests").warning("a warning")
    logger._live.refresh()
    shown = CONTROL.sub("", output.getvalue()).replace("\r", "\n")
    logger.close()

    lines = [line.rstrip() for line in shown.splitlines() if line.strip()]
    assert "a line of another package" in lines  # whole, on a line of its own
    assert any(re.fullmatch(r"\S+ WARNING verl.tests: a warning", line) for line in lines)
    assert re.match(r"reward 0\.512  update_actor 0 s +step 2/150  eta 0:00:0\d  val 0\.250$", lines[-1])
    assert "1/150     0.512   0.250   120.2   0.12    1.500   0.030   4.1e-07      7.2" in lines


def test_full_shows_what_means_something_in_the_run_by_area():
    logger, output = make_logger(console="full", width=60)
    log_steps(
        logger,
        {
            "reward/overall": 0.5,
            "rollout_corr/kl": 0.1,
            "actor/pg_loss": 0.1,
            "actor/grad_norm": 2.0,
            "actor/entropy": 1.25,
            "perf/max_memory_allocated_gb": 0.0,
            "perf/cpu_memory_used_gb": 1.5,
            "critic/score/mean": 1.0,
            "critic/returns/mean": 0.1,
        },
    )

    heading, *lines = lines_of(output)
    assert heading == "step 1/150: 0.0 s, elapsed 0:00:00, eta 0:00:00"
    assert lines == [
        "  reward              overall 0.5",
        "  actor               pg_loss 0.1 · grad_norm 2",
        "                      entropy 1.25",
        "  perf                cpu_memory_used_gb 1.5",
        "  scores              score/mean 1",
    ]


def test_full_shows_the_critic_the_correction_and_the_gpu_of_runs_that_have_them():
    logger, output = make_logger(console="full")
    log_steps(
        logger,
        {
            "rollout_corr/kl": 0.1,
            "rollout_corr/rollout_is_mean": 1.0,
            "perf/max_memory_allocated_gb": 2.0,
            "critic/returns/mean": 0.1,
            "critic/vf_loss": 0.5,
        },
    )

    assert lines_of(output)[1:] == [
        "  rollout_corr        kl 0.1 · rollout_is_mean 1",
        "  perf                max_memory_allocated_gb 2",
        "  critic              returns/mean 0.1 · vf_loss 0.5",
    ]


@pytest.mark.parametrize("step", [0, 40])
def test_the_first_validation_is_no_step_of_the_pace(step):
    logger, _ = make_logger()
    logger.begin_step(step)
    logger.log(VALIDATION, step)

    assert logger._clock.num_finished_steps == 0
    assert logger._clock.eta_s() is None
    logger.begin_step(step + 1)
    assert logger._clock.finished_step == step


QWEN_PROMPT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|>"
    "<|vision_end|>What color is it?<|im_end|>\n<|im_start|>assistant\n"
)


def test_validation_responses_are_printed_after_their_step_without_template_tokens():
    logger, output = make_logger()
    logger.begin_step(1)
    logger.log_generations([Generation(QWEN_PROMPT, "[bold]red[/bold]<|im_end|>", "red", 1.0)], 1)
    logger.log(STEP, 1)

    assert lines_of(output)[2:] == [
        "validation at step 1",
        "  prompt    Be brief. [image] What color is it?",
        "  response  [bold]red[/bold]",
        f"  answer    {'red':<53}  score 1.000",
    ]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_on_a_terminal_the_responses_are_a_small_panel(width):
    logger, output = make_logger(terminal=True, width=width)
    long = Generation("Count. " * 90, "so " * 500 + "the answer is 7", "7", 0.5)
    logger.log_generations([long, Generation("1 + 1?", "2", "2", 1.0)], 1)
    logger.close()

    shown = CONTROL.sub("", output.getvalue()).replace("\r", "\n").splitlines()
    panel = [line for line in shown if line and line[0] in "╭│╰"]
    assert {len(line) for line in panel} == {min(width, 110)}
    assert len(panel) == 2 + (2 + 3 + 1) + 1 + 3
    assert panel[0].startswith("╭─ validation at step 1 ─")
    assert any("the answer is 7" in line for line in panel)  # the end of a long response
    assert any(" … " in line for line in panel)


def test_a_response_cannot_control_the_terminal():
    logger, output = make_logger(terminal=True)
    logger.log_generations([Generation("p", "\x1b[2Jgone\x07", "a", 0.0)], 1)
    logger.close()

    assert "\x1b[2J" not in output.getvalue() and "\x07" not in output.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_closing_twice_is_harmless(terminal):
    logger, _ = make_logger(terminal=terminal)
    logger.close()
    logger.close()


def test_a_forked_process_does_not_write_through_the_console_whose_lock_a_thread_may_hold(capfd):
    logger, output = make_logger(terminal=True)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # instead of waiting forever
        sys.stderr.write("bad row\n")
        sys.stderr.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    logger.close()

    assert status == 0
    assert "bad row" in capfd.readouterr().err and "bad row" not in output.getvalue()
