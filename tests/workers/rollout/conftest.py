# SPDX-License-Identifier: Apache-2.0
"""Engines in the test process: one process group for all engines of a module; a model that takes turns."""

import json
import os
import shutil
import sys
from collections import Counter

import pytest
import torch
from transformers.image_processing_utils import BaseImageProcessor
from transformers.video_processing_utils import VideoProcessorMixin

from tests.helpers.distributed import free_port
from tests.helpers.families import load_tiny, open_tiny


def end_groups():
    """Take down the process groups of vLLM and of this process."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    if torch.distributed.is_initialized():
        if state is None:
            torch.distributed.destroy_process_group()
        else:
            state.cleanup_dist_env_and_memory()
    elif state is not None:  # groups of a process group that has ended can only be forgotten
        for name, value in list(vars(state).items()):
            if isinstance(value, state.GroupCoordinator):
                setattr(state, name, None)


@pytest.fixture(scope="module")
def single_process():
    """The environment of a process group of one, which vLLM makes and this takes down."""
    end_groups()  # of an engine in another file that was not closed: they may lack those of a mixture
    variables = dict(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    yield
    end_groups()
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


@pytest.fixture
def own_groups(single_process):
    """The groups that an engine of a mixture makes: those of a dense engine before it lack the experts'."""
    end_groups()
    yield
    end_groups()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model for which every third token ends a turn."""
    folder = tmp_path_factory.mktemp("models") / "qwen2_5_vl"
    shutil.copytree(load_tiny("qwen2_5_vl").folder, folder)
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    ends = [*settings["eos_token_id"], *range(30, 300, 3)]
    file.write_text(json.dumps(settings | {"eos_token_id": ends}))
    return open_tiny(folder)


@pytest.fixture
def counts(monkeypatch):
    """Count the images and videos that processors of transformers process."""
    found = Counter()
    for name, base in (("images", BaseImageProcessor), ("videos", VideoProcessorMixin)):

        def counting(self, *args, name=name, theirs=base.__call__, **kwargs):
            found[name] += len(args[0] if args else kwargs[name])
            return theirs(self, *args, **kwargs)

        monkeypatch.setattr(base, "__call__", counting)
    return found
