# SPDX-License-Identifier: Apache-2.0
import sys
from types import SimpleNamespace

import pytest

from verl import __version__
from verl.utils.typed_command import command_parser, typed_command


def type_command(monkeypatch, program, module=None):
    spec = None if module is None else SimpleNamespace(name=module)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr(sys, "argv", [str(program)])


def test_the_name_is_what_was_typed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    type_command(monkeypatch, "/usr/local/bin/verl-merge")
    assert typed_command() == "verl-merge"
    type_command(monkeypatch, "scripts/model_merger.py")
    assert typed_command() == "python3 scripts/model_merger.py"
    type_command(monkeypatch, tmp_path / "scripts" / "model_merger.py")
    assert typed_command() == "python3 scripts/model_merger.py"
    type_command(monkeypatch, "/somewhere/verl/trainer/sft.py", "verl.trainer.sft")
    assert typed_command() == "python3 -m verl.trainer.sft"


def test_help_shows_the_typed_command_in_its_examples(monkeypatch, capsys):
    type_command(monkeypatch, "scripts/model_merger.py")

    with pytest.raises(SystemExit):
        command_parser("verl-merge", "Export.\n\n    verl-merge --local_dir A").parse_args(["--help"])

    shown = capsys.readouterr().out
    assert "usage: python3 scripts/model_merger.py" in shown
    assert "    python3 scripts/model_merger.py --local_dir A" in shown
    assert "verl-merge" not in shown


def test_the_version_names_this_and_what_it_runs_on(capsys):
    with pytest.raises(SystemExit) as end:
        command_parser("verl-merge", None).parse_args(["--version"])

    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert shown.startswith(f"easy-verl {__version__} (Python 3.") and "torch 2." in shown
