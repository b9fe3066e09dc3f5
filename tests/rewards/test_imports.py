# SPDX-License-Identifier: Apache-2.0
"""A reward file can import the same modules however the command was started."""

import subprocess
import sys

import pytest

COMMAND = """
import sys
from verl.config.worker import RewardConfig
from verl.rewards.function import load_reward_function
from verl.rewards.manager import RewardManager

if __name__ == "__main__":
    file = sys.argv[1]
    print("here", load_reward_function(file).score([{"response": "?"}]))
    with RewardManager(RewardConfig(reward_function=file)) as manager:
        job = manager.start()
        job.submit([0], [{"response": "?"}])
        print("pool", job.result())
"""
REWARD = """
import colorsys  # the standard library's, though a file of that name is next to this one

import in_working_directory

def main(inputs):
    import neighbor  # only now, in the process that scores

    value = in_working_directory.VALUE + neighbor.VALUE
    return [{"overall": value, "black": colorsys.rgb_to_hsv(0, 0, 0)[2]} for _ in inputs]
"""


@pytest.fixture
def folders(tmp_path):
    """A reward file with a helper next to it, another in the working directory, and two ways to start."""
    for name in ("work", "rewards", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "rewards" / "reward.py").write_text(REWARD)
    (tmp_path / "rewards" / "neighbor.py").write_text("VALUE = 1.0\n")
    (tmp_path / "rewards" / "colorsys.py").write_text("raise RuntimeError\n")
    (tmp_path / "work" / "in_working_directory.py").write_text("VALUE = 0.5\n")
    (tmp_path / "bin" / "command.py").write_text(COMMAND)
    (tmp_path / "work" / "module.py").write_text(COMMAND)
    return tmp_path


@pytest.mark.parametrize(
    "start", [["-m", "module"], ["{folder}/bin/command.py"]], ids=["module", "console command"]
)
def test_a_file_imports_from_its_folder_and_the_working_directory(folders, start):
    command = [sys.executable, *(part.format(folder=folders) for part in start)]

    done = subprocess.run(
        [*command, f"{folders}/rewards/reward.py"], cwd=folders / "work", capture_output=True, text=True
    )

    assert "here [{'overall': 1.5, 'black': 0.0}]" in done.stdout, done.stderr
    assert "pool {'overall': [1.5], 'black': [0.0]}" in done.stdout, done.stderr


def test_a_file_behind_a_link_imports_from_the_folder_that_it_lies_in(folders):
    (folders / "work" / "linked.py").symlink_to(folders / "rewards" / "reward.py")

    done = subprocess.run(
        [sys.executable, f"{folders}/bin/command.py", "linked.py"],
        cwd=folders / "work", capture_output=True, text=True,
    )  # fmt: skip

    assert "pool {'overall': [1.5], 'black': [0.0]}" in done.stdout, done.stderr
