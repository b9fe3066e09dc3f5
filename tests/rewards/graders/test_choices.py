# SPDX-License-Identifier: Apache-2.0
"""The letter of a multiple-choice answer."""

import pytest

from verl.rewards.graders.choices import choice_letter

CHOICES = ["She sits", "He runs."]


@pytest.mark.parametrize(
    "text",
    [
        "B", "b", " (B) ", "B.", "B. He runs", "B) He runs", "(B) He runs", "(B): so", "**B**", "$B$",
        "Option B",
        "The answer is B", "Therefore the final answer is: B.", "The best answer is: (B)", r"\boxed{B}",
        r"So \boxed{\text{B}}", "he   runs", "I see him. So the answer is B.",
        "It may be A.\nThe answer is B.",
    ],
)  # fmt: skip
def test_an_answer_that_names_one_choice_has_its_letter(text):
    assert choice_letter(text, CHOICES) == "B"


@pytest.mark.parametrize(
    "text",
    [
        "", "A, B", "A or B", "A. She sits. B. He runs.", "Bob", "The answer: A man runs",
        "I think it is B because",
        r"\boxed{A} or \boxed{B}", "J", "5", "a" * 130_000,
    ],
)  # fmt: skip
def test_an_answer_that_names_none_or_several_has_no_letter(text):
    assert choice_letter(text, CHOICES) is None


def test_a_text_that_two_choices_share_names_none_of_them():
    assert choice_letter("Yes", ["Yes", "yes."]) is None
