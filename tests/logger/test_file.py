# SPDX-License-Identifier: Apache-2.0
import json
from itertools import permutations
from pathlib import Path

import pytest

from verl.logger.base import Generation, Run, flatten, nest
from verl.logger.file import FileLogger, read_log


def test_each_step_is_one_nested_json_line(tmp_path):
    logger = FileLogger(Run("p", "e", tmp_path / "new" / "folder", {"trainer": {"max_steps": 2}}))
    logger.log({"actor/pg_loss": 0.5, "critic/score/mean": 1.0, "lonely": 2.0}, 1)

    line = (tmp_path / "new/folder/experiment_log.jsonl").read_text()
    assert line.endswith("\n")
    assert json.loads(line) == {
        "step": 1, "actor": {"pg_loss": 0.5}, "critic": {"score": {"mean": 1.0}}, "lonely": 2.0
    }  # fmt: skip
    assert json.loads((tmp_path / "new/folder/experiment_config.json").read_text()) == {
        "trainer": {"max_steps": 2}
    }


def test_a_resumed_run_appends_and_its_repeated_steps_win(tmp_path):
    for first, loss in ((1, 0.1), (2, 0.2)):
        resumed = None if first == 1 else first - 1
        logger = FileLogger(Run("p", "e", tmp_path, {"a": 1}, resumed_step=resumed))
        for step in range(first, first + 2):
            logger.log(
                {"actor/pg_loss": loss, "perf/first_time": step} if first == 1 else {"actor/pg_loss": loss},
                step,
            )
        logger.log_generations([Generation("q", f"r{first}", "g", 1.0)], first)

    assert len((tmp_path / "experiment_log.jsonl").read_text().splitlines()) == 4
    assert [entry["actor/pg_loss"] for entry in read_log(tmp_path)] == [0.1, 0.2, 0.2]
    assert [entry["step"] for entry in read_log(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "generations.log").read_text() == "".join(
        f"[step] {step}\n[prompt] q\n[response] r{step}\n[ground_truth] g\n[score] 1.0\n\n" for step in (1, 2)
    )
    assert not list(tmp_path.glob("experiment_config.*.json"))  # the same config


def test_a_run_that_starts_over_logs_nothing_of_an_earlier_one_whose_files_are_kept(tmp_path):
    for number, last in enumerate((3, 2, 1)):
        logger = FileLogger(Run("p", "e", tmp_path, {"a": 1}))
        for step in range(last + 1):
            logger.log({"val/score": float(number)}, step)
        logger.log_generations([Generation("q", f"r{number}", "g", 1.0)], last)

    assert read_log(tmp_path) == [{"step": step, "val/score": 2.0} for step in (0, 1)]
    kept = {path.name: len(path.read_text().splitlines()) for path in tmp_path.glob("experiment_log*")}
    assert kept == {"experiment_log.1.jsonl": 4, "experiment_log.2.jsonl": 3, "experiment_log.jsonl": 2}
    names = ("generations.1.log", "generations.2.log", "generations.log")
    assert [(tmp_path / name).read_text().count("[response] r") for name in names] == [1, 1, 1]
    assert "[response] r2" in (tmp_path / "generations.log").read_text()


def test_the_config_of_an_earlier_start_is_kept(tmp_path):
    for lr in (1, 2, 3):
        FileLogger(Run("p", "e", tmp_path, {"lr": lr}))

    kept = {path.name: json.loads(path.read_text())["lr"] for path in tmp_path.glob("*.json")}
    assert kept == {"experiment_config.1.json": 1, "experiment_config.2.json": 2, "experiment_config.json": 3}


def test_a_truncated_line_does_not_corrupt_the_next_one(tmp_path):
    FileLogger(Run("p", "e", tmp_path)).log({"a/b": 1.0}, 1)
    with (tmp_path / "experiment_log.jsonl").open("a") as file:
        file.write('{"step": 2, "a": {"b"')

    FileLogger(Run("p", "e", tmp_path, resumed_step=1)).log({"a/b": 2.0}, 2)

    assert read_log(tmp_path) == [{"step": 1, "a/b": 1.0}, {"step": 2, "a/b": 2.0}]


def test_the_log_is_strict_json_whatever_the_values(tmp_path):
    FileLogger(Run("p", "e", tmp_path)).log({"a": float("nan"), "b": float("-inf"), "c": 1}, 1)

    text = (tmp_path / "experiment_log.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == {
        "step": 1,
        "a": None,
        "b": None,
        "c": 1,
    }


def test_an_unwritable_folder_is_named():
    with pytest.raises(OSError, match=r"`trainer.save_checkpoint_path`: cannot write to /proc/checkpoints"):
        FileLogger(Run("p", "e", Path("/proc/checkpoints")))


def test_nesting_and_flattening_are_inverse_even_when_a_value_is_also_a_folder():
    flat = {"a/b": 1, "a/b/c": 2, "d": 3, "e/f/g": 4}

    assert nest(flat) == {"a": {"b": 1}, "a/b/c": 2, "d": 3, "e": {"f": {"g": 4}}}
    for order in permutations(flat):
        reordered = {key: flat[key] for key in order}
        assert flatten(nest(reordered)) == flat
