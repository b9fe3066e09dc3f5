# SPDX-License-Identifier: Apache-2.0
"""The suite in the background, under `nohup` or cron, where signals are inherited as ignored."""

import signal
import subprocess
import sys

from tests.helpers.training import ROOT

IGNORED = """
import signal, subprocess, sys
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode)
"""
OF_A_TEST = """
import os, signal, subprocess, sys
import tests.conftest
os.kill(os.getpid(), signal.SIGHUP)  # the suite goes on
for number in (signal.SIGINT, signal.SIGHUP):
    code = f"import os; os.kill(os.getpid(), {number})"
    print(subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode)
"""


def test_signals_end_what_tests_start_in_the_background_too():
    run = subprocess.run(
        [sys.executable, "-c", IGNORED, OF_A_TEST], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert run.stdout.split() == [str(-signal.SIGINT), str(-signal.SIGHUP)]
