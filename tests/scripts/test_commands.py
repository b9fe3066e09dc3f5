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

COMMAND = re.compile(r"(?:python3 scripts/)?((?<=scripts/)\w+\.py|verl-[a-z-]+)( .*|$)")
INSTALLED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def shown_commands():
    """Every script and installed command that a block of shell commands calls, with its arguments."""
    texts = [body for path in DOCS for kind in ("bash", "shell") for body in blocks(path, kind)]
    lines = "\n".join(texts).replace("\\\n", " ").splitlines()
    found = [match.groups() for line in lines if (match := COMMAND.match(line))]
    return [(name, shlex.split(arguments, comments=True)) for name, arguments in found]


def function_of(name):
    if name.endswith(".py"):
        return runpy.run_path(str(ROOT / "scripts" / name))["main"]
    module, _, function = INSTALLED[name].partition(":")
    return getattr(import_module(module), function)


def test_the_help_of_every_command_names_the_switches_in_the_docs(capsys):
    commands = shown_commands()
    names = {name for name, _ in commands}
    assert {"verl-data-check", "verl-doctor", "verl-print-config", "verl-reward-check"} <= names
    assert {"convert_data.py", "rollouts_to_sft.py"} <= names

    for name in sorted(names):
        with pytest.raises(SystemExit) as end:
            raise SystemExit(function_of(name)(["--help"]))
        assert end.value.code == 0
        text = capsys.readouterr().out
        used = {word for shown, words in commands if shown == name for word in words if word.startswith("--")}
        assert [switch for switch in sorted(used) if switch.partition("=")[0] not in text] == [], name


def test_the_installed_commands_lead_to_their_functions():
    assert {"verl-train", "verl-merge", "verl-doctor"} <= set(INSTALLED)
    for name in INSTALLED:
        with pytest.raises(SystemExit) as end:
            raise SystemExit(function_of(name)(["--help"]))
        assert end.value.code == 0
