# SPDX-License-Identifier: Apache-2.0
"""What the faults share: data, the run that nothing happens to, and the look for what was left behind."""

import ctypes
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.runs import SFT, descendants, metrics_of
from tests.faults.table import Row, write_row
from tests.helpers.fine_tuning import arguments_for, write_conversations
from tests.helpers.training import QUICKSTART, quickstart_arguments
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))
from shapes import write_questions

STEPS = 6
SFT_STEPS, SFT_SAVED = 60, 20  # fifteen epochs, the rows shuffled anew in each
REWARD = Path(__file__).with_name("reward.py")
PR_SET_CHILD_SUBREAPER = 36
COMMON = [
    f"worker.reward.reward_function={REWARD}:compute_score",
    "trainer.val_before_train=false",
    "trainer.val_freq=-1",
    "trainer.save_freq=2",
    "trainer.save_limit=-1",
    f"trainer.max_steps={STEPS}",
]


@pytest.fixture(scope="session")
def text_arguments(tmp_path_factory):
    """Arguments of a run on questions in words, without its folder; more options may follow."""
    folder = tmp_path_factory.mktemp("text")
    save_tiny_model(folder / "model", "qwen2")
    write_questions(folder, "train", 16, seed=1, with_images=False)
    write_questions(folder, "val", 4, seed=2, with_images=False)
    return quickstart_arguments(folder, folder / "model", *COMMON)


@pytest.fixture(scope="session")
def undisturbed_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("undisturbed") / "run"


@pytest.fixture(scope="session")
def undisturbed(undisturbed_folder, text_arguments):
    """Metrics of the run that nothing happens to, by step."""
    return metrics_of(undisturbed_folder, text_arguments)


@pytest.fixture(scope="session")
def sft_arguments(tmp_path_factory):
    """Arguments of a run of supervised fine-tuning, whose steps take about 50 ms."""
    folder = tmp_path_factory.mktemp("sft")
    save_tiny_model(folder / "model", "qwen2")
    write_conversations(folder, "train", 64, seed=1)
    options = (f"trainer.max_steps={SFT_STEPS}", f"trainer.save_freq={SFT_SAVED}", "trainer.val_freq=-1")
    return arguments_for(folder, *options, "data.val_files=", "trainer.val_before_train=false")


@pytest.fixture(scope="session")
def sft_undisturbed_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sft_undisturbed") / "run"


@pytest.fixture(scope="session")
def sft_undisturbed(sft_undisturbed_folder, sft_arguments):
    """Metrics of the fine-tuning that nothing happens to, by step."""
    return metrics_of(sft_undisturbed_folder, sft_arguments, module=SFT)


@pytest.fixture
def record(request):
    """Write a row of the table, for a test that has come to its end."""

    def write(fault, *, again=None, noticed_s=None, went_on_s=None):
        write_row(fault, Row(again, noticed_s, went_on_s))

    return write


@pytest.fixture
def adopted():
    """Processes whose parent died become children of this one: none is lost from sight."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield psutil.Process()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0)  # other tests wait until such processes are gone


@pytest.fixture(autouse=True)
def nothing_is_left(adopted):
    """Nothing of a run outlives it."""
    before = {child.pid for child in descendants(adopted.pid)}
    yield
    deadline = time.monotonic() + 90  # Ray's agents look for a killed head for a minute
    while left := [child for child in descendants(adopted.pid) if child.pid not in before]:
        assert time.monotonic() < deadline, [child.cmdline() for child in left]
        time.sleep(0.1)
    bury(adopted)


def bury(adopted):
    """Take note of the end of adopted processes."""
    for child in adopted.children():
        if child.status() == psutil.STATUS_ZOMBIE:
            os.waitpid(child.pid, os.WNOHANG)
