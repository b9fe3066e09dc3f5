# SPDX-License-Identifier: Apache-2.0
import pytest

from verl.algorithms.controllers import (
    AdaptiveEntropyController,
    AdaptiveKLController,
    FixedEntropyController,
    FixedKLController,
)
from verl.config.worker import AdaptiveEntropyConfig


def entropy_controller(coef=0.0, minimum=0.0):
    bounds = {"max_entropy_coef": 0.003, "min_entropy_coef": minimum}
    options = AdaptiveEntropyConfig(target_entropy=0.2, delta_entropy_coef=0.001, **bounds)
    return AdaptiveEntropyController(coef, options)


def run(controller, entropies):
    """The weight in use after each step."""
    coefs = []
    for entropy in entropies:
        controller.update(entropy)
        coefs.append(controller.coef)
    return coefs


def test_the_weight_rises_while_entropy_is_low_and_stops_at_its_maximum():
    assert run(entropy_controller(), [0.1, 0.1, 0.19, 0.0]) == pytest.approx([0.001, 0.002, 0.003, 0.003])


def test_there_is_no_bonus_at_or_above_the_target_but_the_weight_is_kept():
    # c goes 1, 2, 3 thousandths, down to 2 and 1 while paused, and is 2 when entropy is low again.
    entropies = [0.1, 0.1, 0.1, 0.2, 0.5, 0.1]

    assert run(entropy_controller(), entropies) == pytest.approx([0.001, 0.002, 0.003, 0, 0, 0.002])


def test_the_weight_falls_no_lower_than_its_minimum():
    assert run(entropy_controller(0.001, minimum=0.001), [0.5, 0.5, 0.1]) == pytest.approx([0, 0, 0.002])


def test_before_the_first_step_the_weight_is_that_of_the_options():
    assert entropy_controller(0.002).coef == 0.002


def test_a_nan_entropy_changes_nothing():
    assert run(entropy_controller(), [0.1, float("nan"), 0.1]) == pytest.approx([0.001, 0.001, 0.002])


@pytest.mark.parametrize("before", [[0.1, 0.1], [0.1, 0.1, 0.4]])
def test_an_adaptive_entropy_controller_resumes_where_it_stopped_paused_or_not(before):
    unbroken, stopped, resumed = entropy_controller(), entropy_controller(), entropy_controller()
    run(unbroken, before)
    run(stopped, before)

    resumed.load_state_dict(stopped.state_dict())

    assert resumed.coef == unbroken.coef
    assert run(resumed, [0.1, 0.3, 0.1]) == run(unbroken, [0.1, 0.3, 0.1])


def test_an_adaptive_entropy_controller_ignores_the_state_of_a_fixed_one():
    adaptive = entropy_controller(0.002)
    adaptive.load_state_dict(FixedEntropyController(0.5).state_dict())

    assert adaptive.coef == 0.002


def test_a_fixed_entropy_controller_never_changes():
    fixed = FixedEntropyController(0.01)
    fixed.load_state_dict(entropy_controller(0.002).state_dict())

    assert run(fixed, [0.0, 9.0]) == [0.01, 0.01]


def test_a_fixed_kl_controller_never_changes():
    controller = FixedKLController(0.01)
    controller.update(current_kl=9.0, n_steps=1000)
    controller.load_state_dict(AdaptiveKLController(0.5, target=0.1, horizon=100).state_dict())

    assert controller.kl_coef == 0.01


@pytest.mark.parametrize(
    ("current_kl", "expected"),
    [
        (0.11, 0.2 * (1 + 0.1 * 64 / 1000)),  # error 0.1
        (0.095, 0.2 * (1 - 0.05 * 64 / 1000)),
        (5.0, 0.2 * (1 + 0.2 * 64 / 1000)),  # clipped at 0.2
        (0.0, 0.2 * (1 - 0.2 * 64 / 1000)),
        (0.1, 0.2),
    ],
)
def test_an_adaptive_kl_controller_moves_towards_its_target(current_kl, expected):
    controller = AdaptiveKLController(0.2, target=0.1, horizon=1000)

    controller.update(current_kl, n_steps=64)

    assert controller.kl_coef == pytest.approx(expected, rel=1e-12)


def test_a_nan_kl_does_not_change_an_adaptive_kl_controller():
    controller = AdaptiveKLController(0.2, target=0.1, horizon=1000)

    controller.update(float("nan"), n_steps=64)

    assert controller.kl_coef == 0.2


def test_an_adaptive_kl_controller_resumes_where_it_stopped():
    unbroken, stopped = (AdaptiveKLController(0.2, target=0.1, horizon=1000) for _ in range(2))
    for controller in (unbroken, stopped):
        controller.update(0.3, n_steps=64)

    resumed = AdaptiveKLController(0.2, target=0.1, horizon=1000)
    resumed.load_state_dict(stopped.state_dict())
    for controller in (unbroken, resumed):
        controller.update(0.05, n_steps=64)

    assert resumed.kl_coef == unbroken.kl_coef
