# SPDX-License-Identifier: Apache-2.0
"""The contexts of an agent's conversation become rows that train each turn that the policy sampled once."""

import base64
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.rollouts_to_sft import main
from tests.agents.test_conversation_media import pictures, png, rules_with_media
from tests.helpers.conversations import CALL, encode, rules_of, turn_of
from tests.scripts.test_conversations_to_sft import keep_finished, learned_rows
from verl.agents.agent_conversation import AgentConversation
from verl.agents.endpoint.replies import completion
from verl.agents.endpoint.requests import read_request
from verl.agents.interface import AgentResult
from verl.agents.row import Prompt
from verl.viewer.rollout_store import step_files

END = "<|im_end|>"
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"default": None}}}},
}
FURTHER = {"role": "user", "content": "And more?"}
BRIEF = {"role": "system", "content": "Be brief."}
ROW = Prompt([1] * 900, [])  # of the data set, as long as any; that of the agent replaces it


def lead(rules, max_prompt_tokens=900):
    """Begin a conversation that an agent leads."""
    return AgentConversation(replace(rules, max_prompt_tokens=max_prompt_tokens), [])


def call(conversation, messages, text, reason="stop", **fields):
    """Sample a turn after these messages; return the messages with the answer."""
    body = {"messages": messages, **fields}
    read_url = None if conversation.rules.media is None else str
    asked = read_request(body, read_url, shows_tools=True)
    opened = conversation.begin(asked)
    tokens = encode(conversation.rules, text)
    reply = conversation.complete(opened, turn_of(tokens, -1.0, reason))
    return [*messages, completion(asked, reply)["choices"][0]["message"]]


def answered(messages, *contents):
    """Append the answers of tools to the calls of the last message."""
    calls = messages[-1]["tool_calls"]
    answers = [
        {"role": "tool", "tool_call_id": one["id"], "content": content}
        for one, content in zip(calls, contents, strict=True)
    ]
    return [*messages, *answers]


def user(*pngs):
    urls = [{"url": f"data:image/png;base64,{base64.b64encode(one).decode()}"} for one in pngs]
    return {
        "role": "user",
        "content": [
            *({"type": "image_url", "image_url": url} for url in urls), {"type": "text", "text": "How many?"},
        ],
    }  # fmt: skip


def check_rows(items, done, cut=()):
    """Compare each row with the tokens of its context; the turns with the numbers `cut` are not learned."""
    trajectory = done.trajectory
    mask = [int(sampled) for sampled in trajectory.is_sampled]
    for number in cut:
        turn = trajectory.turns[number]
        mask[turn.start : turn.stop] = [0] * (turn.stop - turn.start)
    prompt = trajectory.prompt.token_ids
    tokens, mask = [*prompt, *done.token_ids], [*[0] * len(prompt), *mask]
    starts = [0, *(len(prompt) + start for start in trajectory.context_starts), len(tokens)]
    assert len(items) == len(starts) - 1
    for item, start, stop in zip(items, starts, starts[1:], strict=False):
        length = stop - start
        assert item["input_ids"][:length].tolist() == tokens[start:stop]
        assert item["is_trained"].tolist() == [*mask[start:stop], *[0] * (len(item["input_ids"]) - length)]
    assert sum(int(item["is_trained"].sum()) for item in items) == sum(mask) > 0


def test_each_context_with_its_pictures_is_a_row_that_trains_its_sampled_turns(tmp_path):
    rules = rules_with_media("qwen2_5_vl", "hermes", max_parallel_calls=2)
    first, second, third, large = map(png, pictures((40, 60), (64, 64), (56, 84), (600, 900)))
    conversation = lead(rules)
    said = call(conversation, [user(first)], f"I look.\n{CALL}\n{CALL}{END}", tools=[ADD])
    pictured = user(second)["content"]
    said = call(conversation, answered(said, pictured, "no such tool"), f"Two.{END}", tools=[ADD])
    # The program forgets, and shows other pictures; then it keeps a turn with its calls and edits the rest.
    other = call(conversation, [BRIEF, user(third, large)], f"One.{END}")
    call(conversation, [*other, user(first)], f"Three.{END}")
    call(conversation, [*answered(said[:2], "5", "none"), FURTHER], f"Five.{END}", tools=[ADD])
    done = conversation.finish(AgentResult(reward=1.0))
    assert len(done.trajectory.context_starts) == 2 and len(done.trajectory.turns) == 5

    keep_finished(tmp_path, rules, done, ROW, tools=(), keep_whole_images=True)

    check_rows(learned_rows(tmp_path, rules), done)
    rows = pq.read_table(tmp_path / "sft.parquet").to_pylist()
    assert [len(row["images"]) for row in rows] == [2, 3, 1]
    assert [row["tools"] and json.loads(row["tools"]) for row in rows] == [[ADD], [], [ADD]]
    [kept] = pq.read_table(step_files(tmp_path)[1]).to_pylist()
    assert [len(one["media"]) for one in kept["contexts"]] == [0, 2, 1] and len(kept["media"]) == 1
    seen = [[len(one["media"]) for one in turn["observations"]] for turn in kept["turns"]]
    assert seen == [[1, 0], [], [1], [], []]


def test_a_turn_that_was_cut_off_is_read_and_not_learned(tmp_path, capsys):
    rules = rules_of()
    conversation = lead(rules)
    said = call(conversation, [FURTHER], "I would", "length")
    said = call(conversation, [*said, FURTHER], f"Yes{END}")
    call(conversation, [FURTHER], f"No{END}")
    done = conversation.finish(AgentResult(reward=1.0))

    keep_finished(tmp_path, rules, done, ROW, tools=())

    check_rows(learned_rows(tmp_path, rules), done, cut=[0])
    assert "1 responses to 1 prompts in 2 rows" in capsys.readouterr().out


def test_a_context_whose_turns_were_all_cut_off_has_no_row(tmp_path):
    rules = rules_of()
    conversation = lead(rules)
    call(conversation, [FURTHER], "I would", "length")
    call(conversation, [BRIEF, FURTHER], f"No{END}")
    done = conversation.finish(AgentResult(reward=1.0))

    keep_finished(tmp_path, rules, done, ROW, tools=())

    [item] = learned_rows(tmp_path, rules)
    turn = done.trajectory.turns[1]
    assert item["input_ids"][item["is_trained"].bool()].tolist() == done.token_ids[turn.start : turn.stop]


def test_the_arguments_of_a_turn_that_is_only_read_stay_as_they_were(tmp_path):
    rules = rules_of()
    conversation = lead(rules)
    nothing = f'<tool_call>\n{{"name": "add", "arguments": {{"a": null}}}}\n</tool_call>{END}'
    said = call(conversation, [FURTHER], nothing, tools=[ADD])
    call(conversation, [BRIEF, *answered(said, "5")], f"Five{END}", tools=[ADD])
    done = conversation.finish(AgentResult(reward=1.0))

    keep_finished(tmp_path, rules, done, ROW, tools=())

    check_rows(learned_rows(tmp_path, rules), done)


@pytest.mark.parametrize("lost", ["opening", "observation"])
def test_a_context_without_one_of_its_pictures_leaves_the_conversation_out(tmp_path, capsys, lost):
    rules = rules_with_media("qwen2_5_vl", "hermes")
    conversation = lead(rules)
    said = call(conversation, [FURTHER], f"Yes{END}")
    picture = user(png(pictures((40, 60))[0]))
    call(conversation, [picture] if lost == "opening" else [*said, picture], f"No{END}")
    done = conversation.finish(AgentResult(reward=1.0))
    keep_finished(tmp_path, rules, done, ROW, tools=())
    [path] = step_files(tmp_path).values()
    table = pq.read_table(path)
    column = "contexts" if lost == "opening" else "turns"
    values = table.column(column).to_pylist()
    owner = values[0][-1] if lost == "opening" else values[0][0]["observations"][0]
    owner["media"][0]["files"] = []
    index = table.column_names.index(column)
    field = table.schema.field(column)
    pq.write_table(table.set_column(index, field, pa.array(values, field.type)), path)

    assert main([str(tmp_path), "--output", str(tmp_path / "sft.parquet")]) == 1

    assert "1 with media of observations that could not be kept" in capsys.readouterr().err
