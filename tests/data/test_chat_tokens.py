# SPDX-License-Identifier: Apache-2.0
"""The tokens of a conversation to train on."""

import pytest

from verl.data.bad_rows import BadRowError
from verl.data.chat_template import ChatTemplate
from verl.data.sft_dataset import ConversationTokenizer, learned_spans, tokens_inside
from verl.models.tiny import train_tokenizer

TWO_TURNS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "Q2"},
    {"role": "assistant", "content": "two"},
]
# As Qwen3 does: what the assistant thought is taken out of earlier turns.
THINKING = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.last -%}
<think></think>{% endif %}{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
# As DeepSeek-R1's distilled models do: sampling begins inside a thought that finished turns do not have.
OPENED = THINKING.replace("<think></think>", "").replace(
    "<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif"
)
UNCLOSED = THINKING.replace("<think></think>", "").replace("<|im_end|>", ".")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


def texts(tokenizer, messages, turns="all", template=None):
    """Each run of tokens that are learned, as text."""
    tokenize = ConversationTokenizer(tokenizer, ChatTemplate(tokenizer, template), turns)
    _, ids, is_trained = tokenize(messages)
    runs, before = [], False
    for token, is_so in zip(ids, is_trained, strict=True):
        if is_so:
            runs = [*runs[:-1], [*runs[-1], token]] if before else [*runs, [token]]
        before = is_so
    return [tokenizer.decode(run) for run in runs]


def test_only_the_assistants_text_and_its_end_token_are_trained(tokenizer):
    assert texts(tokenizer, TWO_TURNS) == ["one<|im_end|>", "two<|im_end|>"]


def test_with_last_turns_the_earlier_ones_are_context(tokenizer):
    assert texts(tokenizer, TWO_TURNS, "last") == ["two<|im_end|>"]


def test_text_after_the_last_turn_is_not_trained(tokenizer):
    messages = [*TWO_TURNS[:3], {"role": "user", "content": "Thanks."}]

    assert texts(tokenizer, messages) == ["one<|im_end|>"]


def test_an_empty_turn_trains_its_end_token(tokenizer):
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": ""}]

    assert texts(tokenizer, messages) == ["<|im_end|>"]


def test_the_tokens_before_a_turn_equal_the_prompt_of_a_rollout(tokenizer):
    prompt = tokenizer.apply_chat_template(TWO_TURNS[:4], add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)

    _, ids, is_trained = ConversationTokenizer(tokenizer, ChatTemplate(tokenizer, None), "last")(TWO_TURNS)

    assert ids[: len(prompt_ids)] == prompt_ids
    assert is_trained.index(True) == len(prompt_ids)


def test_spans_are_counted_in_characters_of_the_text():
    # "u:Q;a:" has 6 characters, then "A1!" and ";" follow; the second question begins at 10.
    def render(messages, asks):
        text = "".join(f"{m['role']}:{m['content']}{'!' if m['role'] == 'a' else ''};" for m in messages)
        return text + ("a:" if asks else "")

    def as_role(messages, asks):
        return render([m | {"role": m["role"][0]} for m in messages], asks)

    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A1"}]

    text = as_role([*messages, *messages], False)

    spans = learned_spans([*messages, *messages], text, as_role, ("!;",), [1, 3])

    assert text == "u:Q;a:A1!;u:Q;a:A1!;"
    assert spans == [range(6, 10), range(16, 20)]


def test_a_token_that_overlaps_the_edge_of_a_span_is_outside():
    offsets = [(0, 2), (2, 4), (3, 6), (4, 4), (4, 6), (6, 8), (8, 10), (9, 11), (12, 13)]

    inside = tokens_inside(offsets, [range(4, 8), range(8, 10), range(12, 13)])

    assert inside == [False, False, False, False, True, True, True, False, True]


@pytest.mark.parametrize(
    ("template", "turns", "reason"),
    [
        (THINKING, "all", "renders message 2, of the assistant, differently when other messages follow"),
        (OPENED, "all", "does not start message 2, of the assistant, with its generation prompt"),
        (UNCLOSED, "last", "ends message 4, of the assistant, with"),
    ],
)
def test_a_template_that_hides_what_was_sampled_is_an_error(tokenizer, template, turns, reason):
    with pytest.raises(BadRowError, match=f"{reason}.*data.override_chat_template"):
        ConversationTokenizer(tokenizer, ChatTemplate(tokenizer, template), turns)(TWO_TURNS)


def test_a_template_that_rewrites_earlier_turns_works_with_the_last_turn(tokenizer):
    assert texts(tokenizer, TWO_TURNS, "last", THINKING) == ["<think></think>two<|im_end|>"]


def test_a_template_that_fails_is_a_bad_row(tokenizer):
    template = ChatTemplate(tokenizer, "{{ raise_exception('no system') }}")
    with pytest.raises(BadRowError, match=r"the chat template \(.*\) cannot render 5 messages .*: no system"):
        ConversationTokenizer(tokenizer, template, "all")(TWO_TURNS)


CHATML = """{% for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
FIRST_CALL = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content }}{% if message.tool_calls %}{{ message.tool_calls[0].function.name }}{% endif %}",
)
NO_SYSTEM = CHATML.replace("{% for message in messages -%}", "{% for message in messages[1:] -%}")
ADD, DRAW = ({"type": "function", "function": {"name": name, "arguments": {}}} for name in ("add", "draw"))
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]


@pytest.mark.parametrize(
    ("template", "answer", "part"),
    [
        (CHATML, {"tool_calls": [ADD], "content": ""}, "call of `add` of message 2, of the assistant"),
        (FIRST_CALL, {"tool_calls": [ADD, DRAW], "content": ""}, "call of `draw` of message 2"),
        (CHATML, {"reasoning_content": "Easy.", "content": "2"}, "`reasoning_content` of message 2"),
        (NO_SYSTEM, {"content": "2"}, "content of message 0, of the system"),
    ],
    ids=["a call", "the second call", "reasoning", "a system prompt"],
)
def test_what_the_template_leaves_out_of_a_conversation_is_a_bad_row(tokenizer, template, answer, part):
    tokenize = ConversationTokenizer(tokenizer, ChatTemplate(tokenizer, template), "all")

    with pytest.raises(BadRowError, match=f"does not show the {part}.*data.override_chat_template"):
        tokenize([*ASKED, {"role": "assistant", **answer}])


def test_what_a_template_shows_in_another_form_is_shown(tokenizer):
    upper = CHATML.replace("message.content }}", "message.content | upper }}")

    assert texts(tokenizer, [*ASKED, {"role": "assistant", "content": "two"}], template=upper) == [
        "TWO<|im_end|>"
    ]


def test_an_opening_of_the_assistant_is_context(tokenizer):
    opening = {"role": "assistant", "content": "Ask me."}

    assert texts(tokenizer, [opening, *TWO_TURNS[1:3]]) == ["one<|im_end|>"]
    with pytest.raises(BadRowError, match="no message of the assistant follows another message"):
        texts(tokenizer, [opening])
