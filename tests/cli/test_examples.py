# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT
from verl.cli.examples import main


def test_the_copy_has_every_file_of_the_repository(tmp_path, capsys):
    listed = subprocess.run(
        ["git", "ls-files", "examples", "scripts"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()

    assert main([str(tmp_path / "mine")]) == 0

    copied = {
        path.relative_to(tmp_path / "mine").as_posix()
        for path in (tmp_path / "mine").rglob("*")
        if path.is_file()
    }
    assert copied >= {*listed} - {"scripts/docs_site.py"}
    assert f"written to {tmp_path / 'mine'}" in capsys.readouterr().out


def test_a_folder_in_use_is_left_alone(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")

    assert main([str(tmp_path)]) == 2

    assert f"{tmp_path} is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.nightly("examples")
def test_converters_run_from_the_copy(tmp_path):
    main([str(tmp_path / "mine")])
    command = [sys.executable, "scripts/convert_data.py", "--list"]

    done = subprocess.run(command, cwd=tmp_path / "mine", capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "gsm8k" in done.stdout
