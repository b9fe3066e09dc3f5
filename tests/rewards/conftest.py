# SPDX-License-Identifier: Apache-2.0
"""Reward files written by tests."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[[str], str]:
    """Write a reward file and return its path."""

    def write(source: str) -> str:
        path = tmp_path / "reward.py"
        path.write_text(textwrap.dedent(source).lstrip("\n"))
        return str(path)

    return write
