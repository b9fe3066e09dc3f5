# SPDX-License-Identifier: Apache-2.0
import json
import os
from pathlib import Path

import pytest

from tests.helpers.light_process import run_light
from verl.checkpoint.manifest import check_role_folder, write_manifest
from verl.checkpoint.tracker import TRACKER, CheckpointTracker, checkpoint_step, find_last_checkpoint


def save(tracker: CheckpointTracker, step: int, score: float | None = None, content: str = "weights") -> Path:
    folder = tracker.begin(step)
    (folder / "actor").mkdir()
    (folder / "actor" / "shard").write_text(content)
    return tracker.publish(step, score)


def steps(root: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("global_step_")) for folder in root.glob("global_step_*"))


def test_a_checkpoint_counts_only_after_it_is_published(tmp_path):
    tracker = CheckpointTracker(tmp_path / "run")

    folder = tracker.begin(4)

    assert folder.name == "global_step_4.tmp"
    assert find_last_checkpoint(tmp_path / "run") is None
    assert tracker.publish(4) == tmp_path / "run" / "global_step_4" == find_last_checkpoint(tmp_path / "run")


def test_the_newest_and_the_best_are_kept(tmp_path):
    tracker = CheckpointTracker(tmp_path, save_limit=2)

    for step, score in ((1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, 0.9)):
        save(tracker, step, score)

    assert steps(tmp_path) == [2, 4, 5]  # an equal score later is not better
    record = json.loads((tmp_path / TRACKER).read_text())
    assert (record["last_global_step"], record["best_global_step"], record["best_val_reward_score"]) == (
        5,
        2,
        0.9,
    )
    assert record["last_actor_path"] == str(tmp_path / "global_step_5" / "actor")


def test_after_a_resume_from_an_earlier_step_the_last_written_are_kept(tmp_path):
    for step in (5, 10, 15):
        save(CheckpointTracker(tmp_path, save_limit=3), step)
        os.utime(tmp_path / f"global_step_{step}", (step, step))

    for step in (6, 7):
        save(CheckpointTracker(tmp_path, save_limit=2), step)

    assert steps(tmp_path) == [6, 7]


def test_old_steps_stay_until_the_new_one_is_complete(tmp_path):
    tracker = CheckpointTracker(tmp_path, save_limit=1)
    save(tracker, 1)

    tracker.begin(2)

    assert find_last_checkpoint(tmp_path) == tmp_path / "global_step_1"
    tracker.publish(2)
    assert steps(tmp_path) == [2]


def test_without_a_limit_everything_is_kept(tmp_path):
    tracker = CheckpointTracker(tmp_path, save_limit=-1)
    for step in range(1, 6):
        save(tracker, step)

    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_an_incomplete_folder_is_removed_by_the_next_save(tmp_path):
    tracker = CheckpointTracker(tmp_path)
    (tracker.begin(3) / "half").write_text("")

    save(CheckpointTracker(tmp_path), 5)

    assert steps(tmp_path) == [5]


def test_a_run_killed_before_the_rename_resumes_from_the_folder(tmp_path, monkeypatch):
    def save_until_killed(step, renames):
        tracker = CheckpointTracker(tmp_path)
        folder = tracker.begin(step)
        (folder / "actor").mkdir()
        for part in (folder / "actor", folder):
            (part / "shard").write_text(f"{renames}")
            write_manifest(part, {})
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "rename", killed_after(renames))
            tracker.publish(step)

    save_until_killed(3, renames=0)
    assert find_last_checkpoint(tmp_path) == tmp_path / "global_step_3"

    save_until_killed(3, renames=1)  # the old folder stepped aside, the new one has not its name yet
    assert not (tmp_path / "global_step_3").exists()
    assert find_last_checkpoint(tmp_path) == tmp_path / "global_step_3"
    assert (tmp_path / "global_step_3" / "shard").read_text() == "1"


def killed_after(renames, rename=Path.rename):
    """`Path.rename` that works so often, and then ends the process that calls it."""
    left = [None] * renames

    def rename_or_die(path, target):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return rename(path, target)

    return rename_or_die


def test_a_failed_rename_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    before = save(CheckpointTracker(tmp_path), 1)
    tracker = CheckpointTracker(tmp_path)
    tracker.begin(2)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk"):
        patch.setattr(Path, "rename", fails)
        tracker.publish(2)

    assert find_last_checkpoint(tmp_path) == before


def fails(path, target):
    raise OSError("disk")


def test_a_resumed_run_knows_the_best_step_and_replaces_rewritten_steps(tmp_path):
    save(CheckpointTracker(tmp_path, 1), 1, score=0.7)
    save(CheckpointTracker(tmp_path, 1), 2, score=0.1, content="first")

    again = CheckpointTracker(tmp_path, 1)
    save(again, 2, score=0.2, content="second")

    assert (tmp_path / "global_step_2" / "actor" / "shard").read_text() == "second"
    assert (again.record.best_global_step, again.record.best_val_reward_score) == (1, 0.7)
    assert steps(tmp_path) == [1, 2]


def test_an_unreadable_tracker_or_a_missing_folder_is_an_error(tmp_path):
    folder = save(CheckpointTracker(tmp_path), 1)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(
        FileNotFoundError, match=r"names global_step_1, which is missing: .*load_checkpoint_path"
    ):
        find_last_checkpoint(tmp_path)

    (tmp_path / TRACKER).write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        find_last_checkpoint(tmp_path)


def test_the_path_to_load_must_name_a_complete_step(tmp_path):
    folder = save(CheckpointTracker(tmp_path), 12)

    assert checkpoint_step(folder) == 12
    with pytest.raises(ValueError, match="must end in global_step_N"):
        checkpoint_step(folder / "actor")
    with pytest.raises(ValueError, match="it is incomplete"):
        checkpoint_step(tmp_path / "global_step_13.tmp")
    with pytest.raises(FileNotFoundError, match="no folder"):
        checkpoint_step(tmp_path / "global_step_13")


def test_an_unwritable_folder_is_an_error_that_names_the_option(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match=r"`trainer.save_checkpoint_path` \(.*file\) cannot be written"):
        CheckpointTracker(tmp_path / "file").begin(1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_an_error_that_names_the_option(tmp_path):
    tmp_path.chmod(0o500)

    with pytest.raises(OSError, match=r"`trainer.save_checkpoint_path`"):
        CheckpointTracker(tmp_path / "run").begin(1)


def test_a_folder_that_is_no_role_is_told_with_the_roles_in_it_before_torch_loads(tmp_path):
    run_light(f"""
from verl.cli.merge import main
assert main(["--local_dir", {str(tmp_path)!r}]) == 1
""")
    role = tmp_path / "first/global_step_8/critic"
    (role / "huggingface").mkdir(parents=True)
    (role / "huggingface/config.json").write_text("{}")
    check_role_folder(role)

    with pytest.raises(FileNotFoundError, match=rf"must be a role's folder .*; it has {role}$"):
        check_role_folder(tmp_path)
