# SPDX-License-Identifier: Apache-2.0
"""Two FSDP2 ranks whose rows hold different media against one process that has them all."""

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.equivalence.test_packed_forward import CLIP, IMAGE, Features, load, vision_batch
from tests.helpers.distributed import run_distributed
from verl.models.registry import check_model
from verl.models.tiny import save_tiny_model
from verl.workers.packing.forward import PackedForward

pytestmark = pytest.mark.heavy

FAMILIES = ["qwen2_5_vl", "qwen3_vl"]
# The rows of each rank's micro batches: media and text, images and videos, nothing at the end.
PARTS = [[[0, 1], [2], [3]], [[4], [5], []]]
CONTENTS = [((IMAGE,), 5), ((), 4), ((IMAGE, CLIP), 6), ((), 3), ((), 7), ((CLIP,), 2)]


def sharded(folder, **options):
    model = load(folder, True)
    blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    for module in [*blocks, model]:
        fully_shard(module, **options)
    return model


def gradients_of(model, folder, parts, world_size=1):
    forward = PackedForward(model, Features())
    batch = vision_batch(folder, CONTENTS)
    weights = torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))
    for rows in parts:
        result = forward.log_probs(batch[rows], 0.8, with_entropy=True)
        ((result.log_probs * weights[rows] + 0.1 * result.entropy).sum() * world_size).backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grads[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).numpy()
    return grads


def rank_gradients(rank, world_size, folders):
    found = {}
    for family, folder in folders.items():
        difference = check_model(sharded(folder))
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        rough = check_model(sharded(folder, mp_policy=bf16))
        found[family] = (gradients_of(sharded(folder), folder, PARTS[rank], world_size), difference, rough)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny_model(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def ranks(folders):
    return run_distributed(rank_gradients, 2, folders)


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_with_and_without_media_sum_to_the_gradient_of_one_process(ranks, folders, family):
    expected = gradients_of(load(folders[family], True), folders[family], [list(range(len(CONTENTS)))])

    for gradients, _, _ in (result[family] for result in ranks):
        size = sum(np.square(value, dtype=np.float64).sum() for value in expected.values())
        difference = sum(
            np.square(gradients[name] - value, dtype=np.float64).sum() for name, value in expected.items()
        )
        assert (difference / size) ** 0.5 < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_runs_under_fsdp_and_under_mixed_precision(ranks, family):
    for _, difference, rough in (result[family] for result in ranks):
        assert difference < 1e-4
        assert 0 < rough < 0.15
