# SPDX-License-Identifier: Apache-2.0
"""Kept conversations become rows for fine-tuning whose loss mask is that of the rollout."""

import json
from copy import copy

import pyarrow.parquet as pq
import pytest
import torch

from scripts.rollouts_to_sft import main
from tests.agents.test_conversation_media import QUESTION, pictures, png, rules_with_media
from tests.helpers.conversations import CALL, PROMPT, encode, rules_of, say, template_of
from tests.helpers.rollouts import conversation, rollout
from verl.agents.conversation import Conversation
from verl.agents.interface import Observation
from verl.agents.row import Prompt, Row
from verl.config.sft import SFTDataConfig
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.sft_dataset import SFTDataset
from verl.protocol import DataProto, objects
from verl.trainer.rollouts.rollout_log import RolloutLog
from verl.trainer.rollouts.scores import reward_values
from verl.trainer.rollouts.sequences import join_responses
from verl.viewer.rollout_store import RolloutStore
from verl.workers.rollout.interface import FinishedResponse

END = "<|im_end|>"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "number", "default": None}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
CONFIG = SFTDataConfig(max_length=4000, filter_overlong_prompts_workers=1)


def begin(rules, messages, media=None):
    """Start a conversation whose prompt shows the tools."""
    source = None if rules.media is None else rules.media.loader.processor.chat_template
    text = template_of(rules.tokenizer, source, tools=TOOLS)(messages, True, "the prompt")
    return Conversation(rules, Row(Prompt(encode(rules, text), messages, media), rules.media))


def keep(folder, rules, talk, **options):
    """Write a finished conversation as a run does; return its prompt, response and loss mask."""
    return keep_finished(folder, rules, talk.finish(), talk._row.prompt, **options)


def keep_finished(folder, rules, finished, prompt, tools=TOOLS, **options):
    media = None if rules.media is None else rules.media.loader
    ids = prompt.token_ids if media is None else media.expand(prompt.token_ids, media.measure(prompt.media))
    positions = torch.arange(len(ids))[None]
    prompts = DataProto.from_dict(
        {
            "prompts": torch.tensor([ids]),
            "prompt_mask": torch.ones(1, len(ids), dtype=torch.int64),
            "prompt_position_ids": positions if media is None else positions[:, None].expand(-1, 4, -1),
        },
        {
            "uid": ["a"], "raw_prompt_ids": objects([prompt.token_ids]), "ground_truth": ["5"],
            "prompt_text": ["the prompt"], "prompt_messages": objects([list(prompt.messages)]),
            "multi_modal_data": objects([prompt.media]),
        },
    )  # fmt: skip
    response = FinishedResponse(
        "a", 0, finished.token_ids, finished.log_probs, finished.finish_reason, finished.trajectory
    )
    length = len(finished.token_ids)
    rows = join_responses(prompts, [response], n=1, response_length=length + 3, pad_token_id=0)
    zeros = torch.zeros(1, length + 3)
    rows = rows.merge({
        "row_ids": torch.tensor([0]), "token_level_scores": zeros, "advantages": zeros,
        "reward_values": reward_values({"overall": [1.0]}),
    })  # fmt: skip
    log = RolloutLog(folder, 1, rules.tokenizer, media, skip_special_tokens=False, tools=tools, **options)
    log.keep(rows, step=1)
    return ids, finished.token_ids, rows.batch["loss_mask"][0, :length].tolist()


def learned_row(folder, rules, config=CONFIG):
    """Export the run's only row, and open it as fine-tuning does."""
    [item] = learned_rows(folder, rules, config)
    return item


def learned_rows(folder, rules, config=CONFIG):
    """Export the run's rows, and open them as fine-tuning does."""
    output = folder / "sft.parquet"
    assert main([str(folder), "--output", str(output)]) == 0
    tokenizer, processor, media = copy(rules.tokenizer), None, None
    if rules.media is not None:
        processor = rules.media.loader.processor
        media = MediaLoader(processor, MediaOptions(0, 1 << 20))
    dataset = SFTDataset(str(output), tokenizer, processor, config, media=media)
    assert not dataset.bad_rows, dataset.bad_rows
    return [dataset[number] for number in range(len(dataset))]


def check_equal(item, prompt, response, loss_mask):
    """Compare a row of fine-tuning with the rollout; only the line break after the last turn follows."""
    end = len(prompt) + len(response)
    assert item["input_ids"][:end].tolist() == prompt + response
    assert item["is_trained"][:end].tolist() == [0] * len(prompt) + loss_mask
    assert 0 < sum(loss_mask) < len(loss_mask) and item["is_trained"][end:].sum() == 0


@pytest.mark.parametrize("template", ["hermes", "qwen3_coder"])
def test_the_turns_of_the_policy_are_learned_and_the_observations_are_not(tmp_path, template):
    rules = rules_of(template, max_parallel_calls=2)
    talk = begin(rules, PROMPT)
    say(talk, f"I add.\n{CALL}\n{CALL}{END}")
    talk.observe([Observation("5"), Observation("no such\n tool", failed=True)])
    say(talk, f"Again.\n{CALL}{END}")
    talk.observe([Observation("5.0")])
    say(talk, f"It is 5.{END}")

    kept = keep(tmp_path, rules, talk)

    check_equal(learned_row(tmp_path, rules), *kept)
    [row] = pq.read_table(tmp_path / "sft.parquet").to_pylist()
    assert json.loads(row["tools"]) == TOOLS
    assert [message["role"] for message in row["messages"]].count("assistant") == 3


@pytest.mark.parametrize("is_whole", [True, False])
def test_pictures_of_observations_are_those_that_the_policy_saw(tmp_path, capsys, is_whole):
    rules = rules_with_media("qwen2_5_vl", "hermes", max_parallel_calls=2)
    first, small, large = pictures((40, 60), (64, 64), (600, 900))
    (tmp_path / "first.png").write_bytes(png(first))
    talk = begin(rules, QUESTION, {"images": [str(tmp_path / "first.png")], "videos": []})
    say(talk, f"{CALL}\n{CALL}{END}")
    talk.observe([Observation("one", images=[png(small)]), Observation("two", images=[png(large)])])
    say(talk, f"5{END}")

    kept = keep(tmp_path, rules, talk, keep_whole_images=is_whole)
    item = learned_row(tmp_path, rules)

    [row] = pq.read_table(tmp_path / "sft.parquet").to_pylist()
    assert row["images"][0] == str(tmp_path / "first.png") and len(row["images"]) == 3
    said = capsys.readouterr().out
    if is_whole:
        check_equal(item, *kept)
        assert "note" not in said
    else:
        assert sum(item["is_trained"]).item() == sum(kept[2])  # the picture alone has fewer tokens
        assert "2 images are copies of at most 448 pixels: `trainer.keep_whole_images=true`" in said


def context(messages):
    """Build the only context of the conversation of three turns."""
    counts = {"start": 0, "num_turns": 3, "num_opening": 1}
    return {"messages": json.dumps(messages), "tools": "[]", "media": [], **counts}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"stop_reason": "turns", "finish_reason": "length"}, "cut off"),
        ({"contexts": [context([{"role": "user", "content": "<image>"}])]}, "another number of <image>"),
    ],
)
def test_conversations_that_are_no_single_row_are_left_out_and_counted(tmp_path, capsys, changed, reason):
    said = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "left"}]
    talk = conversation(tmp_path) | {"contexts": [context(said)]}
    for turn in talk["turns"]:
        for seen in turn["observations"]:
            seen.update(media=[], num_media=0)
    rows = [rollout(1, 0, 0, **talk, messages=json.dumps(said[:1])), rollout(1, 1, 0, **talk | changed)]
    RolloutStore(tmp_path).write(1, [row | {"messages": json.dumps(said[:1])} for row in rows])

    assert main([str(tmp_path), "--output", str(tmp_path / "sft.parquet")]) == 0

    assert f"left out: 1 {reason}" in capsys.readouterr().out.replace("with ", "")
    assert pq.read_table(tmp_path / "sft.parquet").num_rows == 1
