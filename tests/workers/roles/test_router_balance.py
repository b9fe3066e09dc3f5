# SPDX-License-Identifier: Apache-2.0
"""The balance of a mixture's routers in updates of the policy: metrics, passes, and what it trains."""

import pytest
import torch

from tests.workers.roles.test_actor import METRICS, make_actor, make_batch, weights
from verl.config.model import ModelConfig
from verl.models.tiny import save_tiny_model

pytestmark = pytest.mark.usefixtures("one_rank")

AUX, LOAD = "actor/router_aux_loss", "moe/load_max"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", num_experts=8)


def make(folder, coef, **options):
    return make_actor(folder, model=ModelConfig(str(folder), router_aux_loss_coef=coef), **options)


def names(metrics):
    return set(metrics) - {f"actor/{name}" for name in METRICS}


def count_passes(actor):
    passes = []
    actor.forward.model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    return passes


def test_a_mixture_logs_its_largest_load_and_with_a_coefficient_the_loss(folder):
    plain, balanced = make(folder, 0.0), make(folder, 0.01)
    batch = make_batch(8)

    without, with_loss = plain.update(batch, 1.0).metrics, balanced.update(batch, 1.0).metrics

    assert names(without) == {LOAD} and names(with_loss) == {LOAD, AUX}
    assert 1.0 < without[LOAD] <= 4.0  # of 8 experts, two for each token
    assert 1.0 < with_loss[AUX] < 4.0
    for actor in (plain, balanced):
        assert not actor.updater.balance.routes, "logits of finished passes are kept"


def test_the_pass_for_old_log_probs_counts_the_choices_that_the_update_reads(folder):
    plain, actor, alone = make(folder, 0.0), make(folder, 0.5), make(folder, 0.5)
    batch = make_batch(8)

    found, without = actor.compute_log_probs(batch, 0.7).batch, plain.compute_log_probs(batch, 0.7).batch

    assert torch.equal(found["old_log_probs"], without["old_log_probs"])
    assert "expert_choices" not in without
    choices = found["expert_choices"]
    tokens = batch.batch["attention_mask"].sum(-1)
    assert choices.dtype == torch.float32 and torch.equal(
        choices.sum(-1), 2.0 * 2 * tokens
    )  # layers, experts
    given, counted = count_passes(actor), count_passes(alone)
    metrics = actor.update(batch.merge({"expert_choices": choices}), 0.7).metrics
    expected = alone.update(batch, 0.7).metrics
    assert metrics[AUX] == pytest.approx(expected[AUX], rel=1e-6)
    own, other = weights(actor), weights(alone)
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert given == [True] * 4, "two micro batches in each of two mini batches"
    assert counted.count(False) > 0, "without choices they are counted first"


def test_an_update_of_one_micro_batch_needs_no_further_pass(folder):
    actor = make(folder, 0.5, global_batch_size=8, micro_batch_size_per_device_for_update=8)
    passes = count_passes(actor)

    actor.update(make_batch(8), 1.0)

    assert passes == [True]


def test_the_loss_spreads_tokens_over_the_experts(folder):
    found = {}
    for coef in (0.0, 1.0):
        one_pass = {"global_batch_size": 8, "micro_batch_size_per_device_for_update": 8}
        actor = make(folder, coef, lr=0.05, steps=1000, **one_pass)
        batch = make_batch(8)
        batch.batch["advantages"].zero_()
        found[coef] = [actor.update(batch, 1.0).metrics for _ in range(25)]

    plain, balanced = ([metrics[LOAD] for metrics in each] for each in found.values())
    assert plain[0] == plain[-1] == balanced[0]
    assert balanced[-1] < 0.95 * balanced[0]
    assert found[1.0][-1][AUX] < 0.99 * found[1.0][0][AUX]
