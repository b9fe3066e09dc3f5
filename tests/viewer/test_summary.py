# SPDX-License-Identifier: Apache-2.0
"""The summary on a terminal: known metrics, incomplete files, and texts with control codes."""

import io
import json
import os
import pty
import subprocess

import pytest
from rich.console import Console

from tests.helpers.rollouts import rollout, write_log, write_steps
from tests.helpers.viewer import COMMAND
from verl.viewer.rollout_store import RolloutStore
from verl.viewer.runs import open_runs
from verl.viewer.summary import printable, show, sparkline

BELL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\x00\r\n[red]plain[/red]\u200b"


def text_of(*folders, width=80):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(open_runs(folders), console)
    return console.file.getvalue()


def line_of(text, label):
    (line,) = [line for line in text.splitlines() if line.startswith(f"{label} ")]
    return line.split()[len(label.split()) :]


def log_lines(folder, *entries):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "experiment_log.jsonl").open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def test_a_summary_has_last_step_speed_time_left_and_metrics(tmp_path):
    # Rewards 0.2, 0.8, 0.5: first, last, best. 36 s a step: 100 an hour; 7 of 10 steps are left, 252 s.
    for step, reward in enumerate((0.2, 0.8, 0.5), start=1):
        log_lines(
            tmp_path,
            {"step": step, "reward/overall": reward, "val/reward_score": 0.4, "actor/entropy": 1.5,
             "response_length/clip_ratio": 0.25, "timing_s/step": 36.0, "timing_s/gen": 27.0,
             "timing_s/update_actor": 9.0},
        )  # fmt: skip
    (tmp_path / "experiment_config.json").write_text(json.dumps({"trainer": {"max_steps": 10}}))

    text = text_of(tmp_path)

    assert line_of(text, "step") == ["3", "of", "10"]
    assert line_of(text, "steps/hour") == ["100.0"]
    assert line_of(text, "time left") == ["0:04:12"]
    assert line_of(text, "reward") == ["0.200", ">", "0.500", "^0.800", "▁█▄"]  # 0, 7 and 3.5 of 7 up
    assert line_of(text, "entropy") == ["1.5", ">", "1.5", "▁▁▁"]
    assert line_of(text, "cut") == ["0.250", ">", "0.250", "▁▁▁"]  # the console's name
    assert line_of(text, "gen") == ["27.00", "75%", "#########"]  # of 12
    assert line_of(text, "update_actor") == ["9.00", "25%", "###"]
    assert line_of(text, "restarts") == ["0"]


def test_shares_of_phases_add_up_to_the_step_whether_each_step_has_them_or_not(tmp_path):
    # Ten seconds a step; the second also validates for six, which is three on average: 3 of 13.
    log_lines(
        tmp_path,
        {"step": 0, "timing_s/validation": 50.0},  # before the first step
        {"step": 1, "timing_s/step": 10.0, "timing_s/gen": 8.0, "timing_s/sync_weights": 2.0,
         "actor/ppo_kl": 0.0},
        {"step": 2, "timing_s/step": 16.0, "timing_s/gen": 8.0, "timing_s/sync_weights": 2.0,
         "timing_s/validation": 6.0, "actor/ppo_kl": 0.0},
    )  # fmt: skip

    text = text_of(tmp_path)

    assert line_of(text, "gen")[:2] == ["8.00", "62%"]
    assert line_of(text, "validation")[:2] == ["3.00", "23%"]
    assert line_of(text, "other")[:2] == ["2.00", "15%"]
    assert line_of(text, "sync_weights")[:2] == ["2.00", "(inside)"]
    assert "kl " not in text


def test_runs_are_side_by_side_as_far_as_the_width_allows(tmp_path):
    for name in ("first", "second", "third"):
        write_log(tmp_path / name, range(1, 4))

    narrow, wide = text_of(tmp_path), text_of(tmp_path, width=120)

    assert all(len(line) <= 80 for line in narrow.splitlines())
    course = ["0.010", ">", "0.030", "^0.030", "▁▅█"]
    rewards = [line.split()[1:] for line in narrow.splitlines() if line.startswith("reward")]
    assert rewards == [course + course, course]
    assert any(line.split() == ["first", "second", "third"] for line in wide.splitlines())


def test_the_last_steps_best_and_worst_responses_are_shown(tmp_path):
    store = RolloutStore(tmp_path)
    store.write(1, [rollout(1, 0, 0, score=9.0, response="of an earlier step")])
    scores = (0.1, 0.9, 0.5, float("nan"), None, 0.7, 0.3, 0.2)
    rows = [rollout(2, 0, n, score=score, response=f"response {n}") for n, score in enumerate(scores)]
    store.write(2, rows)

    lines = [line.split() for line in text_of(tmp_path).splitlines()]

    shown = [line for line in lines if line and line[0] in ("best", "worst")]
    assert [(line[0], line[1], line[-1]) for line in shown] == [
        ("best", "0.900", "1"), ("best", "0.700", "5"), ("best", "0.500", "2"),
        ("worst", "0.300", "6"), ("worst", "0.200", "7"), ("worst", "0.100", "0"),
    ]  # fmt: skip


def test_a_response_is_shown_once_with_its_question_and_the_right_answer(tmp_path):
    store = RolloutStore(tmp_path)
    chat = [
        {"role": "system", "content": "You are a calculator."},
        {"role": "user", "content": f"What is 7 + 5? {'Think about it. ' * 20}Answer with the number only."},
    ]
    first = {"prompt": "<|im_start|>", "messages": json.dumps(chat), "ground_truth": "12"}
    second = {"prompt": "<|im_start|>user\nWhat is 3 + 4?<|im_end|>", "ground_truth": "7 \x1b[31m" * 100}
    rows = [rollout(1, 0, n, score=1.0, response="12", **first) for n in range(4)]
    rows += [rollout(1, 1, n, score=0.0, response=text, **second) for n, text in enumerate(["12.", "8", "8"])]
    store.write(1, rows)

    lines = text_of(tmp_path).splitlines()

    responses = [line.split(maxsplit=3)[-1].strip() for line in lines if line.startswith(("best", "worst"))]
    assert responses == ["12", "12.", "8"]
    asked = [line.strip() for line in lines if " | " in line][1:]
    # Of 53 characters 5 are for the answer and 3 for the cut: whole words of the first 30 and the last 15.
    assert asked[0] == "What is 7 + 5? Think about … number only. | 12"
    assert asked[1].startswith("What is 3 + 4? | 7 .[31m7 .[31m") and asked[1] == asked[2]
    assert all(len(line) <= 80 for line in lines)


def test_missing_metrics_rollouts_and_nan_are_shown_as_nothing(tmp_path):
    write_steps(tmp_path / "rollouts alone", range(1, 2))
    log_lines(
        tmp_path / "strange",
        {"step": 1, "reward/overall": None, "timing_s/step": 0.0},
        {
            "step": 2,
            "reward/overall": float("nan"),
            "val/reward_score": float("inf"),
            "actor/entropy": "high",
        },
    )
    with (tmp_path / "strange" / "experiment_log.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/overall": 0.')  # is being written
    (tmp_path / "strange" / "experiment_config.json").write_text('{"trainer": {"max_')

    text = text_of(tmp_path)

    assert line_of(text, "step") == ["-", "2"]
    assert line_of(text, "steps/hour") == ["-", "-"]
    assert not [line for line in text.splitlines() if line.startswith(("reward", "val reward", "entropy"))]
    assert "strange: no rollouts kept" in text and "rollouts alone: no times logged" in text


def test_a_step_that_is_trained_again_counts_as_a_restart(tmp_path):
    trained = [{"step": step, "timing_s": {"update_actor": 1.0}} for step in (1, 2, 3, 3, 4, 2, 3)]
    log_lines(tmp_path, {"step": 0, "val": {"reward_score": 0.0}}, *trained)

    assert line_of(text_of(tmp_path), "restarts") == ["2"]


def test_hostile_texts_reach_the_terminal_as_plain_characters(tmp_path):
    folder = tmp_path / "run\x1b[31m"
    log_lines(folder, {"step": 1, "timing_s/step": 1.0, f"timing_s/{BELL}": 1.0})
    rows = [rollout(1, 0, n, response=BELL + "huge " * 400_000, finish_reason=BELL) for n in range(2)]
    RolloutStore(folder).write(1, rows)

    ended = subprocess.run([*COMMAND, str(folder), "--text"], capture_output=True, check=True)

    text = ended.stdout.decode()
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert len(text) < 4000 and all(len(line) <= 80 for line in text.splitlines())
    assert ".]0;owned..[2J.31m.gnp.exe" in text and "[red]plain[/red]" in text


def test_only_terminals_get_colors_and_ctrl_c_ends_watching(tmp_path):
    write_log(tmp_path, range(1, 4))
    plain = subprocess.run([*COMMAND, str(tmp_path), "--text"], capture_output=True, text=True, check=True)
    main, other = pty.openpty()
    watching = subprocess.Popen(
        [*COMMAND, str(tmp_path), "--watch"], stdin=other, stdout=other, start_new_session=True,
        preexec_fn=lambda: os.login_tty(other), env=os.environ | {"TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(other)
    seen = b""
    while b"restarts" not in seen:
        seen += os.read(main, 65536)
    os.write(main, b"\x03")

    assert watching.wait(60) == 0
    assert "\x1b" not in plain.stdout
    assert b"\x1b[36m" in seen and b"\x1b[?1049h" in seen  # cyan, and the other screen


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], ""), ([3.0], "▁"), ([0, 7], "▁█"), ([1, 1, 1], "▁▁▁"), ([0, 0, 7, 7] * 4, "▁█▁█▁█▁█")],
)
def test_a_sparkline_scales_means_between_minimum_and_maximum(values, expected):
    assert sparkline(values) == expected


def test_a_printable_text_is_one_line_of_bounded_length():
    assert printable("a\tb\n\nc", 10) == "a b c"
    assert printable("x" * 100, 10) == "x" * 9 + "…"
    assert printable("\x1b[2J\u202e\ud800\u200b", 10) == ".[2J..."
