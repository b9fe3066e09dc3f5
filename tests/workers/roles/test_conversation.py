# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from verl.data.readers import read_tokenizer
from verl.models.tiny import save_tiny_model, train_tokenizer
from verl.protocol import DataProto
from verl.workers.roles.reward_model import (
    OPTION,
    encode_conversations,
    has_same_conversations,
    has_same_tokens,
    response_texts,
)

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE


def tokenizer_with(template, vocab_size=512):
    tokenizer = train_tokenizer(vocab_size)
    tokenizer.chat_template = template
    return tokenizer


def test_a_tokenizer_with_more_tokens_reads_the_policys():
    policy, larger = train_tokenizer(), train_tokenizer()
    larger.add_tokens(["<score>"])

    assert has_same_tokens(larger, policy)
    assert not has_same_tokens(policy, larger)
    assert not has_same_tokens(train_tokenizer(vocab_size=300), policy)


def test_conversations_differ_with_the_chat_template_and_not_without_one():
    policy = train_tokenizer()

    assert has_same_conversations(train_tokenizer(), policy)
    assert has_same_conversations(tokenizer_with(None), policy)
    assert not has_same_conversations(tokenizer_with(TEMPLATE), policy)
    assert not has_same_conversations(train_tokenizer(vocab_size=300), policy)


def test_the_text_of_a_response_has_no_special_tokens_and_no_padding_and_keeps_tool_output():
    policy = train_tokenizer()
    finished = [*policy.encode("the answer is 4"), policy.eos_token_id]
    with_tool = policy.encode("add 2 + 2 = 4")
    width = max(len(finished), len(with_tool)) + 2
    rows = [finished, with_tool]
    responses = torch.tensor([row + policy.encode("!") * (width - len(row)) for row in rows])
    attended = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    batch = DataProto.from_dict(
        {
            "responses": responses,
            "attention_mask": torch.cat([torch.ones(2, 3, dtype=torch.int64), attended], 1),
            "response_mask": attended,
            "loss_mask": attended * torch.tensor([[1] * width, [1] + [0] * (width - 1)]),
        }
    )

    assert response_texts(batch, policy) == ["the answer is 4", "add 2 + 2 = 4"]


def test_conversations_are_rendered_and_padded_on_the_right():
    tokenizer = tokenizer_with(TEMPLATE)
    prompts = [
        [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "How many?"}],
        [{"role": "user", "content": "red"}],
    ]

    batch = encode_conversations(prompts, ["three circles", "no"], tokenizer).batch

    texts = [
        "system: You are helpful.\nuser: How many?\nassistant: three circles\n",
        "user: red\nassistant: no\n",
    ]
    for row, text in enumerate(texts):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert batch["input_ids"][row, : len(ids)].tolist() == ids
        assert batch["attention_mask"][row].tolist() == [1] * len(ids) + [0] * (
            batch["attention_mask"].shape[1] - len(ids)
        )
        assert batch["position_ids"][row, : len(ids)].tolist() == list(range(len(ids)))


def test_a_template_that_refuses_a_conversation_is_named_by_its_option():
    prompts = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]]

    with pytest.raises(ValueError, match=r"`worker.reward_model.model.tokenizer_path`.*no system role"):
        encode_conversations(prompts, ["Hello"], tokenizer_with(STRICT))


def test_a_tokenizer_is_loaded_and_a_missing_one_is_named_by_its_option(tmp_path):
    save_tiny_model(tmp_path / "model", "qwen2", num_hidden_layers=1)

    assert has_same_conversations(read_tokenizer(str(tmp_path / "model")), train_tokenizer())
    with pytest.raises(ValueError, match=r"`worker.reward_model.model.model_path` \(or `tokenizer_path`\)"):
        read_tokenizer(str(tmp_path / "nothing"), option=OPTION)
