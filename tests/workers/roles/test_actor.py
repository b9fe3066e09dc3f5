# SPDX-License-Identifier: Apache-2.0
"""The actor's rules; its numbers are compared with a reference in `tests/equivalence/test_update.py`."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import run_distributed
from verl.algorithms.rollout_correction import importance_weights
from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.model import FSDPConfig, ModelConfig
from verl.config.worker import ActorConfig
from verl.distributed.fsdp import make_mesh
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto
from verl.workers.model_builder import build_model
from verl.workers.packing.forward import PackedForward
from verl.workers.roles.actor import ActorTraining, DataParallelPPOActor, KLLoss
from verl.workers.roles.metric_sums import MetricSums

pytestmark = pytest.mark.usefixtures("one_rank")

PROMPT_LENGTH, RESPONSE_LENGTH = 6, 5
METRICS = {
    "pg_loss", "pg_clipfrac_higher", "pg_clipfrac_lower", "ppo_kl", "entropy", "entropy_loss", "grad_norm",
    "lr", "skipped_updates", "entropy_coef",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


def make_actor(folder, *, kl_loss=None, lr=0.1, steps=10, correction=None, **options):
    options = {
        "global_batch_size": 4,
        "micro_batch_size_per_device_for_update": 3,
        "dynamic_batching": False,
    } | options
    model = build_model(
        ModelConfig(model_path=str(folder), enable_gradient_checkpointing=False),
        FSDPConfig(mp_param_dtype="fp32"),
        mesh=make_mesh(dist.get_world_size(), -1, "cpu"),
        device="cpu",
        trainable=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    return DataParallelPPOActor(
        ActorConfig(**options),
        PackedForward(model, None, "cpu"),
        ActorTraining(
            optimizer,
            scheduler,
            max_response_length=RESPONSE_LENGTH,
            kl_loss=kl_loss,
            correction=correction,
        ),
    )


def make_batch(num_rows, seed=0):
    """Rows of different lengths; old log-probs of a uniform policy, advantages that do not vanish."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(10, 250, (num_rows, PROMPT_LENGTH + RESPONSE_LENGTH), generator=generator)
    columns = torch.arange(PROMPT_LENGTH + RESPONSE_LENGTH)
    left = torch.arange(num_rows)[:, None] % 4
    end = PROMPT_LENGTH + 1 + (3 * torch.arange(num_rows)[:, None]) % RESPONSE_LENGTH
    mask = ((columns >= left) & (columns < end)).long()
    response_mask = mask[:, PROMPT_LENGTH:]
    return DataProto.from_dict(
        {
            "input_ids": tokens * mask,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "responses": (tokens * mask)[:, PROMPT_LENGTH:],
            "loss_mask": response_mask,
            "old_log_probs": torch.full(response_mask.shape, -6.0) * response_mask,
            "advantages": torch.randn(num_rows, 1, generator=generator) * response_mask,
        }
    )


def weights(actor):
    return {name: param.full_tensor().clone() for name, param in actor.forward.model.named_parameters()}


def same_weights(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_an_update_changes_the_weights_and_logs_its_metrics(folder):
    actor = make_actor(folder)
    before = weights(actor)

    metrics = actor.update(make_batch(8), temperature=1.0).metrics

    assert not same_weights(before, weights(actor))
    assert set(metrics) == {f"actor/{name}" for name in METRICS}
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    assert all(param.grad is None for param in actor.forward.model.parameters())


def test_an_update_raises_good_responses_and_lowers_bad_ones(folder):
    actor = make_actor(folder, lr=0.05)
    batch = make_batch(4)
    batch = batch.merge(
        DataProto.from_dict({"old": actor.compute_log_probs(batch, 1.0).batch["old_log_probs"]})
    )
    batch.batch["old_log_probs"] = batch.batch["old"]

    actor.update(batch, temperature=1.0)

    change = (actor.compute_log_probs(batch, 1.0).batch["old_log_probs"] - batch.batch["old"]).sum(-1)
    assert torch.equal(change.sign(), batch.batch["advantages"][:, 0].sign())


def test_log_probs_do_not_depend_on_micro_batches_and_keep_the_order_of_the_rows(folder):
    batch = make_batch(7)
    alone = make_actor(folder, micro_batch_size_per_device_for_experience=1)
    mixed = make_actor(folder, micro_batch_size_per_device_for_experience=2, dynamic_batching=True)

    log_probs = mixed.compute_log_probs(batch, temperature=0.7).batch["old_log_probs"]

    torch.testing.assert_close(
        log_probs,
        alone.compute_log_probs(batch, temperature=0.7).batch["old_log_probs"],
        rtol=1e-5,
        atol=1e-6,
    )
    assert log_probs[batch.batch["loss_mask"] == 0].eq(0).all()
    assert log_probs[batch.batch["loss_mask"] == 1].lt(0).all()
    assert not log_probs.requires_grad


def test_each_mini_batch_is_an_optimizer_step_in_each_epoch_and_the_scheduler_steps_once(folder):
    actor = make_actor(folder, ppo_epochs=3, lr=0.5, steps=10)
    steps = []
    actor.training.optimizer.register_step_post_hook(
        lambda *_: steps.append(actor.training.optimizer.param_groups[0]["lr"])
    )

    first = actor.update(make_batch(8), temperature=1.0).metrics
    second = actor.update(make_batch(8), temperature=1.0).metrics

    assert steps == [0.5] * 6 + [0.45] * 6
    assert (first["actor/lr"], second["actor/lr"]) == (0.5, 0.45)


def test_a_gradient_that_is_not_finite_is_counted_and_changes_nothing_but_the_schedule(folder):
    actor = make_actor(folder)
    before = weights(actor)
    batch = make_batch(8)
    batch.batch["advantages"][1, 0] = float("nan")  # in the first of two mini batches

    metrics = actor.update(batch, temperature=1.0).metrics
    assert metrics["actor/skipped_updates"] == 1
    assert math.isfinite(metrics["actor/grad_norm"])
    assert not same_weights(before, weights(actor))

    clean = make_actor(folder)
    clean.update(batch[4:], temperature=1.0)
    assert same_weights(weights(clean), weights(actor))
    assert actor.training.scheduler.get_last_lr() == clean.training.scheduler.get_last_lr()


def test_nan_outside_of_the_responses_does_not_reach_the_update(folder):
    clean, dirty = make_batch(4), make_batch(4)
    for key in ("old_log_probs", "advantages"):
        dirty.batch[key][dirty.batch["loss_mask"] == 0] = float("nan")

    results = [make_actor(folder).update(batch, temperature=1.0).metrics for batch in (clean, dirty)]

    assert results[0] == results[1]


def test_without_a_kl_loss_no_reference_is_read(folder):
    batch = make_batch(4)
    assert "ref_log_probs" not in batch.batch

    metrics = make_actor(folder).update(batch, temperature=1.0).metrics

    assert "actor/kl_loss" not in metrics
    assert "actor/kl_coef" not in metrics


def test_a_kl_loss_of_weight_zero_is_logged_and_changes_nothing(folder):
    plain, watched = make_actor(folder), make_actor(folder, kl_loss=KLLoss("mse", 0.0))
    batch = make_batch(4)
    plain.update(batch, temperature=1.0)
    batch.batch["ref_log_probs"] = batch.batch["old_log_probs"] - 1

    metrics = watched.update(batch, temperature=1.0).metrics

    assert metrics["actor/kl_coef"] == 0
    assert metrics["actor/kl_loss"] > 0
    assert same_weights(weights(plain), weights(watched))


def test_the_entropy_bonus_raises_the_entropy(folder):
    batch = make_batch(4)
    batch.batch["advantages"].zero_()
    actor = make_actor(folder, entropy_coef=1.0, lr=0.02)

    first = actor.update(batch, temperature=1.0).metrics
    second = actor.update(batch, temperature=1.0).metrics

    assert second["actor/entropy"] > first["actor/entropy"]


@pytest.mark.parametrize("mode", ["token", "seq"])
def test_a_sequence_of_weight_two_changes_the_policy_as_two_sequences(folder, mode):
    options = {"loss_avg_mode": mode, "entropy_coef": 0.1}
    batch, twice = make_batch(4), [0, 0, 1, 1, 2, 3]
    weighted = batch.merge({"sequence_weights": torch.tensor([2.0, 2.0, 1.0, 1.0])})
    actor, other = make_actor(folder, **options), make_actor(folder, global_batch_size=6, **options)

    metrics, expected = actor.update(weighted, 1.0).metrics, other.update(batch[twice], 1.0).metrics

    for name, value in weights(actor).items():
        torch.testing.assert_close(value, weights(other)[name], rtol=1e-5, atol=1e-7)
    assert metrics["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], rel=1e-5)


@pytest.mark.parametrize(("num_rows", "global_batch_size"), [(6, 4), (2, 4)])
def test_rows_that_do_not_divide_into_mini_batches_are_refused(folder, num_rows, global_batch_size):
    actor = make_actor(folder, global_batch_size=global_batch_size)

    with pytest.raises(ValueError, match=r"`worker.actor.global_batch_size` \(4 prompts, .* must divide the"):
        actor.update(make_batch(num_rows), temperature=1.0)


def test_an_unknown_loss_is_refused_before_any_forward_pass(folder):
    with pytest.raises(ValueError, match=r"`worker.actor.loss_type` must be one of"):
        make_actor(folder, loss_type="ppo2")


def test_metrics_are_means_over_tokens_not_means_of_means():
    # Three tokens of value 1 and one of value 9: mean 3. Mean of the means of the micro batches: 5.
    metrics = MetricSums("cpu")
    metrics.add_mean("actor/entropy", torch.tensor([[1.0, 1.0, 1.0]]), torch.ones(1, 3))
    metrics.add_mean("actor/entropy", torch.tensor([[9.0, float("nan"), 7.0]]), torch.tensor([[1, 0, 0]]))
    metrics.add_loss("actor/pg_loss", torch.tensor(0.25))
    metrics.add_loss("actor/pg_loss", torch.tensor(0.75))

    means = metrics.reduce(dist.group.WORLD, num_updates=2)

    assert means == {"actor/pg_loss": 0.5, "actor/entropy": 3.0}


def skip_on_two_ranks(rank, world_size, folder):
    """Rank 1 alone has a NaN, and fewer micro batches than rank 0 with dynamic batching."""
    batch = make_batch(4, seed=rank)
    if rank == 1:
        batch = make_batch(1).repeat(4)
        batch.batch["advantages"][0, 0] = float("nan")
    actor = make_actor(
        folder, global_batch_size=8, micro_batch_size_per_device_for_update=1, dynamic_batching=True
    )
    before = weights(actor)
    skipped = actor.update(batch, temperature=1.0).metrics
    unchanged = same_weights(before, weights(actor))
    taken = actor.update(make_batch(4, seed=rank), temperature=1.0).metrics
    return skipped["actor/skipped_updates"], unchanged, taken


def test_all_ranks_skip_the_update_that_one_of_them_spoils_and_log_the_same(folder):
    results = run_distributed(skip_on_two_ranks, 2, folder)

    for skipped, unchanged, taken in results:
        assert skipped == 1
        assert unchanged
        assert taken["actor/skipped_updates"] == 0
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("loss_type", ["default", "gspo", "cispo", "sapo", "gpg", "dppo_kl"])
def test_one_update_without_old_log_probs_equals_a_pass_before_it_bit_for_bit(folder, loss_type):
    sizes = {
        "micro_batch_size_per_device_for_update": 2,
        "micro_batch_size_per_device_for_experience": 2,
        "loss_type": loss_type,
        "entropy_coef": 0.1,
    }
    correction = RolloutCorrectionConfig(rollout_is="sequence")
    batch = make_batch(4)
    sampled = {"rollout_log_probs": batch.batch["old_log_probs"] - 0.01 * batch.batch["advantages"].abs()}
    batch = batch.select([name for name in batch.batch.keys() if name != "old_log_probs"], [])  # noqa: SIM118
    before, alone = make_actor(folder, **sizes), make_actor(folder, **sizes, correction=correction)
    old = before.compute_log_probs(batch, temperature=0.7).batch["old_log_probs"]
    mask = batch.batch["loss_mask"]
    weights_before = importance_weights(old, sampled["rollout_log_probs"], mask, correction)

    expected, nothing = before.update(
        batch.merge({"old_log_probs": old, "rollout_is_weights": weights_before}), temperature=0.7
    )
    found, columns = alone.update(batch.merge(sampled), temperature=0.7)

    assert found == expected
    assert same_weights(weights(alone), weights(before))
    assert torch.equal(columns.batch["old_log_probs"], old)
    assert nothing is None


def test_several_updates_need_the_log_probs_from_before_the_first(folder):
    batch = make_batch(8)
    batch = batch.select([name for name in batch.batch.keys() if name != "old_log_probs"], [])  # noqa: SIM118

    with pytest.raises(AssertionError, match="from before the first"):
        make_actor(folder).update(batch, temperature=1.0)
