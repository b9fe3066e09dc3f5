# SPDX-License-Identifier: Apache-2.0
"""A run whose output nobody reads and whose terminal closes saves its step, and the same command resumes."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time

import psutil
import pytest

from tests.helpers.fine_tuning import arguments_for, write_conversations
from tests.helpers.training import ROOT, read_metrics
from verl.checkpoint.tracker import read_record
from verl.models.tiny import save_tiny_model

pytestmark = pytest.mark.heavy


@pytest.mark.slow  # a run to its end
def test_a_run_whose_terminal_closes_saves_its_step_and_ends(tmp_path):
    save_tiny_model(tmp_path / "model", "qwen2")
    write_conversations(tmp_path, "train", 64, seed=1)
    run = tmp_path / "run"
    options = ["data.val_files=", "trainer.val_before_train=false", "trainer.val_freq=-1"]
    endless = ["trainer.max_steps=100000", "trainer.logger=[console,file]", "data.num_workers=1"]
    arguments = arguments_for(tmp_path, *options, *endless, f"trainer.save_checkpoint_path={run}")
    terminal, its_end = os.openpty()
    reader, writer = os.pipe()
    os.close(reader)  # `| head` has read enough

    process = subprocess.Popen(
        [sys.executable, "-m", "verl.trainer.sft", *arguments], cwd=ROOT, stdin=its_end, stdout=writer,
        stderr=its_end, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # a hangup reaches all of its group
    )  # fmt: skip
    os.close(its_end)
    os.close(writer)
    try:
        told = b""
        while not (run / "experiment_log.jsonl").exists() or not read_metrics(run):
            assert process.poll() is None, told.decode()
            time.sleep(0.05)
        below = psutil.Process(process.pid).children(recursive=True)
        os.set_blocking(terminal, False)
        told = os.read(terminal, 1 << 20)
        os.close(terminal)

        assert process.wait(120) == 128 + signal.SIGHUP, told.decode()
    except BaseException:  # the run would go on for hours
        process.kill()
        raise
    done = read_record(run).last_global_step
    assert done == max(read_metrics(run)) and (run / f"global_step_{done}").is_dir()
    assert b"Traceback" not in told
    assert not [path.name for path in run.glob("*") if path.name in ("failures.log", "bad_rows.jsonl")]
    assert psutil.wait_procs(below, timeout=20)[1] == []
