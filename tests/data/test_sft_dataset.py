# SPDX-License-Identifier: Apache-2.0
"""Conversations as rows of a batch."""

import json
from dataclasses import replace

import pytest
import torch

from tests.helpers.media import save_image, save_video
from verl.config.data import DataConfig
from verl.config.sft import SFTDataConfig
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.readers import load_processor, load_tokenizer
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto

CONFIG = SFTDataConfig(max_length=64, filter_overlong_prompts_workers=1)
CHAT = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "three"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny_model(root / family, family) for family in ("qwen2", "qwen2_5_vl", "qwen3_vl")}


def open_rows(tmp_path, folder, rows, kind=SFTDataset, config=CONFIG):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    processor = load_processor(folder)
    media = None if processor is None else MediaLoader(processor, MediaOptions(1, 10**6, num_video_frames=4))
    return kind(str(file), load_tokenizer(folder), processor, config, media=media)


def learned(dataset, item):
    return dataset.tokenizer.decode(item["input_ids"][item["is_trained"].bool()])


def test_a_prompt_and_its_response_form_a_conversation(tmp_path, folders):
    row = {"prompt": "How many?", "response": "three"}
    (tmp_path / "format.jinja").write_text("{{ content }}")
    config = replace(CONFIG, format_prompt=str(tmp_path / "format.jinja"))
    single = open_rows(tmp_path, folders["qwen2"], [row], config=config)[0]
    chat = open_rows(tmp_path, folders["qwen2"], [{"messages": CHAT}])[0]

    assert all(single[name].equal(chat[name]) for name in SFTDataset.tensors)


def test_sharegpt_conversations_equal_chat_conversations(tmp_path, folders):
    said = [{"from": "system", "value": "Count."}, {"from": "human", "value": "How many?"}]
    said.append({"from": "gpt", "value": "three"})
    config = replace(CONFIG, messages_key="conversations")
    sharegpt = open_rows(tmp_path, folders["qwen2"], [{"conversations": said}], config=config)[0]
    system = {"role": "system", "content": "Count."}
    chat = open_rows(tmp_path, folders["qwen2"], [{"messages": [system, *CHAT]}])[0]

    assert all(sharegpt[name].equal(chat[name]) for name in SFTDataset.tensors)


def test_a_prompt_uses_the_same_template_as_a_rollout(tmp_path, folders):
    (tmp_path / "format.jinja").write_text("{{ content }} Think.")
    config = replace(CONFIG, format_prompt=str(tmp_path / "format.jinja"))
    dataset = open_rows(tmp_path, folders["qwen2"], [{"prompt": "2 + 3", "response": "5"}], config=config)

    item = dataset[0]

    assert "2 + 3 Think.<|im_end|>" in dataset.tokenizer.decode(item["input_ids"])
    assert learned(dataset, item) == "5<|im_end|>"


def test_a_batch_pads_on_the_right_and_shifts_by_one(tmp_path, folders):
    longer = [CHAT[0], {"role": "assistant", "content": "one two three four"}]
    dataset = open_rows(tmp_path, folders["qwen2"], [{"messages": CHAT}, {"messages": longer}])
    items = [dataset[0], dataset[1]]

    batch = DataProto.from_single_dict(dataset.collate(items)).batch

    assert batch["input_ids"].shape == (2, 64) and batch["responses"].shape == (2, 63)
    for row, item in enumerate(items):
        length = len(item["input_ids"])
        assert batch["input_ids"][row, :length].equal(item["input_ids"])
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (64 - length)
        assert batch["position_ids"][row, :length].tolist() == list(range(length))
        assert batch["responses"][row].equal(batch["input_ids"][row, 1:])
        assert batch["responses"][row][batch["loss_mask"][row].bool()].equal(
            item["input_ids"][item["is_trained"].bool()]
        )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_prompt_with_media_has_the_same_tokens_as_a_rollout(family, tmp_path, folders):
    media = {
        "images": [save_image(tmp_path / "one.png", 56, 84), save_image(tmp_path / "two.png", 84, 56)],
        "videos": [save_video(tmp_path / "film.mp4", 56, 56, 8)],
    }
    question = "<image>What colour?<video>And <image>this?"
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "blue"}]
    config = DataConfig(max_prompt_length=512, filter_overlong_prompts_workers=1)
    rollout = open_rows(
        tmp_path, folders[family], [{"prompt": question, "answer": "", **media}], RLHFDataset, config
    )[0]

    dataset = open_rows(
        tmp_path, folders[family], [{"messages": chat, **media}], config=replace(CONFIG, max_length=512)
    )
    item = dataset[0]

    prompt = rollout["prompts"][rollout["prompt_mask"].bool()]
    assert item["input_ids"][: len(prompt)].equal(prompt)
    assert item["is_trained"].nonzero().squeeze(-1)[0] == len(prompt)
    assert learned(dataset, item) == "blue<|im_end|>"
    assert item["multi_modal_data"] == rollout["multi_modal_data"]


def test_turns_after_further_media_stay_marked(tmp_path, folders):
    chat = [
        {"role": "user", "content": "<image>What colour?"}, {"role": "assistant", "content": "blue"},
        {"role": "user", "content": "And <image>this?"}, {"role": "assistant", "content": "red"},
    ]  # fmt: skip
    images = [save_image(tmp_path / f"{number}.png", 56, 56 + 28 * number) for number in range(2)]
    dataset = open_rows(tmp_path, folders["qwen3_vl"], [{"messages": chat, "images": images}])

    assert learned(dataset, dataset[0]) == "blue<|im_end|>red<|im_end|>"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": CHAT[:1]}, "no message has the role `assistant`: there is nothing to train on"),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": "x", "weight": 0}]},
            "all messages of the assistant have `weight` 0: there is nothing to train on",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "`tool_calls` of message 0 must be JSON"),
        ({"messages": []}, "a conversation must be a list of chat messages"),
        ({"messages": [{"role": "user"}]}, "message 0 must have a `content`"),
        ({"messages": [{"from": ["gpt"], "value": "three"}]}, "message 0 must be a dictionary whose `role`"),
        (
            {"messages": None, "prompt": "a"},
            r"and its response, a text, in `response` \(`data.response_key`\)",
        ),
        ({"messages": CHAT, "images": ["a.png"]}, "has images or videos, which the model cannot read"),
    ],
)
def test_an_unusable_row_is_an_error_that_names_it(row, reason, tmp_path, folders):
    with pytest.raises(ValueError, match=rf"rows.jsonl, row 1: .*{reason}"):
        open_rows(tmp_path, folders["qwen2"], [{"messages": CHAT}, row])


def test_an_assistant_turn_with_an_image_is_an_error(tmp_path, folders):
    chat = [CHAT[0], {"role": "assistant", "content": "<image>"}]
    row = {"messages": chat, "images": [save_image(tmp_path / "one.png", 56, 56)]}

    with pytest.raises(ValueError, match="an assistant turn contains an image or a video"):
        open_rows(tmp_path, folders["qwen2_5_vl"], [row])


def test_bad_rows_are_skipped_on_request(tmp_path, folders):
    rows = [{"messages": CHAT[:1]}, {"messages": CHAT}]

    dataset = open_rows(tmp_path, folders["qwen2"], rows, config=replace(CONFIG, on_bad_row="skip"))

    assert dataset.indices == [1]


def test_a_long_conversation_is_filtered_or_an_error_but_never_truncated(tmp_path, folders):
    long = [CHAT[0], {"role": "assistant", "content": "three " * 80}]
    rows = [{"messages": CHAT}, {"messages": long}]

    filtered = open_rows(tmp_path, folders["qwen2"], rows)
    strict = open_rows(
        tmp_path, folders["qwen2"], rows, config=replace(CONFIG, filter_overlong_prompts=False)
    )

    assert (filtered.indices, filtered.num_overlong) == ([0], 1)
    assert "the conversation has" in strict[1].reason and "`data.max_length` is 64" in strict[1].reason


def test_missing_columns_are_named(tmp_path, folders):
    with pytest.raises(ValueError, match="neither a column `messages` nor `prompt` and `response`"):
        open_rows(tmp_path, folders["qwen2"], [{"text": "a"}])


def test_a_prompt_template_without_effect_on_conversations_is_an_error(tmp_path, folders):
    config = replace(CONFIG, format_prompt="examples/format_prompt/math.jinja")

    with pytest.raises(ValueError, match=r"`data.format_prompt`.*has no effect"):
        open_rows(tmp_path, folders["qwen2"], [{"messages": CHAT}], config=config)


def test_position_ids_of_several_rows_are_padded_to_the_same_length(tmp_path, folders):
    dataset = open_rows(tmp_path, folders["qwen2"], [{"messages": CHAT}])
    dataset.position_ids = lambda ids, _shape: torch.arange(len(ids)).repeat(4, 1)

    batch = dataset.collate([dataset[0]])

    assert batch["position_ids"].shape == (1, 4, 64)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOL_TEMPLATE = """{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor -%}
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def called(arguments, **message):
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": arguments}}
    answers = [{"role": "tool", "content": "3"}, {"role": "assistant", "content": "three"}]
    return [CHAT[0], {"role": "assistant", "tool_calls": [call], **message}, *answers]


def test_calls_and_schemas_of_a_row_are_shown_by_the_template(tmp_path, folders):
    (tmp_path / "tools.jinja").write_text(TOOL_TEMPLATE)
    config = replace(CONFIG, max_length=400)
    rows = [
        {"messages": called({"a": 1}, content=""), "tools": [TOOL]},
        {"messages": called('{"a": 1}'), "tools": json.dumps([TOOL])},
        {"messages": called({"a": 1}, content=None)},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(folders["qwen2"], str(tmp_path / "tools.jinja"))

    dataset = SFTDataset(str(file), tokenizer, None, config)

    first, second, third = (dataset[row] for row in range(3))
    assert first["input_ids"].equal(second["input_ids"])
    text = tokenizer.decode(first["input_ids"])
    assert text.startswith(f"<tool>{json.dumps(TOOL)}</tool><|im_start|>user")
    calls = '{"name": "add", "arguments": {"a": 1}}<|im_end|>'
    assert learned(dataset, first) == f"{calls}three<|im_end|>" == learned(dataset, third)
    assert tokenizer.decode(third["input_ids"]) == text.removeprefix(f"<tool>{json.dumps(TOOL)}</tool>")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": CHAT, "tools": [TOOL]}, "shows no tools, and the row has some"),
        ({"messages": CHAT, "tools": "add"}, "column `tools` .* must be JSON"),
        ({"messages": CHAT, "tools": {"add": TOOL}}, "must hold a list of schemas or its JSON"),
        ({"messages": called("a=1")}, "call 0 of message 1: `arguments` must be JSON"),
        ({"messages": called("[1]")}, "call 0 of message 1: `arguments` must be an object"),
    ],
)
def test_calls_and_schemas_that_cannot_be_shown_are_named(tmp_path, folders, row, reason):
    with pytest.raises(ValueError, match=reason):
        open_rows(tmp_path, folders["qwen2"], [row])


def test_a_conversation_as_json_is_one_and_other_text_is_refused(tmp_path, folders):
    as_json, plain = ({"messages": value} for value in (json.dumps(CHAT), CHAT))

    dataset = open_rows(tmp_path, folders["qwen2"], [as_json, plain])

    assert dataset[0]["input_ids"].equal(dataset[1]["input_ids"])
    with pytest.raises(ValueError, match="a conversation must be a list of chat messages, or the JSON of"):
        open_rows(tmp_path, folders["qwen2"], [{"messages": "1 + 1?"}])
