# SPDX-License-Identifier: Apache-2.0
"""A reward file can import the same modules however the command was started."""

import pickle
import subprocess
import sys

import pytest

from verl.config.worker import RewardConfig
from verl.rewards.function import load_reward_function
from verl.rewards.manager import RewardManager
from verl.utils.user_file import describe_error

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


POOL = """
import multiprocessing
from in_folder import HALF

class TooLong(Exception):
    pass

def length(text):
    if len(text) > 9:
        raise TooLong(text)
    return len(text) + HALF

def main(inputs):
    with multiprocessing.get_context({method!r}).Pool(1) as pool:
        return [{{"overall": value}} for value in pool.map(length, [row["response"] for row in inputs])]
"""


@pytest.fixture(params=["spawn", "forkserver"])
def file_with_pool(request, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "in_folder.py").write_text("HALF = 0.5\n")
    path = tmp_path / "math.v2.py"
    path.write_text(POOL.format(method=request.param))
    return path


def test_the_processes_that_a_reward_function_starts_import_its_file(file_with_pool):
    with RewardManager(
        RewardConfig(reward_function=str(file_with_pool), timeout_s=20.0, max_retries=0)
    ) as manager:
        job = manager.start()
        job.submit([0], [{"response": "four"}])

        assert job.result() == {"overall": [4.5]}


def test_an_exception_of_a_file_is_named_without_the_name_of_its_module(file_with_pool):
    error = sys.modules[load_reward_function(str(file_with_pool)).function.__module__].TooLong("ten")

    assert describe_error(error, file_with_pool, "").startswith("TooLong: ten")


def test_two_files_of_one_name_are_two_modules(tmp_path):
    functions = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(f"def main(inputs):\n    return {folder!r}\n")
        functions.append(load_reward_function(f"{tmp_path}/{folder}/reward.py").function)

    assert [pickle.loads(pickle.dumps(function))([]) for function in functions] == ["a", "b"]


def test_an_import_with_a_dot_says_that_the_file_is_in_no_package(tmp_path):
    (tmp_path / "reward.py").write_text("from .helpers import VALUE\n")

    with pytest.raises(ValueError, match="relative import with no known parent package"):
        load_reward_function(f"{tmp_path}/reward.py")
