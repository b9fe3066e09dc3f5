# SPDX-License-Identifier: Apache-2.0
"""Commands as the documentation shows them, and as an installation names them."""

import re
import runpy
import shlex
import tomllib
from importlib import import_module

import pytest

from tests.architecture.test_docs import DOCS, blocks
from tests.helpers.training import ROOT

COMMAND = re.compile(r"python3 scripts/(\w+\.py)(.*)")


def shown_commands():
    """Every script that a block of shell commands calls, with its arguments."""
    texts = [body for path in DOCS for kind in ("bash", "shell") for body in blocks(path, kind)]
    lines = "\n".join(texts).replace("\\\n", " ").splitlines()
    found = [match.groups() for line in lines if (match := COMMAND.match(line))]
    return [(script, shlex.split(arguments, comments=True)) for script, arguments in found]


def test_the_help_of_every_script_names_the_switches_in_the_docs(capsys):
    commands = shown_commands()
    assert {"data_check.py", "diagnose.py", "print_cfg.py", "reward_check.py"} <= {
        name for name, _ in commands
    }

    for script in sorted({name for name, _ in commands}):
        with pytest.raises(SystemExit) as end:
            raise SystemExit(runpy.run_path(str(ROOT / "scripts" / script))["main"](["--help"]))
        assert end.value.code == 0
        text = capsys.readouterr().out
        used = {word for name, words in commands if name == script for word in words if word.startswith("--")}
        assert [switch for switch in sorted(used) if switch not in text] == [], script


def test_the_installed_commands_lead_to_their_functions():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

    assert {"verl-train", "verl-merge", "verl-doctor"} <= set(scripts)
    for target in scripts.values():
        module, _, function = target.partition(":")
        with pytest.raises(SystemExit) as end:
            raise SystemExit(getattr(import_module(module), function)(["--help"]))
        assert end.value.code == 0
