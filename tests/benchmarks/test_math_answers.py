# SPDX-License-Identifier: Apache-2.0
import pytest

from benchmarks.math_answers import count, read_pairs, wrong_verdicts
from benchmarks.reward_parity import FORMS, NUM_RESPONSES, make_cases
from verl.rewards.graders.math import same_answer


@pytest.mark.nightly("verl/rewards", "benchmarks")
def test_the_grader_makes_half_the_errors_of_mathruler_and_math_verify_on_300_pairs():
    pairs = read_pairs()

    counts = count(wrong_verdicts(same_answer, pairs))

    assert len(pairs) == 300 and sum(pair["clear"] for pair in pairs) == 281
    assert counts["false_positives"] == 0  # math-verify 10, mathruler 11
    assert counts["false_negatives"] <= 8  # math-verify 38, mathruler 84
    assert counts["clear_false_negatives"] <= 2  # math-verify 32, mathruler 71


def test_responses_for_the_comparison_of_rewards_have_every_form():
    for name, forms in FORMS.items():
        cases = make_cases(name)

        assert len(cases) == NUM_RESPONSES
        assert {case.form for case in cases} == {form[0] for form in forms}
        assert 100 < sum(case.accuracy for case in cases) < 400
