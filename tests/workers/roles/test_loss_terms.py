# SPDX-License-Identifier: Apache-2.0
"""Loss terms of a user's file are averaged over their own tokens, however the batch is cut."""

import pytest
import torch

from tests.workers.roles.test_actor import make_actor, make_batch, same_weights, weights
from verl.models.tiny import save_tiny_model

pytestmark = pytest.mark.usefixtures("one_rank")

FILE = """
from verl.workers.roles.loss_terms import LossTerm, TokenLoss

def good(columns):
    return columns["advantages"] > 0

def cross_entropy(result, columns):
    return TokenLoss(-result.log_probs)

def certain(result, columns):
    return TokenLoss(result.entropy)

keep_good = LossTerm("actor/keep_good", 0.5, cross_entropy, needs=["advantages"], mask=good)
watched = LossTerm("actor/keep_good", 0.0, cross_entropy, needs=["advantages"], mask=good)
certainty = LossTerm("actor/certainty", 0.25, certain, needs=["entropy"])
missing = LossTerm("actor/missing", 0.25, certain, needs=["values"])
"""
ONE_STEP = {"global_batch_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    file = tmp_path_factory.mktemp("terms") / "terms.py"
    file.write_text(FILE)
    return lambda name: f"{file}:{name}"


@pytest.mark.parametrize("mode", ["token", "seq"])
def test_a_term_is_the_mean_over_the_tokens_of_its_mask_however_the_batch_is_cut(folder, spec, mode):
    batch = make_batch(8)
    options = {**ONE_STEP, "loss_terms": (spec("keep_good"),), "loss_avg_mode": mode}
    whole = make_actor(folder, micro_batch_size_per_device_for_update=8, **options)
    cut = make_actor(folder, micro_batch_size_per_device_for_update=1, **options)
    log_probs = whole.compute_log_probs(batch, 0.7).batch["old_log_probs"]

    found, other = whole.update(batch, 0.7).metrics, cut.update(batch, 0.7).metrics

    mask = batch.batch["loss_mask"] * (batch.batch["advantages"] > 0)
    assert 0 < mask.sum() < batch.batch["loss_mask"].sum()
    rows = [-row[kept.bool()] for row, kept in zip(log_probs, mask, strict=True) if kept.any()]
    expected = torch.cat(rows).mean() if mode == "token" else torch.stack([row.mean() for row in rows]).mean()
    assert found["actor/keep_good"] == pytest.approx(expected.item(), rel=1e-5)
    assert other["actor/keep_good"] == pytest.approx(expected.item(), rel=1e-5)
    own, again = weights(whole), weights(cut)
    for name in own:
        torch.testing.assert_close(own[name], again[name], rtol=1e-4, atol=1e-6)


def test_an_entropy_term_is_a_negative_entropy_bonus(folder, spec):
    sizes = {**ONE_STEP, "micro_batch_size_per_device_for_update": 3}
    bonus = make_actor(folder, **sizes, entropy_coef=0.5)
    both = make_actor(folder, **sizes, entropy_coef=0.75, loss_terms=(spec("certainty"),))

    bonus.update(make_batch(8), 1.0)
    both.update(make_batch(8), 1.0)

    one, other = weights(bonus), weights(both)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)


def test_a_term_of_weight_0_is_only_logged(folder, spec):
    plain, watching = make_actor(folder), make_actor(folder, loss_terms=(spec("watched"),))

    plain.update(make_batch(8), 1.0)
    metrics = watching.update(make_batch(8), 1.0).metrics

    assert metrics["actor/keep_good"] > 0
    assert same_weights(weights(plain), weights(watching))


def test_a_column_that_nothing_computed_is_named(folder, spec):
    actor = make_actor(folder, loss_terms=(spec("missing"),))

    with pytest.raises(ValueError, match=r"'actor/missing' needs the column `values`, and the batch has"):
        actor.update(make_batch(8), 1.0)
