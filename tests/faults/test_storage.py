# SPDX-License-Identifier: Apache-2.0
"""Full disks and damaged checkpoints."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.faults.runs import Run, assert_same
from verl.checkpoint.tracker import checkpoint_to_resume, read_record
from verl.config.trainer import RunConfig

pytestmark = pytest.mark.faults
DISK_MIB = 100
ROOM = 2 << 20  # bytes that are left: enough for log lines
# The folder is a small disk of its own in there; what it holds at the end is copied out.
ON_SMALL_DISK = """
mount -t tmpfs -o size={size}m tmpfs "{folder}" && "$@"
status=$?
cp -r "{folder}" "{kept}"
exit $status
"""


def fill(folder):
    """Leave hardly any room on the disk of a folder."""
    disk = os.statvfs(folder)
    with (folder / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - ROOM)


def test_a_run_on_a_full_disk_continues_and_saves_when_there_is_room(
    tmp_path, text_arguments, undisturbed, record
):
    if subprocess.run(["unshare", "-Urm", "true"], check=False).returncode:
        pytest.skip("this machine lends no mounts of one's own")
    folder, kept = tmp_path / "run", tmp_path / "kept"
    folder.mkdir()
    script = ON_SMALL_DISK.format(size=DISK_MIB, folder=folder, kept=kept)
    inside = lambda pid: Path(f"/proc/{pid}/root{folder}")  # noqa: E731
    prefix = ["unshare", "-Urm", "sh", "-c", script, "sh"]
    run = Run(folder, text_arguments, prefix=prefix, log_folder=inside)
    run.come_to(step=4, saved=2)

    run.harm(lambda: fill(inside(run.pid)))
    run.wait(lambda: "a checkpoint could not be written" in run.stderr)
    left = list(inside(run.pid).glob("*.tmp"))
    (inside(run.pid) / "filler").unlink()

    assert run.end() == 0, run.stderr
    assert left == []
    assert re.search(r"a checkpoint could not be written, .*step=4 free_mib=0 ", run.stderr), run.stderr
    assert_same(run.steps, undisturbed)
    assert len(run.steps) == len(undisturbed)
    assert read_record(kept).last_global_step == 6
    assert not (kept / "global_step_4").exists()
    begun = RunConfig(save_checkpoint_path=str(kept), load_checkpoint_path=str(kept / "global_step_2"))
    checkpoint_to_resume(begun)  # raises if it is not whole
    record(
        "the disk is full when a checkpoint is due",
        again=0, noticed_s=run.noticed_s("could not be written"), went_on_s=run.went_on_s(),
    )  # fmt: skip


def cut_off(file):
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


HARMS = {
    "a file of the last checkpoint is cut off": cut_off,
    "a bit of the last checkpoint is flipped": flip_a_bit,
}


@pytest.mark.parametrize("fault", HARMS)
def test_a_damaged_checkpoint_is_refused_and_the_run_resumes_from_the_named_one(
    fault, tmp_path, text_arguments, undisturbed_folder, undisturbed, record
):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed_folder, folder)
    file = folder / "global_step_6" / "actor" / "__1_0.distcp"
    HARMS[fault](file)
    run = Run(folder, text_arguments)

    assert run.end() in (1, 2)
    assert str(file) in run.stderr and "the checkpoint is damaged" in run.stderr
    remedy = f"trainer.load_checkpoint_path={folder / 'global_step_4'}"
    assert remedy in run.stderr
    assert run.steps == []
    next_run = Run(folder, [*text_arguments, remedy])
    assert next_run.end() == 0, next_run.stderr
    assert next_run.resumed_from() == 4
    assert_same(next_run.steps, {step: undisturbed[step] for step in (5, 6)})
    record(fault, again=2, noticed_s=run.noticed_s(file.name), went_on_s=next_run.went_on_s())
