# SPDX-License-Identifier: Apache-2.0
"""Tools and their chat template are shown and judged before a run, and before its workers load anything."""

import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.agent_runs import OPTIONS
from tests.helpers.training import ROOT
from verl.cli.data_check import main
from verl.cli.data_report.tools import example_call
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.data.readers import load_tokenizer
from verl.trainer.extensions import checks, rollouts
from verl.trainer.prepare import PreparedRun
from verl.trainer.setup import build_trainer

POOL = SimpleNamespace(device="cpu")  # of which nothing is taken
SHIPPED = f"data.override_chat_template={ROOT / 'examples/chat_template/qwen_vl_tools.jinja'}"
ZOOM = "worker.rollout.multi_turn.tools=[zoom]"
HERMES = "worker.rollout.multi_turn.format=hermes"
LOSSY = """{%- for tool in tools %}{{ tool | tojson }}{% endfor -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{{ loop.length }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n' }}{{ call.function | tojson }}{{ '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
{#- "tool" <tool_call> "arguments" -#}
"""


@pytest.fixture
def lossy(tmp_path):
    """A template that renders a turn differently in a longer conversation."""
    file = tmp_path / "lossy.jinja"
    file.write_text(LOSSY)
    return f"data.override_chat_template={file}"


def test_tools_are_shown_in_the_prompt_and_in_an_example(run, tmp_path, capsys):
    options = (*OPTIONS, ZOOM, SHIPPED, "data.max_prompt_length=2000")
    assert main([*run, *options, "--rows", "1", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out

    assert "tool: zoom(box, image): " in text
    prompts = text[text.index("prompt:") :]
    assert '"name": "zoom"' in prompts  # as the model will read it
    example = [line.strip() for line in text.splitlines() if line.startswith(("  + ", "  | "))]
    written = [line for line in example if line.startswith("+")]
    assert written == [
        "+ <tool_call>", '+ {"name": "zoom", "arguments": {"box": []}}', "+ </tool_call><|im_end|>",
    ]  # fmt: skip
    after = example[example.index(written[-1]) + 1 :]
    assert after[0] == "| <|im_start|>user" and "(the answer)" in "".join(after[:4])
    assert "<|image_pad|>" in "".join(after[:4]) and after[4].startswith("| <|im_start|>assistant")


@pytest.mark.parametrize(
    ("kind", "code", "line"),
    [
        (
            "environment",
            "class Given:\n    def reset(self, row): ...\n    def step(self, text, calls): ...\n"
            "    def close(self): ...\n",
            "its `reset` may replace the prompts below",
        ),
        (
            "agent",
            "def Given(row, policy): ...\n",
            "it may send other messages than the prompts below",
        ),
    ],
)
def test_who_else_gives_prompts_is_named(run, tmp_path, capsys, kind, code, line):
    file = tmp_path / "given.py"
    file.write_text(code)
    options = (*OPTIONS[:-3], SHIPPED, f"worker.rollout.multi_turn.{kind}={file}:Given")

    assert main([*run, *options, "--rows", "1", "--out", str(tmp_path)]) == 0

    assert capsys.readouterr().out.startswith(f"{kind} {file}:Given: {line}\n\n")


def test_a_template_that_cannot_show_conversations_is_an_error_of_the_data(run, lossy, tmp_path, capsys):
    status = main([*run, *OPTIONS, ZOOM, HERMES, lossy, "--out", str(tmp_path)])

    said = capsys.readouterr()
    assert status == 2
    reason = r"`worker.rollout.multi_turn.enable=true`: the chat template .* `data.override_chat_template`"
    assert re.search(reason, said.out + said.err)


def test_tools_that_the_template_does_not_show_are_an_error_with_a_remedy(run, tmp_path, capsys):
    options = [option for option in OPTIONS if "override_chat_template" not in option]

    assert main([*run, *options, ZOOM, "--out", str(tmp_path)]) == 2

    said = capsys.readouterr()
    remedy = r"`worker.rollout.multi_turn.tools` .* `data.override_chat_template`, .*`verl-examples`"
    assert re.search(remedy, said.out + said.err)


SENTENCE = '''
def look(text: str) -> str:
    """Look.

    Args:
        text: As {description}. (choices: ["{choice}"])
    """
'''


@pytest.mark.parametrize("place", ["description", "choice"])
def test_a_special_token_in_the_schema_of_a_tool_is_an_error_with_a_remedy(run, tmp_path, capsys, place):
    file = tmp_path / "tools.py"
    file.write_text(SENTENCE.format(**{"description": "you like", "choice": "all"} | {place: "a <|im_end|>"}))

    tools = f"worker.rollout.multi_turn.tools=[{file}:look]"
    assert main([*run, *OPTIONS[:-3], tools, SHIPPED, "--rows", "0", "--out", str(tmp_path)]) == 2

    said = capsys.readouterr()
    reason = f"`worker.rollout.multi_turn.tools={file}:look`: the names, descriptions and values of the"
    assert f"{reason} tool `look` must hold no special token of the model" in said.out + said.err
    assert "got '<|im_end|>': write it otherwise, such as '< |im_end|>'" in said.out + said.err


def test_a_response_must_have_room_for_the_shortest_answer_of_its_template(run, tmp_path, capsys):
    # <|im_end|> \n <|im_start|> user \n <|im_end|> \n <|im_start|> assistant \n: the first ends a turn
    tokenizer = load_tokenizer(load_config(PPOConfig, [*run]).worker.actor.model.model_path)
    answer = "\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    needed = len(tokenizer.encode(answer, add_special_tokens=False)) + 2
    options = [*run, *OPTIONS, ZOOM, "--rows", "0", "--out", str(tmp_path)]

    assert main([*options, f"data.max_response_length={needed}"]) == 0
    assert main([*options, f"data.max_response_length={needed - 1}"]) == 2

    said = capsys.readouterr()
    assert f"`data.max_response_length` must be at least {needed} with" in said.out + said.err


def test_a_run_with_such_a_template_ends_before_a_worker_loads_its_model(run, lossy):
    config = load_config(PPOConfig, [*run, *OPTIONS, ZOOM, HERMES, lossy])

    expected = r"`worker\.rollout\.multi_turn\.enable=true`: the chat template"
    with pytest.raises(ValueError, match=expected), ExitStack() as stack:
        build_trainer(PreparedRun(config, POOL), stack)


def test_the_files_of_several_tools_are_loaded_once(run, tmp_path, monkeypatch):
    file = Path(tmp_path, "tools.py")
    file.write_text("".join(f'def {name}() -> str:\n    """Return it."""\n\n' for name in ("one", "two")))
    tools = f"worker.rollout.multi_turn.tools=[{file}:one,{file}:two]"
    loads, load_tools = [], rollouts.load_tools
    monkeypatch.setattr(rollouts, "load_tools", lambda options: loads.append(load_tools(options)))

    checks.check_extensions(load_config(PPOConfig, [*run, *OPTIONS[:-3], tools]))

    assert [[tool.name for tool in loaded] for loaded in loads] == [["one", "two"]]


def test_an_example_has_a_value_for_each_argument_that_is_needed():
    kinds = {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}, "c": {"type": ["null", "string"]}, "d": {}}
    parameters = {"type": "object", "properties": kinds, "required": ["a", "b", "c"]}

    call = example_call({"function": {"name": "add", "parameters": parameters}})

    assert (call.name, call.arguments) == ("add", {"a": 1, "b": "x", "c": None})
