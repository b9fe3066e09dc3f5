# SPDX-License-Identifier: Apache-2.0
"""Mistakes in YAML files and in lists and mappings on the command line, as a person would say them."""

import pytest

from verl.config.hints.arguments import as_list, as_mapping, whole_arguments
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, load_config

MISTAKES = {
    "a tab": ("data:\n\ttrain_files: a\n", "line 2: it starts with a tab; YAML indents by spaces"),
    "a tab after spaces": ("data:\n  seed: 1\n  \tshuffle: true\n", "line 3: it starts with a tab"),
    "a key deeper than a value": (
        "data:\n  train_files: a\n    val_files: b\n",
        "line 3: it is indented further than line 2, `train_files: a`, which has a value",
    ),
    "an indent between others": (
        "data:\n  train_files: a\n val_files: b\n",
        "line 3: it is indented by 1 space, the sections above by 0 or 2",
    ),
    "a key twice": (
        "data:\n  seed: 1\nworker:\n  seed: 1\n  actor: {}\n  seed: 2\n",
        "line 6: `seed` is there already, in line 4: keep one of them",
    ),
    "a key twice in braces": (
        "data:\n  sources: {a: {weight: 1}, b: {}, a: {weight: 2}}\n",
        "line 2: `a` is there twice: keep one of them",
    ),
    "a quoted key twice": (
        "data:\n  'seed': 1\n  seed: 2\n",
        "line 3: `seed` is there already, in line 2: keep one of them",
    ),
    "an open list": ("data:\n  train_files: [a, b\n  seed: 1\n", "line 2: the [ in column 16 is not closed"),
    "an open mapping": ('{"data": {"seed": 1}', "line 1: the { in column 1 is not closed"),
    "an open quote": ('data:\n  train_files: "a\n  seed: 1\n', 'line 2: the " in column 16 is not closed'),
    "no colon": ("data:\n  train_files a\n  seed: 1\n", "line 2: `train_files a` needs `: `"),
    "no space": ("data:\n  train_files:a\n  seed: 1\n", "line 2: `train_files:a` needs `: `"),
    "a value with a colon": (
        "data:\n  prompt_key: what: is\n",
        "line 2: a value with a colon needs quotes: `prompt_key: 'what: is'`",
    ),
    "a sign of YAML": (
        "data:\n  prompt_key: @x\n",
        "line 2: a value that starts with @ needs quotes: `prompt_key: '@x'`",
    ),
    "a star": ("data:\n  prompt_key: *x\n", "line 2: a value that starts with * needs quotes"),
    "a template": (
        "data:\n  format_prompt: {{ content }}\n",
        "line 2: a value that starts with { needs quotes: `format_prompt: '{{ content }}'`",
    ),
}


@pytest.mark.parametrize(("text", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_file_is_named_with_its_line(text, said, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError) as raised:
        load_config(PPOConfig, [f"config={file}"])

    (problem,) = raised.value.problems
    assert problem.startswith(f"`config`: {file}, {said}")
    assert '<unicode string>"' not in problem and "token" not in problem


def problems_of(*arguments):
    with pytest.raises(ConfigError) as raised:
        load_config(PPOConfig, arguments)
    return raised.value.problems


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["worker.reward.reward_function_kwargs={a:", "1}"], "reward_function_kwargs='{a: 1}'"),
        (["data.train_files=[a,", "b]"], "write data.train_files='[a, b]'"),
        (["trainer.logger=console,file"], """; write trainer.logger='["console","file"]'"""),
        (["worker.actor.optim.betas=0.9,0.95"], "; write worker.actor.optim.betas='[0.9,0.95]'"),
        (["worker.reward.reward_function_kwargs=a:1"], """_kwargs='{"a":1}'"""),
        (["trainer.logger=[console"], "cannot be read from '[console': the [ in column 1 is not closed"),
    ],
)  # fmt: skip
def test_a_list_or_mapping_that_the_shell_spoiled_is_answered_with_its_spelling(arguments, said):
    assert sum(said in problem for problem in problems_of(*arguments)) == 1


def test_only_an_argument_with_an_open_bracket_is_joined_to_the_next():
    arguments = ["a=[1,", "2]", "b=[1", "c={x: 1}", "d=1", "2]"]

    assert list(whole_arguments(arguments)) == [
        ("a=[1, 2]", True), ("b=[1", False), ("c={x: 1}", False), ("d=1", False), ("2]", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"), [("a,b", '["a","b"]'), ("1, 2.5", "[1,2.5]"), ("a", None), ("a,,b", None)]
)
def test_text_with_commas_is_a_list(text, expected):
    assert as_list(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("a:1,b: x", '{"a":1,"b":"x"}'), ("a", None), ("a:", None), ("a:1,b", None)]
)
def test_text_with_colons_is_a_mapping(text, expected):
    assert as_mapping(text) == expected
