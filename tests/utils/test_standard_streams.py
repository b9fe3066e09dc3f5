# SPDX-License-Identifier: Apache-2.0
"""A process goes on when nobody reads what it prints, and ends with its own exit status."""

import os
import subprocess
import sys
import threading

import pytest

from tests.helpers.training import ROOT

PRINTING = """
import subprocess, sys
from verl.utils.standard_streams import outlive_readers

outlive_readers()
outlive_readers()  # twice is once
for number in range(20_000):
    print("line", number)
    sys.stderr.write(f"note {number}\\n")
from rich.console import Console  # ends the process if a pipe is broken
Console().print("a table")
sys.stdout.flush()
child = subprocess.run(["sh", "-c", "echo a line of a child; echo and a note >&2"])
open(sys.argv[1], "w").write(f"done {child.returncode}")
sys.exit(7)
"""


def run(redirection, folder):
    done = folder / "done"
    code = f'"$0" -c "$1" "$2" {redirection}'
    finished = subprocess.run(
        ["bash", "-c", code, sys.executable, PRINTING, str(done)], env={"PYTHONPATH": str(ROOT)}, text=True,
        capture_output=True, timeout=240,
    )  # fmt: skip
    return finished, done.read_text()


@pytest.mark.parametrize(
    "redirection",
    [
        ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full 2>&1",
        "| head -1; exit ${PIPESTATUS[0]}", "2>&1 | head -1; exit ${PIPESTATUS[0]}",
    ],
)  # fmt: skip
def test_a_process_whose_output_nobody_reads_goes_on_with_its_own_exit_status(redirection, tmp_path):
    finished, done = run(redirection, tmp_path)

    assert finished.returncode == 7, finished.stderr
    assert done == (
        "done 1" if "full" in redirection else "done 0"
    )  # dash cannot write to a full disk either
    assert "Traceback" not in finished.stderr and "BrokenPipe" not in finished.stderr


def test_what_can_be_read_is_printed_in_order(tmp_path):
    finished, _ = run("", tmp_path)

    assert finished.returncode == 7
    lines = finished.stdout.splitlines()
    assert lines[:20_000] == [f"line {number}" for number in range(20_000)]
    assert lines[20_000:] == ["a table", "a line of a child"]
    assert finished.stderr.splitlines() == [*(f"note {number}" for number in range(20_000)), "and a note"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_on_stderr_is_there_at_once(unbuffered):
    code = "from verl.utils.standard_streams import outlive_readers; outlive_readers(); import sys, time\n"
    code += "sys.stderr.write('stopping\\n'); time.sleep(600)"
    environment = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
    timer = threading.Timer(120, process.kill)
    timer.start()

    assert process.stderr.readline() == b"stopping\n"
    assert process.poll() is None
    timer.cancel()
    process.kill()
    process.communicate()


def test_a_file_opened_later_never_gets_the_number_of_a_closed_stream(tmp_path):
    code = """
import os, sys
from verl.utils.standard_streams import outlive_readers
outlive_readers()
file = open(sys.argv[1], "w")
os.write(2, b"noise of a library")
assert file.fileno() > 2
"""
    command = ["bash", "-c", '"$0" -c "$1" "$2" >&- 2>&-', sys.executable, code, str(tmp_path / "file")]

    assert subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, timeout=240).returncode == 0
    assert os.path.getsize(tmp_path / "file") == 0
