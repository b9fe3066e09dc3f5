# SPDX-License-Identifier: Apache-2.0
"""Values at tokens that the policy did not sample change no gradient and no metric of an update."""

import pytest
import torch

from tests.helpers.nightly import by_day
from tests.workers.roles.test_actor import make_actor, make_batch, weights
from verl.algorithms.kl import EXACT, KL_ESTIMATORS
from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.model import FSDPConfig, ModelConfig
from verl.config.worker import CriticConfig
from verl.distributed.fsdp import make_mesh
from verl.models.tiny import save_tiny_model
from verl.workers.model_builder import build_model
from verl.workers.packing.forward import PackedForward
from verl.workers.roles.actor import KLLoss
from verl.workers.roles.critic import DataParallelPPOCritic
from verl.workers.roles.updater import Training

pytestmark = pytest.mark.usefixtures("one_rank")

ROWS = 8
OPTIONS = {
    "clip_cov": {"clip_cov_ratio": 0.5, "clip_cov_lb": 0.0, "clip_cov_ub": 50.0},
    "kl_cov": {"kl_cov_ratio": 0.5},
    "dro": {"dro_beta": 0.3},
}
READ = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "rollout_is_weights")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


def conversations():
    """Rows whose responses have an observed token after the first, where they are long enough."""
    generator = torch.Generator().manual_seed(1)
    batch = make_batch(ROWS)
    attended = batch.batch["loss_mask"]
    observed = torch.zeros_like(attended)
    observed[:, 1] = attended[:, 2]  # never the last token
    mask = attended - observed
    near = torch.full(attended.shape, -6.0) + 0.2 * torch.randn(attended.shape, generator=generator)
    tensors = {
        "loss_mask": mask,
        "old_log_probs": near * mask,
        "ref_log_probs": (near - 0.3) * mask,
        "rollout_log_probs": (near + 0.1) * mask,
        "advantages": batch.batch["advantages"] * mask,
        "rollout_is_weights": torch.rand(attended.shape, generator=generator) * mask,
        "row_ids": torch.arange(ROWS),
    }
    return batch.merge(tensors, replace=[name for name in tensors if name in batch.batch]), observed.bool()


def with_other_observations(batch, observed, names):
    noise = 50 * torch.randn(observed.shape, generator=torch.Generator().manual_seed(2))
    changed = {name: torch.where(observed, noise, batch.batch[name]) for name in names}
    return batch.merge(changed, replace=names)


def updated(actor, batch):
    """Weights after an update, and its metrics."""
    metrics = actor.update(batch, temperature=1.0, entropy_coef=0.01).metrics
    return weights(actor), metrics


def assert_same_update(make, batch, observed, names=READ):
    before = weights(make())
    found, metrics = updated(make(), with_other_observations(batch, observed, names))
    expected, expected_metrics = updated(make(), batch)

    assert observed.any() and metrics == expected_metrics
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert any(not torch.equal(before[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("loss", by_day(POLICY_LOSSES.names(), "vanilla", "gspo", paths=["verl/algorithms"]))
def test_observed_tokens_reach_no_policy_loss(folder, loss):
    batch, observed = conversations()

    def make():
        options = OPTIONS.get(loss, {})
        return make_actor(folder, loss_type=loss, kl_loss=KLLoss("low_var_kl", 0.1), **options)

    assert_same_update(make, batch, observed)


@pytest.mark.parametrize(
    "kind", by_day(sorted({*KL_ESTIMATORS.names()} - {*EXACT}), "low_var_kl", paths=["verl/algorithms"])
)
def test_observed_tokens_reach_no_kl_loss(folder, kind):
    batch, observed = conversations()

    assert_same_update(lambda: make_actor(folder, kl_loss=KLLoss(kind, 0.1)), batch, observed)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_observed_tokens_reach_no_weight_that_the_update_computes(folder, level):
    batch, observed = conversations()
    names = [name for name in READ if name != "rollout_is_weights"]
    batch.batch.pop("rollout_is_weights")

    def make():
        return make_actor(folder, correction=RolloutCorrectionConfig(rollout_is=level))

    assert_same_update(make, batch, observed, names)


def make_critic(folder):
    model = build_model(
        ModelConfig(model_path=str(folder), enable_gradient_checkpointing=False),
        FSDPConfig(mp_param_dtype="fp32"),
        mesh=make_mesh(1, -1, "cpu"),
        device="cpu",
        trainable=True,
        head="scalar",
        option="worker.critic.model",
    )
    with torch.no_grad():  # the head of a new critic is zero, and the rest then has no gradient
        model.get_parameter("score.weight").fill_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    config = CriticConfig(global_batch_size=4, micro_batch_size_per_device_for_update=3, cliprange_value=0.3)
    return DataParallelPPOCritic(
        config,
        PackedForward(model, None, "cpu"),
        Training(optimizer, scheduler),
    )


def test_observed_tokens_reach_no_value_loss(folder):
    batch, observed = conversations()
    mask, generator = batch.batch["loss_mask"], torch.Generator().manual_seed(3)
    learned = {name: torch.randn(mask.shape, generator=generator) * mask for name in ("values", "returns")}
    batch = batch.merge(learned)
    results = []
    for rows in (batch, with_other_observations(batch, observed, list(learned))):
        critic = make_critic(folder)
        results.append((critic.update(rows), weights(critic), critic.compute_values(rows)))

    (metrics, found, values), (other_metrics, other, other_values) = results
    assert metrics == other_metrics and metrics["critic/grad_norm"] > 0
    assert all(torch.equal(found[name], weight) for name, weight in other.items())
    assert torch.equal(values, other_values) and not values[observed].any()
