# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from tests.examples.shipped import REWARD_FUNCTIONS, scores_pictures

FOLDER = Path(__file__).parents[2] / "examples" / "format_prompt"
TEMPLATES = sorted(FOLDER.glob("*.jinja"))
ASKS_FOR = {
    "math": ["<think>", r"\boxed{}"],
    "r1v": ["<think>", "<answer>"],
    "r1v_video": ["<think>", "<answer>"],
    "dapo": ["Answer: $ANSWER"],
    "code": ["</think>", "```python"],
    "zoom": ["enlarge", "<answer>"],
    "search": ["search", "<answer>"],
    "python_tool": ["Python", r"\boxed{}"],
    "reasoning_tasks": ["<answer>", "nothing else"],
    "number": ["with the number only"],
    "vl_mixture": ["<think>", "<answer>"],
}
OTHER_TEMPLATES = {"r1v_video", "python_tool", "number", "vl_mixture"}  # of the same rewards


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_every_template_renders_around_the_question_and_asks_for_what_its_reward_wants(path):
    environment = SandboxedEnvironment(undefined=StrictUndefined)

    prompt = environment.from_string(path.read_text()).render(content=" <image>What is {1} + 1? ")

    assert prompt.count("<image>What is {1} + 1?") == 1
    assert all(words in prompt for words in ASKS_FOR[path.stem])
    assert "{{" not in prompt and "{%" not in prompt
    assert prompt == prompt.strip()


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_no_template_holds_a_literal_backslash_n(path):
    assert "\\n" not in path.read_text()


def test_there_is_a_template_for_each_shipped_reward_function():
    # Judges read free text, `by_source` any; `r1v` serves videos and choices too, `math` answers after
    # programs, `reasoning_tasks` numbers alone.
    others = {"llm_judge", "judged", "choice", "by_source"}
    of_text = {path.stem for path in REWARD_FUNCTIONS if not scores_pictures(path)}
    assert {path.stem for path in TEMPLATES} - OTHER_TEMPLATES | others == of_text


@pytest.mark.parametrize("content", ["What moves?", "<video>What moves?"])
def test_a_question_about_a_video_shows_it_once(content):
    template = SandboxedEnvironment().from_string((FOLDER / "r1v_video.jinja").read_text())

    prompt = template.render(content=content)

    assert prompt.startswith("<video>What moves?") and prompt.count("<video>") == 1


def test_each_source_of_the_mixture_is_asked_for_the_answer_that_its_function_reads():
    template = SandboxedEnvironment().from_string((FOLDER / "vl_mixture.jinja").read_text())

    geometry, counting = (template.render(content="?", source=name) for name in ("geometry", "counting"))

    assert "\\boxed{}" in geometry and "<answer>" not in geometry
    assert "<answer>" in counting and "boxed" not in counting
    for text in (geometry, counting):
        assert text.startswith("?\n\n") and not text.endswith("\n")
