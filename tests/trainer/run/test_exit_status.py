# SPDX-License-Identifier: Apache-2.0
"""The end of a run names only commands that work."""

import os
from dataclasses import replace

import pytest

from verl.checkpoint.manifest import remedy, write_manifest
from verl.checkpoint.tracker import CheckpointTracker
from verl.config.ppo import PPOConfig
from verl.trainer.run.exit_status import exit_status_of, report_failure, resume_hint


def trainer_of(folder, **options):
    return replace(PPOConfig().trainer, save_checkpoint_path=str(folder), **options)


def save(root, step):
    tracker = CheckpointTracker(root)
    folder = tracker.begin(step)
    (folder / "actor").mkdir()
    (folder / "actor" / "shard").write_text("weights")
    write_manifest(folder / "actor", {})
    write_manifest(folder, {"step": step})
    return tracker.publish(step)


def test_the_same_command_is_advised_only_if_it_resumes(tmp_path):
    assert resume_hint(trainer_of(tmp_path)).startswith("no checkpoint was saved")
    first, last = save(tmp_path, 2), save(tmp_path, 4)

    assert resume_hint(trainer_of(tmp_path)) == f"the same command resumes from the last checkpoint, {last}"
    option = f"`trainer.load_checkpoint_path={last}`"
    assert option in resume_hint(trainer_of(tmp_path, find_last_checkpoint=False))
    os.truncate(last / "actor" / "shard", 3)
    assert resume_hint(trainer_of(tmp_path)).endswith(f"`trainer.load_checkpoint_path={first}`")
    os.truncate(first / "actor" / "shard", 3)
    assert resume_hint(trainer_of(tmp_path)).startswith("no checkpoint was saved")


def test_an_error_of_resuming_does_not_advise_to_do_it_again(tmp_path):
    save(tmp_path, 4)
    error = ValueError("the checkpoint is damaged")

    assert "the same command resumes" in exit_status_of(error, trainer_of(tmp_path), 4).message
    end = exit_status_of(error, trainer_of(tmp_path), 4, can_resume=False)
    assert end.message == "the run failed in step 4: the checkpoint is damaged"


@pytest.mark.parametrize(("name", "shown"), [("run", "{}"), ("my run", "'{}'")])
def test_a_remedy_names_another_whole_checkpoint_as_a_shell_reads_it(name, shown, tmp_path):
    first, last = save(tmp_path / name, 2), save(tmp_path / name, 4)

    option = shown.format(f"trainer.load_checkpoint_path={first}")
    assert remedy(last / "actor") == f"resume from another step with `{option}`"
    assert remedy(first).endswith(f"load_checkpoint_path={last}`" if name == "run" else f"={last}'`")
    os.truncate(first / "actor" / "shard", 3)
    assert remedy(last).startswith("no other checkpoint of the run is whole, so start over")


def test_a_failure_that_cannot_be_reported_is_a_warning(tmp_path, caplog):
    (tmp_path / "run").write_text("a file in the place of the folder")

    report_failure(trainer_of(tmp_path / "run"), 3, "rank 0 died")

    assert "a failure could not be reported" in caplog.text
