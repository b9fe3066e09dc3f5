# SPDX-License-Identifier: Apache-2.0
"""Commands that import little: their modules are counted, which is the same on slow machines."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "ray", "transformers", "vllm", "numpy", "datasets", "av"}
MOST_MODULES = 800  # torch alone brings 1,000
LIST_AT_EXIT = """
import atexit, sys
atexit.register(lambda: sys.stderr.write("\\n" + " ".join(sys.modules)))
"""


def modules_of(process: subprocess.CompletedProcess[str]) -> set[str]:
    """Return the modules that a process of `run_light` had imported at its end."""
    return set(process.stderr.splitlines()[-1].split())


def run_light(code: str, *, most_modules: int = MOST_MODULES) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, and check that it succeeds and imports little."""
    command = [sys.executable, "-c", LIST_AT_EXIT + code]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    modules = modules_of(process)
    assert not modules & HEAVY, modules & HEAVY
    assert len(modules) <= most_modules, f"{len(modules)} modules"
    return process
