# SPDX-License-Identifier: Apache-2.0
"""Chat templates of models: rendered as by transformers, within limits."""

import json
import resource
import time
from functools import partial

import pytest

from tests.data.test_chat_tokens import OPENED, THINKING, TWO_TURNS, UNCLOSED
from tests.data.test_rl_dataset import open_text
from verl.data.bad_rows import BadRowError
from verl.data.chat_template import ChatTemplate
from verl.data.readers import load_processor, load_tokenizer
from verl.models.tiny import save_tiny_model, train_tokenizer

CONVERSATIONS = [
    TWO_TURNS[1:2],
    TWO_TURNS,
    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}, {"type": "video"}]}],
    [{"role": "user", "content": "\u00e9\U0001f642 {{ x }}"}, {"role": "assistant", "content": ""}],
]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl", "qwen3_vl"])  # tiny models share one template
def test_templates_of_models_render_as_by_transformers(family, tmp_path):
    folder = save_tiny_model(tmp_path, family)
    tokenizer, processor = load_tokenizer(folder), load_processor(folder)
    for template in (None if processor is None else processor.chat_template, THINKING, OPENED, UNCLOSED):
        chat_template = ChatTemplate(tokenizer, template)
        for messages in CONVERSATIONS[: 4 if template is None else 2]:
            for prompt in (False, True):
                expected = tokenizer.apply_chat_template(
                    messages, chat_template=template, add_generation_prompt=prompt, tokenize=False
                )
                assert chat_template(messages, prompt, "the prompt") == expected
        chat_template.close()


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_that_does_not_end_is_given_up_in_time_and_its_file_is_named(file, tmp_path):
    folder = save_tiny_model(tmp_path, "qwen2")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    if file == "chat_template.jinja":
        (folder / file).write_text(LOOP)
    else:
        config["chat_template"] = LOOP
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    start = time.monotonic()
    with pytest.raises(TimeoutError) as raised:
        ChatTemplate(load_tokenizer(folder), None, timeout_s=0.5)(TWO_TURNS, True, "the prompt")

    assert time.monotonic() - start < 30  # it has no end
    assert f"the chat template ({folder / file}) did not end within 0.5 s for the prompt" in str(raised.value)
    assert "`data.override_chat_template`" in str(raised.value)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 'a' * 10**10 }}", "memory ran out"),
        (
            "{% set n = namespace(t='aaa') %}{% for i in range(40) %}{% set n.t = n.t + n.t %}{% endfor %}",
            "memory ran out",
        ),
        ("{{ 'a' * (2 * 10**7) }}", "it makes 20000000 characters, the limit is 10000000"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_takes_too_much_or_leaves_the_sandbox_is_a_bad_row(
    template, reason, tokenizer, tmp_path
):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    chat_template = ChatTemplate(tokenizer, template, override=str(tmp_path / "a.jinja"))

    with pytest.raises(BadRowError) as raised:
        chat_template(TWO_TURNS, True, "the prompt")

    chat_template.close()
    assert f"the chat template ({tmp_path / 'a.jinja'}) cannot render the prompt: " in str(raised.value)
    assert reason in str(raised.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_run_ends_with_the_templates_file_while_its_rows_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.data.dataset.ChatTemplate", partial(ChatTemplate, timeout_s=0.5))
    folder = save_tiny_model(tmp_path / "model", "qwen2")
    (folder / "chat_template.jinja").write_text(LOOP)

    with pytest.raises(TimeoutError, match=rf"{folder}/chat_template.jinja.*does it loop forever"):
        open_text(folder, tmp_path, [{"problem": "1?", "answer": "1"}])
