# SPDX-License-Identifier: Apache-2.0
"""Observations as the tokens that follow a turn, for the chat templates of several families."""

import pytest

from tests.helpers.conversations import renderer_of
from tests.helpers.tool_templates import TEMPLATES, tool_tokenizer
from verl.agents.interface import Observation, ToolCall
from verl.agents.rendering import ObservationRenderer, Style
from verl.data.chat_template import ChatTemplate
from verl.models.tiny import train_tokenizer

CALLS = [ToolCall("add", {"a": 2}), ToolCall("look", {})]
ANSWERS = [Observation("five"), Observation("a cat")]
CHATML_ONE = "\n<|im_start|>user\n<tool_response>\nfive\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
CHATML_TWO = (
    "\n<|im_start|>user\n<tool_response>\nfive\n</tool_response>\n<tool_response>\na cat\n</tool_response>"
    "<|im_end|>\n<|im_start|>assistant\n"
)
# The token that ends a turn, and what follows it after one call and after two.
FOLLOWING = {
    "hermes": ("<|im_end|>", CHATML_ONE, CHATML_TWO),
    "qwen3": ("<|im_end|>", CHATML_ONE, CHATML_TWO),
    "qwen3_coder": ("<|im_end|>", CHATML_ONE, CHATML_TWO),
    "qwen3_5": ("<|im_end|>", CHATML_ONE + "<think>\n", CHATML_TWO + "<think>\n"),
    "glm": (
        "<|observation|>",
        "\n<tool_response>\nfive\n</tool_response><|assistant|>",
        "\n<tool_response>\nfive\n</tool_response>\n<tool_response>\na cat\n</tool_response><|assistant|>",
    ),
    "llama": (
        "<|eot_id|>",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"five"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"five\\na cat"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma": (
        "<end_of_turn>",
        "\n<start_of_turn>user\n<tool_response>\nfive\n</tool_response><end_of_turn>\n<start_of_turn>model\n",
        "\n<start_of_turn>user\n<tool_response>\nfive\n</tool_response>\n<tool_response>\na cat\n"
        "</tool_response><end_of_turn>\n<start_of_turn>model\n",
    ),
    "gemma4": (
        "<|tool_response>",
        'response:add{value:<|"|>five<|"|>}<tool_response|>',
        'response:add{value:<|"|>five<|"|>}<tool_response|>'
        '<|tool_response>response:look{value:<|"|>a cat<|"|>}<tool_response|>',
    ),
}


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def following(renderer, last, calls, observations):
    return renderer.after_turn(last, calls, renderer.messages(calls, observations))


def changed(template, old, new):
    """A renderer of a template with a part replaced."""
    tokenizer = tool_tokenizer(template)
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    return renderer_of(tokenizer)


@pytest.mark.parametrize("template", TEMPLATES)
def test_observations_follow_the_end_of_the_turn(template):
    tokenizer = tool_tokenizer(template)
    end, one, two = FOLLOWING[template]
    (last,) = encode(tokenizer, end)
    renderer = renderer_of(tokenizer)

    assert following(renderer, last, CALLS[:1], ANSWERS[:1]) == encode(tokenizer, one)
    assert following(renderer, last, CALLS, ANSWERS) == encode(tokenizer, two)
    for count in (1, 2, 5):
        renderer.check(count)


def test_another_end_token_takes_the_place_of_the_templates():
    tokenizer = tool_tokenizer("hermes")

    tokens = following(renderer_of(tokenizer), tokenizer.pad_token_id, CALLS[:1], ANSWERS[:1])

    assert tokens == encode(tokenizer, CHATML_ONE)


def test_a_turn_without_an_end_token_is_closed():
    tokenizer = tool_tokenizer("hermes")
    (last,) = encode(tokenizer, "</tool_call>")  # a stop text of the engine

    tokens = following(renderer_of(tokenizer), last, CALLS[:1], ANSWERS[:1])

    assert tokens == encode(tokenizer, f"<|im_end|>{CHATML_ONE}")


@pytest.mark.parametrize("last", ["<|user|>", "</tool_call>"])
def test_a_header_that_the_policy_did_not_sample_is_added(last):
    tokenizer = tool_tokenizer("glm")
    (token,) = encode(tokenizer, last)

    tokens = following(renderer_of(tokenizer), token, CALLS[:1], ANSWERS[:1])

    assert tokens == encode(tokenizer, f"<|observation|>{FOLLOWING['glm'][1]}")


def test_a_template_without_tools_shows_observations_as_the_users():
    tokenizer = train_tokenizer()

    renderer = renderer_of(tokenizer)

    assert renderer.style == Style("user", has_parts=False)
    assert renderer.messages(CALLS, ANSWERS) == [
        {
            "role": "user",
            "content": "<tool_response>\nfive\n</tool_response>\n<tool_response>\na cat\n</tool_response>",
        }
    ]
    assert following(renderer, tokenizer.eos_token_id, CALLS, ANSWERS) == encode(tokenizer, CHATML_TWO)


def test_the_models_template_is_rendered_in_a_process_of_its_own():
    tokenizer = tool_tokenizer("hermes")
    template = ChatTemplate(tokenizer, None, {"tools": []})

    renderer = ObservationRenderer(tokenizer, template, tokenizer.chat_template, {})

    assert following(renderer, tokenizer.eos_token_id, CALLS, ANSWERS) == encode(tokenizer, CHATML_TWO)
    template.close()


@pytest.mark.parametrize("name", ["add", "</tool_call>", "zq17 zq17", "<|im_end|>", ""])
def test_any_name_of_a_tool_is_rendered(name):
    tokenizer = tool_tokenizer("hermes")

    tokens = following(renderer_of(tokenizer), tokenizer.eos_token_id, [ToolCall(name, {})], ANSWERS[:1])

    assert tokens == encode(tokenizer, CHATML_ONE)


def test_special_tokens_in_the_name_of_a_tool_are_text():
    tokenizer = tool_tokenizer("gemma4")

    (last,) = encode(tokenizer, "<|tool_response>")
    tokens = following(renderer_of(tokenizer), last, [ToolCall("<turn|>", {})], ANSWERS[:1])

    assert tokens == encode(tokenizer, 'response:< turn|>{value:<|"|>five<|"|>}<tool_response|>')


def test_a_template_whose_tools_show_nothing_uses_messages_of_the_user(caplog):
    renderer = changed("glm", "{{ message.content }}{{ '\\n</tool", "{{ '\\n</tool")

    assert renderer.style.role == "user"
    assert "in messages of the role 'tool' it renders the text 'seen' as '<|observation|>" in caplog.text


def test_a_template_that_shows_no_observations_is_refused():
    with pytest.raises(
        ValueError, match=r"cannot show observations: in messages of the role 'user' it renders"
    ):
        changed("gemma", "message.content | trim", "message.content | trim if message.role == 'assistant'")


def test_a_template_whose_turns_have_no_end_is_refused():
    tokenizer = tool_tokenizer("gemma")
    for token in ("<start_of_turn>", "<end_of_turn>"):
        tokenizer.chat_template = tokenizer.chat_template.replace(token, "##")

    with pytest.raises(ValueError, match=r"no special token ends the assistant's turn before '##"):
        renderer_of(tokenizer)


def test_a_template_that_shows_no_turns_is_refused():
    with pytest.raises(ValueError, match="the assistant's text is not shown"):
        changed("gemma", "message.content | trim", "'' | trim")


def test_the_check_finds_an_observation_that_looks_different_later():
    # The first answer is the third message, the second one the fifth.
    renderer = changed("glm", "<tool_response>\\n'", "<tool_response>' ~ loop.index ~ '\\n'")

    with pytest.raises(ValueError, match=r"expected '5.*', got '3.*': set another template"):
        renderer.check()


def test_the_check_finds_a_piece_that_is_tokenized_differently_alone():
    renderer = changed("glm", "<|observation|>", "<|observation|>")
    encode_alone = renderer._encode
    renderer._encode = lambda text: encode_alone(text) + [0] * text.startswith("<|observation|>")

    with pytest.raises(ValueError, match="cannot be tokenized alone"):
        renderer.check()


def test_special_tokens_become_text():
    renderer = renderer_of(tool_tokenizer("glm"))

    for text in ("<|user|>", "<|im_<|im_end|>end|>", "a<|user|><|user|>b", "[gMASK]"):
        plain = renderer.plain(text)

        assert plain.replace(" ", "") == text
        assert not set(encode(renderer.tokenizer, plain)) & set(renderer.tokenizer.all_special_ids)
    assert renderer.plain("nothing <b>special</b> | here") == "nothing <b>special</b> | here"


def test_a_turn_may_end_with_the_second_of_two_special_tokens():
    # The template ends a call and then, as the policy does, starts the answer.
    renderer = changed("gemma4", "if message.tool_calls else", "if message.tool_calls and not loop.last else")
    end, one, _ = FOLLOWING["gemma4"]
    (last,) = encode(renderer.tokenizer, end)

    assert following(renderer, last, CALLS[:1], ANSWERS[:1]) == encode(renderer.tokenizer, one)


@pytest.mark.parametrize("template", sorted(FOLLOWING))
def test_messages_that_answer_the_calls_of_a_turn_are_the_tokens_of_its_observations(template):
    tokenizer = tool_tokenizer(template)
    renderer = renderer_of(tokenizer)
    end = tokenizer.convert_tokens_to_ids(FOLLOWING[template][0])
    answers = [{"role": "tool", "tool_call_id": "any", "content": one.text} for one in ANSWERS]

    assert renderer.after_turn(end, CALLS[:1], answers[:1]) == following(
        renderer, end, CALLS[:1], ANSWERS[:1]
    )
    assert renderer.after_turn(end, CALLS, answers) == following(renderer, end, CALLS, ANSWERS)


USER_AFTER = {
    "hermes": "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n",
    "qwen3_5": "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "gemma": "\n<start_of_turn>user\nagain<end_of_turn>\n<start_of_turn>model\n",
    "llama": "<|start_header_id|>user<|end_header_id|>\n\nagain<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
}


@pytest.mark.parametrize("template", sorted(USER_AFTER))
@pytest.mark.parametrize("calls", [[], CALLS[:1]], ids=["no call", "a call"])
def test_a_message_of_the_user_follows_a_turn(template, calls):
    tokenizer = tool_tokenizer(template)
    renderer = renderer_of(tokenizer)
    end = tokenizer.convert_tokens_to_ids(FOLLOWING[template][0])

    tokens = renderer.after_turn(end, calls, [{"role": "user", "content": "again"}])

    assert tokenizer.decode(tokens) == USER_AFTER[template]


def test_a_special_token_in_a_message_is_read_as_text():
    tokenizer = tool_tokenizer("hermes")
    renderer = renderer_of(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    tokens = renderer.after_turn(end, [], [{"role": "user", "content": "<|im_end|>"}])

    assert tokens.count(end) == 1
    assert "< |im_end|>" in tokenizer.decode(tokens)
