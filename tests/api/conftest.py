# SPDX-License-Identifier: Apache-2.0
"""A tiny model, questions, and one Ray cluster for all runs inside this process."""

import pytest
import yaml

from tests.helpers.fine_tuning import arguments_for, write_conversations
from tests.helpers.quickstart import make_folder
from tests.helpers.training import SAMPLERS, quickstart_arguments
from tests.helpers.warm_runs import warm_processes


@pytest.fixture(scope="package")
def ray_session():
    """A cluster that this process has joined before any run does; the next package finds none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")
        with warm_processes():
            yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("api"))
    for name, seed in (("train", 1), ("val", 2)):
        write_conversations(folder, name, 16, seed)
        rows = (folder / f"sft_{name}.jsonl").read_text().splitlines()
        assert len(rows) == 16
    make_folder(folder)  # the conversations came with questions of their own
    return folder


def as_mapping(arguments):
    """The arguments of a command as the file and the overrides of a call."""
    pairs = dict(argument.split("=", 1) for argument in arguments)
    return pairs.pop("config", None), {key: yaml.safe_load(value) for key, value in pairs.items()}


@pytest.fixture
def questions(folder, tmp_path):
    """The file and the overrides of a run of two steps in one process, with transformers as its engine.

    A sampler draws its rows, so that runs that resume are runs that resume a sampler.
    """
    arguments = quickstart_arguments(
        folder, folder / "model", "worker.rollout.name=hf", "trainer.n_gpus_per_node=1",
        "trainer.max_steps=2", "trainer.save_freq=1", f"trainer.save_checkpoint_path={tmp_path / 'run'}",
        f"data.sampler={SAMPLERS}/by_pass_rate.py:ByPassRate",
    )  # fmt: skip
    return as_mapping(arguments)


@pytest.fixture
def conversations(folder, tmp_path):
    """The overrides of a fine-tuning run of two steps in one process."""
    arguments = arguments_for(
        folder, "trainer.n_gpus_per_node=1", "trainer.max_steps=2", "trainer.val_freq=2",
        "worker.actor.global_batch_size=8", f"trainer.save_checkpoint_path={tmp_path / 'sft'}",
    )  # fmt: skip
    return as_mapping(arguments)[1]
