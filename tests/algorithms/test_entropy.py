# SPDX-License-Identifier: Apache-2.0
import pytest

from verl.algorithms.entropy import AdaptiveEntropyController, FixedEntropyController


def controller(coef=0.0, minimum=0.0):
    return AdaptiveEntropyController(coef, target=0.2, delta=0.001, maximum=0.003, minimum=minimum)


def run(controller, entropies):
    """The weight in use after each step."""
    coefs = []
    for entropy in entropies:
        controller.update(entropy)
        coefs.append(controller.coef)
    return coefs


def test_the_weight_rises_while_entropy_is_low_and_stops_at_its_maximum():
    assert run(controller(), [0.1, 0.1, 0.19, 0.0]) == pytest.approx([0.001, 0.002, 0.003, 0.003])


def test_there_is_no_bonus_at_or_above_the_target_but_the_weight_is_kept():
    # c goes 1, 2, 3 thousandths, down to 2 and 1 while paused, and is 2 when entropy is low again.
    entropies = [0.1, 0.1, 0.1, 0.2, 0.5, 0.1]

    assert run(controller(), entropies) == pytest.approx([0.001, 0.002, 0.003, 0, 0, 0.002])


def test_the_weight_falls_no_lower_than_its_minimum():
    assert run(controller(0.001, minimum=0.001), [0.5, 0.5, 0.1]) == pytest.approx([0, 0, 0.002])


def test_before_the_first_step_the_weight_is_that_of_the_options():
    assert controller(0.002).coef == 0.002


def test_a_nan_entropy_changes_nothing():
    assert run(controller(), [0.1, float("nan"), 0.1]) == pytest.approx([0.001, 0.001, 0.002])


@pytest.mark.parametrize("before", [[0.1, 0.1], [0.1, 0.1, 0.4]])
def test_an_adaptive_controller_resumes_where_it_stopped_paused_or_not(before):
    unbroken, stopped, resumed = controller(), controller(), controller()
    run(unbroken, before)
    run(stopped, before)

    resumed.load_state_dict(stopped.state_dict())

    assert resumed.coef == unbroken.coef
    assert run(resumed, [0.1, 0.3, 0.1]) == run(unbroken, [0.1, 0.3, 0.1])


def test_an_adaptive_controller_ignores_the_state_of_a_fixed_one():
    adaptive = controller(0.002)
    adaptive.load_state_dict(FixedEntropyController(0.5).state_dict())

    assert adaptive.coef == 0.002


def test_a_fixed_controller_never_changes():
    fixed = FixedEntropyController(0.01)
    fixed.load_state_dict(controller(0.002).state_dict())

    assert run(fixed, [0.0, 9.0]) == [0.01, 0.01]


@pytest.mark.parametrize(("coef", "minimum"), [(0.004, 0.0), (0.0, 0.001)])
def test_an_initial_weight_outside_of_the_bounds_is_rejected(coef, minimum):
    with pytest.raises(ValueError, match=rf"`worker.actor.entropy_coef` \({coef}\) must lie between"):
        controller(coef, minimum)
