# SPDX-License-Identifier: Apache-2.0
"""Four ranks with two copies of the weights sum gradients over the copies once in an optimizer step.

The gradient equals that of one sum for each micro batch: of all weights, of adapters, of divided experts, and
of a vision tower where the last micro batch has no image.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.equivalence.test_packed_forward import IMAGE, Features, vision_batch
from tests.equivalence.test_shared_prompts import text_batch
from tests.equivalence.test_update import RecordingOptimizer
from tests.helpers.distributed import run_distributed
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig
from verl.config.worker import ActorConfig
from verl.distributed.fsdp import check_sums, make_mesh, sum_over_copies
from verl.models.tiny import save_tiny_model
from verl.workers.model_builder import build_model
from verl.workers.packing.forward import PackedForward
from verl.workers.roles.updater import Training, Updater

pytestmark = [pytest.mark.heavy, pytest.mark.nightly("verl/workers", "verl/distributed")]

RANKS, COPY, MICRO_BATCHES = 4, 2, 3
LENGTHS = ((9, (7, 20, 1, 3, 4, 6)), (24, (3, 8, 2, 5, 9, 11)))  # rows of two prompts
CONTENTS = [((IMAGE,), 5), ((), 4)] * 4 + [((), 3)] * 4  # one row of each for every rank, the last without


class Case(NamedTuple):
    """A model, and what is trained of it."""

    family: str
    model: Mapping[str, Any] = MappingProxyType({})
    fsdp: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "all weights": Case("qwen2"),
    "adapters": Case("qwen2", {"lora": LoraConfig(rank=4)}),
    "divided experts": Case("qwen3_moe", fsdp={"expert_parallel_size": COPY}),
    "a tower": Case("qwen2_5_vl"),
}


def make_updater(case, folder):
    fsdp = FSDPConfig(torch_dtype="fp32", mp_param_dtype="fp32", fsdp_size=COPY, **case.fsdp)
    options = ModelConfig(str(folder), **case.model)
    torch.manual_seed(0)  # of the adapters' initial values
    mesh = make_mesh(RANKS, COPY, "cpu")
    model = build_model(options, fsdp, mesh=mesh, device="cpu", trainable=True)
    optimizer = RecordingOptimizer(model)
    optimizer.named = {name: param for name, param in optimizer.named.items() if param.requires_grad}
    config = ActorConfig(
        global_batch_size=RANKS * MICRO_BATCHES, micro_batch_size_per_device_for_update=1,
        dynamic_batching=False, max_grad_norm=1e9, fsdp=fsdp,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return Updater("actor", config, PackedForward(model, Features()), Training(optimizer, schedule))


def run(updater, batch):
    """Return the gradient of a step, its norm, and the sums over copies that it took."""
    sums, all_reduce = [], dist.all_reduce

    def counted(tensor, *args, group=None, **options):
        if group is not None and dist.get_world_size(group) == RANKS // COPY:
            sums.append(tensor.numel())
        return all_reduce(tensor, *args, group=group, **options)

    def loss(micro, mini):
        log_probs = updater.forward.log_probs(micro.rows, 1.0).log_probs
        loss = (log_probs * micro.tensors["advantages"]).sum() / mini.denominators.num_tokens
        mini.metrics.add_loss("actor/loss", loss)
        return loss

    with patch.object(dist, "all_reduce", counted):
        norm = updater.run(batch, loss)["actor/grad_norm"]
    gradients = updater.optimizer.gradients.pop()
    return torch.cat([grad.flatten() for grad in gradients.values()]), norm, sums


def compare(rank, world_size, folders):
    """For each case: the error of gradient and norm, relative, and the sums over copies of both ways."""
    found = {}
    for name, case in CASES.items():
        folder = folders[case.family]
        batch = vision_batch(folder, CONTENTS) if "vl" in case.family else text_batch(LENGTHS)
        shape = batch.batch["responses"].shape
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        batch = batch.merge({"advantages": weights})[list(range(rank, len(batch), world_size))]
        updater = make_updater(case, folder)
        assert updater.reduces_once
        once, norm, few = run(updater, batch)
        updater.reduces_once = False
        each, wanted, many = run(updater, batch)
        found[name] = ((once - each).norm() / each.norm()).item(), abs(norm / wanted - 1), few, many
    return found, lost_sum()


class Pair(nn.Module):
    """Two modules, of which a pass runs some."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, names):
        return sum(getattr(self, name)(torch.ones(1, 4)).sum() for name in names)


def lost_sum():
    """The error about a module that the last micro batch leaves out."""
    model, mesh = Pair(), make_mesh(RANKS, COPY, "cpu")
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    sum_over_copies(model, now=False)
    model(("first", "second")).backward()
    sum_over_copies(model, now=True)
    model(("first",)).backward()
    with pytest.raises(RuntimeError) as raised:
        check_sums(model)
    return str(raised.value)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    families = {case.family for case in CASES.values()}
    folders = {family: save_tiny_model(root / family, family) for family in families}
    return run_distributed(compare, RANKS, folders)


@pytest.mark.parametrize("name", CASES)
def test_one_sum_over_copies_gives_the_gradient_of_one_for_each_micro_batch(results, name):
    for found, _ in results:
        gradient, norm, few, many = found[name]
        assert gradient < 1e-6 and norm < 1e-6
        assert len(few) > 0 and many == MICRO_BATCHES * few, "the same weights, in the same order"


def test_a_gradient_that_was_not_summed_over_copies_is_an_error_with_its_module(results):
    for _, error in results:
        assert "gradients of ['second'] were not summed" in error
