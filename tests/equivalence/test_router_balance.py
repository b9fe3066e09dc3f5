# SPDX-License-Identifier: Apache-2.0
"""The balance loss of an update against transformers' function on the padded mini batch.

Loss, gradients and `moe/load_max` must not depend on micro batches, packing, shared prompts,
gradient checkpointing, the number of ranks or sequence parallelism.
"""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.equivalence.test_packed_forward import Features, load
from tests.equivalence.test_shared_prompts import text_batch
from tests.equivalence.test_update import RecordingOptimizer
from tests.helpers.distributed import run_distributed
from verl.config.model import FSDPConfig, ModelConfig
from verl.config.sft import SFTActorConfig
from verl.distributed.fsdp import make_mesh
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto
from verl.workers.model_builder import build_model
from verl.workers.packing.forward import PackedForward
from verl.workers.packing.sp_strategy import Strategy
from verl.workers.roles.updater import Training, Updater

pytestmark = pytest.mark.heavy

COEF = 0.25
SIZES = ((9, (7, 20, 1, 3)), (24, (3, 8, 2, 5)))  # two prompts, four rows of each
EXPERTS, TOP_K = 8, 2


class Case(NamedTuple):
    """The division of an update into mini and micro batches, and over ranks."""

    micro_batch: int
    mini_batches: int = 1
    shared: bool = False
    dynamic: bool = False
    ulysses: int = 1
    ring: int = 1
    checkpointing: bool = False
    always_shards: bool = True
    divided: int = 1  # ranks that the experts are divided over


ALONE = [
    Case(8),
    Case(8, shared=True),
    Case(1, checkpointing=True),
    Case(3, shared=True),
    Case(2, mini_batches=2),
    Case(1, dynamic=True, mini_batches=2, shared=True),
]
TOGETHER = [
    Case(8),
    Case(1, shared=True),
    Case(2, mini_batches=2, checkpointing=True),
    Case(8, ulysses=2),
    Case(2, ulysses=2, shared=True),
    Case(2, ulysses=2, always_shards=False),
    Case(3, ring=2, mini_batches=2),
    Case(2, mini_batches=2, checkpointing=True, shared=True, divided=2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", num_experts=EXPERTS))


def order(mini_batches):
    # mini batches take rows of both prompts
    return list(range(8)) if mini_batches == 1 else [0, 1, 4, 5, 2, 3, 6, 7]


def expected(folder, batch, mini_batches):
    """Value and gradients of each mini batch from transformers' own forward, and the choices (layers, E)."""
    model = load(folder, False)
    found, chosen = [], torch.zeros(2, EXPERTS)
    for part in batch.split(len(batch) // mini_batches):
        mask = part.batch["attention_mask"]
        result = model(
            input_ids=part.batch["input_ids"],
            attention_mask=mask,
            position_ids=part.batch["position_ids"],
            output_router_logits=True,
        )
        logits = result.router_logits
        loss = load_balancing_loss_func(logits, EXPERTS, TOP_K, mask)
        model.zero_grad()
        (COEF * loss).backward()
        grads = {
            name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None
        }
        found.append((loss.item(), grads))
        for layer, each in enumerate(logits):
            best = each.topk(TOP_K, dim=-1).indices[mask.flatten().bool()]
            chosen[layer] += best.flatten().bincount(minlength=EXPERTS)
    return found, chosen


def largest_load(chosen):
    return (chosen / chosen.sum(-1, keepdim=True)).max().item() * chosen.shape[-1]


def own_rows(batch, mini_batches, index, count):
    parts = batch.split(len(batch) // mini_batches)
    size = len(parts[0]) // count
    return DataProto.concat([part[list(range(index * size, (index + 1) * size))] for part in parts])


def update(case, folder, batch, rank, world_size):
    model = build_model(
        ModelConfig(folder, enable_gradient_checkpointing=case.checkpointing, router_aux_loss_coef=COEF),
        FSDPConfig(torch_dtype="fp32", mp_param_dtype="fp32", expert_parallel_size=case.divided),
        mesh=make_mesh(world_size, -1, "cpu"),
        device="cpu",
        trainable=True,
    )
    sp = SequenceParallel.build(case.ulysses, case.ring)
    count = world_size // sp.size
    forward = PackedForward(model, Features(), share_prompt=case.shared, sp=sp)
    if case.always_shards:
        forward.strategies = [Strategy.SHARDED]
    optimizer = RecordingOptimizer(model)
    config = SFTActorConfig(
        model=ModelConfig(folder, router_aux_loss_coef=COEF),
        global_batch_size=len(batch) // case.mini_batches,
        micro_batch_size_per_device_for_update=case.micro_batch,
        micro_batch_size_per_device_for_experience=2,
        dynamic_batching=case.dynamic,
        max_grad_norm=1e9,
        fsdp=FSDPConfig(expert_parallel_size=case.divided),
    )
    scheduler = SimpleNamespace(get_last_lr=lambda: [0.0], step=lambda: None)
    updater = Updater("actor", config, forward, Training(optimizer, scheduler))
    rows = own_rows(batch, case.mini_batches, sp.dp_index, count)
    for mini_batch in updater.mini_batches(rows):
        for micro_batch in mini_batch.micro_batches():
            log_probs = forward.log_probs(micro_batch.rows, 1.0).log_probs
            updater.backward(log_probs.sum() * 0.0)
        updater.step()
    return optimizer.gradients, updater.finish()


def compare_all(rank, world_size, cases, folder):
    found = []
    for case in cases:
        batch = text_batch(SIZES)[order(case.mini_batches)]
        wanted, chosen = expected(folder, batch, case.mini_batches)
        load_max = largest_load(chosen)
        gradients, metrics = update(case, folder, batch, rank, world_size)
        errors = []
        for (_, whole), own in zip(wanted, gradients, strict=True):
            size = sum(grad.square().sum().item() for grad in whole.values())
            difference = sum((own[name] - grad).square().sum().item() for name, grad in whole.items())
            errors.append((difference / size) ** 0.5)
        loss = sum(value for value, _ in wanted) / len(wanted)
        of_ranks = chosen.unflatten(-1, (case.divided, -1)).sum(-1)  # (layers, ranks)
        rank_load = metrics.get("moe/ep_load_max", 1.0)
        assert ("moe/ep_load_max" in metrics) == (case.divided > 1)
        found.append(
            (
                max(errors),
                abs(metrics["actor/router_aux_loss"] - loss),
                max(abs(metrics["moe/load_max"] - load_max), abs(rank_load - largest_load(of_ranks))),
                load_max,
            )
        )
    return found


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(1, ALONE, id="one rank"),
        pytest.param(2, TOGETHER, marks=pytest.mark.nightly("verl/workers"), id="two ranks"),
    ],
)
def test_the_balance_loss_of_an_update_is_that_of_transformers_however_it_is_cut(folder, world_size, cases):
    for found in run_distributed(compare_all, world_size, cases, folder):
        for case, (gradients, loss, moved, load_max) in zip(cases, found, strict=True):
            assert gradients < 1e-5, case
            assert loss < 1e-5, case
            assert moved < 1e-5 and load_max > 1.05, case
