# SPDX-License-Identifier: Apache-2.0
import json

import torch

from verl.algorithms.kl import FixedKLController
from verl.trainer.config import TrainerConfig
from verl.trainer.run_state import LOADER_FILE, STATE_FILE, RunState
from verl.utils.checkpoint.storage import write_manifest


class Workers:
    """In the place of the worker group: remembers what it was told to load."""

    def load_checkpoint(self, folder):
        self.loaded = folder


def test_a_run_that_only_validates_goes_on_from_a_checkpoint_without_training_rows(tmp_path):
    folder = tmp_path / "global_step_3"
    (folder / "actor").mkdir(parents=True)
    write_manifest(folder / "actor", {})
    torch.save({"epoch": 1}, folder / LOADER_FILE)
    (folder / STATE_FILE).write_text(
        json.dumps({"step": 3, "kl_controller": FixedKLController(0.1).state_dict()})
    )
    config = TrainerConfig(
        val_only=True, load_checkpoint_path=str(folder), save_checkpoint_path=str(tmp_path / "saved")
    )
    workers = Workers()

    state = RunState(config, 0, FixedKLController(0.1), workers, loader=None)
    state.load()

    assert state.step == 3
    assert workers.loaded == str(folder)
