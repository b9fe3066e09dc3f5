# SPDX-License-Identifier: Apache-2.0
"""The report at the end of a run."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from verl.checkpoint.manifest import write_manifest
from verl.checkpoint.tracker import CheckpointTracker
from verl.config.trainer import RunConfig
from verl.logger.file import METRICS_FILE
from verl.trainer.run import end_report as module
from verl.trainer.run.end_report import Finished, end_report, print_end_report


def save(folder, step, score):
    tracker = CheckpointTracker(folder)
    written = tracker.begin(step)
    (written / "actor").mkdir()
    write_manifest(written / "actor", {})
    write_manifest(written, {"step": step})
    tracker.publish(step, score)


def make_run(folder, *, logger=("console", "file"), **options):
    folder.mkdir(parents=True, exist_ok=True)
    if "file" in logger:
        (folder / METRICS_FILE).write_text("")
    return RunConfig(logger=logger, save_checkpoint_path=str(folder), **options)


@pytest.fixture(autouse=True)
def path_with_the_commands(monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))


def test_a_run_says_what_it_reached_where_it_is_and_what_to_run_next(tmp_path):
    folder = tmp_path / "run"
    trainer = make_run(folder)
    save(folder, 100, 0.5123)
    save(folder, 150, 0.25)

    assert end_report(trainer, Finished(1, 150, 80.4, (100, 0.5123))) == [
        "finished 150 steps in 0:01:20",
        "  best validation   0.512 at step 100",
        f"  last checkpoint   {folder}/global_step_150",
        f"  best checkpoint   {folder}/global_step_100",
        f"  curves            {folder}/experiment_log.jsonl",
        f"  look              verl-view {folder}",
        f"  export            verl-merge --local_dir {folder}/global_step_100/actor",
    ]


def test_paths_are_those_of_the_working_folder_and_quoted_for_a_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make_run(tmp_path / "my runs" / "first")
    save(tmp_path / "my runs" / "first", 4, None)

    assert end_report(trainer, Finished(1, 4, 1.0))[1:] == [
        "  last checkpoint   'my runs/first/global_step_4'",
        "  curves            'my runs/first/experiment_log.jsonl'",
        "  look              verl-view 'my runs/first'",
        "  export            verl-merge --local_dir 'my runs/first/global_step_4/actor'",
    ]


def test_commands_that_the_shell_does_not_find_are_named_by_their_path(tmp_path, monkeypatch):
    bin_folder = tmp_path / "my env/bin"
    bin_folder.mkdir(parents=True)
    for name in ("verl-view", "verl-merge", "tensorboard"):
        (bin_folder / name).touch()
    monkeypatch.setattr(sys, "executable", str(bin_folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    trainer = make_run(tmp_path / "run", logger=("console", "file", "tensorboard"))
    save(tmp_path / "run", 4, None)

    assert end_report(trainer, Finished(1, 4, 1.0))[3:] == [
        "  curves            'my env/bin/tensorboard' --logdir run/tensorboard",
        "  look              'my env/bin/verl-view' run",
        "  export            'my env/bin/verl-merge' --local_dir run/global_step_4/actor",
    ]


def test_nothing_is_named_that_the_run_does_not_have(tmp_path):
    trainer = make_run(tmp_path / "run", logger=("console",))

    assert end_report(trainer, Finished(1, 1, 2.0)) == ["finished 1 step in 0:00:02"]


def test_an_incomplete_checkpoint_is_not_exported(tmp_path):
    trainer = make_run(tmp_path / "run")
    save(tmp_path / "run", 2, None)
    (tmp_path / "run" / "global_step_4" / "actor").mkdir(parents=True)

    report = "\n".join(end_report(trainer, Finished(1, 4, 2.0)))
    assert "global_step_2/actor" in report and "global_step_4" not in report


def test_each_service_says_where_the_curves_are(tmp_path, monkeypatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    trainer = make_run(
        tmp_path, logger=("console", "tensorboard", "wandb"), project_name="math", experiment_name="first"
    )

    assert end_report(trainer, Finished(1, 4, 2.0))[1:] == [
        f"  curves            tensorboard --logdir {tmp_path}/tensorboard",
        "  curves            wandb: math/first",
    ]


@pytest.mark.parametrize(
    ("finished", "heading"),
    [
        (Finished(21, 40, 31.0), "finished steps 21 to 40 in 0:00:31"),
        (Finished(41, 40, 0.4), "finished in 0:00:00 without training"),
    ],
)
def test_a_resumed_run_names_the_steps_of_this_process(finished, heading):
    assert finished.heading() == heading


def test_fine_tuning_reports_the_loss(tmp_path):
    trainer = make_run(tmp_path, logger=("console",))

    lines = end_report(trainer, Finished(1, 4, 2.0, best=(2, -1.25), is_loss=True))
    assert lines[1] == "  best validation   loss 1.2500 at step 2"


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({"logger": ("console",)}, "stdout"),
        ({"logger": ("console",), "console": "json"}, "stderr"),  # stdout is the steps'
        ({"logger": ("file",)}, None),
    ],
)
def test_the_report_is_where_a_person_reads_it(options, written, tmp_path, monkeypatch):
    outputs = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    for name, output in outputs.items():
        monkeypatch.setattr(module, f"{name}_console", lambda output=output: Console(file=output, width=40))
    trainer = make_run(Path(tmp_path), **options)
    print_end_report(trainer, Finished(1, 4, 2.0))

    for name, output in outputs.items():
        assert output.getvalue().startswith("finished 4 steps in 0:00:02\n") == (name == written)
