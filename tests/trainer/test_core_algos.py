# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from verl.config.ppo import AlgorithmConfig
from verl.protocol import DataProto, objects
from verl.trainer.core_algos import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    compute_advantages,
    get_kl_controller,
    group_ids_of,
    turn_ids_of,
)

SCORES = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0], [0.0, 0.0]])
MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])


def options(**given):
    return AlgorithmConfig(**{"kl_coef": 0.1, "kl_target": 0.1, "kl_horizon": 100.0} | given)


def make_batch(**tensors):
    tensors = {"token_level_scores": SCORES, "loss_mask": MASK} | tensors
    return DataProto.from_dict(tensors, {"uid": objects(["b", "a", "b", "a"])})


def make_kl_batch():
    old = torch.tensor([[-1.0, -2.0], [-1.0, 7.0], [-1.0, -1.0], [-3.0, -1.0]])
    ref = torch.tensor([[-1.5, -1.0], [-3.0, 0.0], [-1.0, -1.0], [-1.0, -1.0]])
    return make_batch(old_log_probs=old, ref_log_probs=ref)


def test_the_kl_penalty_is_taken_from_every_response_token():
    # d by row: (0.5, -1), (2, padding), (0, 0), (-2, 0); means -0.25, 2, 0, -1; their mean 0.1875.
    batch, metrics = apply_kl_penalty(make_kl_batch(), FixedKLController(0.1))

    expected = torch.tensor([[-0.05, 1.1], [1.8, 0.0], [0.0, 3.0], [0.2, 0.0]])
    torch.testing.assert_close(batch.batch["token_level_rewards"], expected)
    assert metrics == pytest.approx({"actor/kl_penalty": 0.1875, "actor/kl_coef": 0.1})


def test_the_penalty_uses_the_estimator_of_the_options():
    controller = get_kl_controller(options(kl_penalty="mse"))

    _, metrics = apply_kl_penalty(make_kl_batch(), controller)

    # d**2 / 2 by row: (0.125, 0.5), (2), (0, 0), (2, 0); means 0.3125, 2, 0, 1.
    assert metrics["actor/kl_penalty"] == pytest.approx(3.3125 / 4)


def test_the_adaptive_weight_changes_after_the_batch_that_moved_it():
    controller = get_kl_controller(options(kl_type="adaptive"))
    assert isinstance(controller, AdaptiveKLController)

    _, first = apply_kl_penalty(make_kl_batch(), controller)
    _, second = apply_kl_penalty(make_kl_batch(), controller)

    assert first["actor/kl_coef"] == 0.1
    assert second["actor/kl_coef"] == pytest.approx(
        0.1 * (1 + 0.2 * 4 / 100)
    )  # four sequences, error clipped


@pytest.mark.parametrize("given", [{"disable_kl": True}, {"use_kl_loss": True}])
def test_without_a_penalty_rewards_are_scores_and_no_reference_is_read(given):
    batch, metrics = apply_kl_penalty(make_batch(), get_kl_controller(options(**given)))

    assert torch.equal(batch.batch["token_level_rewards"], SCORES)
    assert metrics == {}


def test_advantages_compare_the_responses_with_the_same_uid():
    # Prompt b earns 1 and 3, prompt a earns 2 and 0.
    batch, _ = apply_kl_penalty(make_batch(), get_kl_controller(options(disable_kl=True)))

    batch = compute_advantages(batch, options(norm_adv_by_std=False))

    expected = torch.tensor([[-1.0, -1.0], [1.0, 0.0], [1.0, 1.0], [-1.0, -1.0]])
    torch.testing.assert_close(batch.batch["advantages"], expected)
    torch.testing.assert_close(batch.batch["returns"], expected)


def test_stages_return_new_batches():
    before = make_batch()
    batch, _ = apply_kl_penalty(before, get_kl_controller(options(disable_kl=True)))
    compute_advantages(batch, options())

    assert "token_level_rewards" not in before.batch
    assert "advantages" not in batch.batch


def test_group_ids_are_dense_in_the_order_of_the_first_response():
    assert group_ids_of(objects(["x", "a", "x", "b", "a"])).tolist() == [0, 1, 0, 2, 1]


def conversation_batch():
    """Two conversations: turns of tokens 0-1 and 3 with an observation between, and one turn of token 0."""
    tensors = {
        "token_level_rewards": torch.tensor([[0.0, 1.0, 5.0, 4.0], [2.0, 0.0, 0.0, 0.0]]),
        "loss_mask": torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]]),
    }
    turns = [[{"start": 0, "stop": 2}, {"start": 3, "stop": 4}], [{"start": 0, "stop": 1}]]
    return DataProto.from_dict(tensors, {"uid": objects(["a", "a"]), "turns": objects(turns)})


def test_tokens_have_the_number_of_their_turn():
    batch = conversation_batch()

    numbers = turn_ids_of(batch)

    assert numbers[batch.batch["loss_mask"].bool()].tolist() == [0, 0, 1, 0]
    assert not turn_ids_of(make_batch()).any()


def test_advantages_by_turn_read_the_turns_and_their_discount():
    # First turns: 1 + 0.5 * 4 = 3 and 2, the mean is 2.5; the second turn is alone.
    given = options(adv_estimator="turn_grpo", turn_gamma=0.5, norm_adv_by_std=False)

    batch = compute_advantages(conversation_batch(), given)

    assert batch.batch["advantages"].tolist() == [[0.5, 0.5, 0.0, 4.0], [-0.5, 0.0, 0.0, 0.0]]


def test_rejected_tokens_keep_their_weight_in_the_turns_of_the_group():
    # A sequence without a kept token is not compared; a rejected token of another one counts, without a loss.
    given = options(adv_estimator="turn_grpo", norm_adv_by_std=False)
    some = conversation_batch().merge({"kept_mask": torch.tensor([[0, 1, 0, 0], [1, 0, 0, 0]])})
    whole = conversation_batch().merge({"kept_mask": torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0]])})

    # First turns: 1 + 4 = 5 and 2, the mean is 3.5.
    assert compute_advantages(some, given).batch["advantages"].tolist() == [[0, 1.5, 0, 0], [-1.5, 0, 0, 0]]
    assert compute_advantages(whole, given).batch["advantages"].tolist() == [[5.0, 5.0, 0, 4.0], [0.0] * 4]
