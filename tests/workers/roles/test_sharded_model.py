# SPDX-License-Identifier: Apache-2.0
"""The operations that a worker counts for the models it trains."""

import pytest
import torch

from verl.config.model import FSDPConfig, ModelConfig, OffloadConfig, OptimConfig
from verl.models.families.interface import Medium
from verl.models.flops import PackedWork
from verl.models.tiny import save_tiny_model
from verl.workers.sharded_model import ModelSetup, ShardedModel

IMAGE = Medium("image", {}, {"grid_thw": [1, 4, 4]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2_vl")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("is_frozen", "passes"), [(False, 2), (True, 0)])
def test_the_operations_of_an_update_have_no_backward_pass_of_a_frozen_tower(folder, is_frozen, passes):
    options = ModelConfig(model_path=str(folder), freeze_vision_tower=is_frozen)
    setup = ModelSetup(torch.device("cpu"), 1, None)

    actor = ShardedModel("actor", options, FSDPConfig(), OffloadConfig(), setup, optim=OptimConfig())

    forward, backward = actor.flops.count(PackedWork(()), [IMAGE])
    pixels = 2 * 16 * actor.model.model.visual.patch_embed.proj.weight.numel()  # they have no gradient
    assert backward == passes * forward - (0 if is_frozen else pixels)
