# SPDX-License-Identifier: Apache-2.0
"""Rollouts of a run become rows for supervised fine-tuning."""

import json
import re

import pyarrow.parquet as pq
import pytest

from scripts.rollouts_to_sft import Selection, main, select_rollouts
from tests.helpers.rollouts import rollout
from verl.viewer.rollout_store import FOLDER, MEDIA, RolloutStore

PROMPT = [{"role": "user", "content": "Where is the square?"}]


def row(step, sample, response, score, **changed):
    """A kept response; its last token ends the turn."""
    return rollout(step, 0, sample) | {
        "messages": json.dumps(PROMPT), "response": response, "score": score,
        "reward_values": {"overall": score, "accuracy": 1 - score},
        "token_ids": [1, 2], "tokens": [response, "<|im_end|>"], "rollout_log_probs": [0.0, 0.0],
        "old_log_probs": [0.0, 0.0], "advantages": [0.0, 0.0],
    } | changed  # fmt: skip


def write(tmp_path, *rows):
    store = RolloutStore(tmp_path)
    for step in {one["step"] for one in rows}:
        store.write(step, [one for one in rows if one["step"] == step])


def answers(tmp_path, **selection):
    chosen, left_out = select_rollouts(tmp_path, Selection(**selection))
    return [(one.step, one.rows[0]["messages"][-1]["content"]) for one in chosen], dict(left_out)


def test_finished_responses_that_reach_the_score_are_kept_and_the_others_counted(tmp_path):
    write(
        tmp_path,
        row(1, 0, "left", 1.0),
        row(1, 1, "right", 0.5),
        row(1, 2, "far left", 1.0, finish_reason="length"),
        row(1, 3, "", 0.0) | {"score": None},
        row(1, 4, "it is left", 0.9),  # which the store holds as the float32 0.89999998
    )

    assert answers(tmp_path, min_score=0.9) == (
        [(1, "left"), (1, "it is left")],
        {"below 0.9": 1, "cut off at the response length limit": 1, "without a score": 1},
    )


def test_pictures_are_no_responses_to_learn_from(tmp_path):
    picture = {"kind": "image", "source": "16 x 16 pixels", "files": ["a.png"]}
    write(tmp_path, row(1, 0, "picture of 16 x 16 pixels", 1.0, picture=picture))

    with pytest.raises(ValueError, match="1 of pictures or videos, which are no texts"):
        select_rollouts(tmp_path, Selection())


def test_a_repeated_response_is_kept_once_with_its_best_score(tmp_path):
    write(tmp_path, row(1, 0, "left", 0.6), row(2, 0, "left", 0.8), row(2, 1, "it is left", 0.7))

    found, left_out = answers(tmp_path)

    assert found == [(2, "left"), (2, "it is left")]
    assert left_out == {"the same response to the same prompt": 1}


def test_the_best_responses_of_a_prompt_are_kept_the_newest_of_equals_first(tmp_path):
    write(tmp_path, row(1, 0, "a", 1.0), row(2, 0, "b", 1.0), row(3, 0, "c", 0.9))

    assert answers(tmp_path, max_per_prompt=1) == ([(2, "b")], {"beyond `--max_per_prompt`": 2})


def test_prompts_differ_by_messages_and_media(tmp_path):
    image = {"kind": "image", "source": "/data/1.png", "files": [], "problem": None}
    other = json.dumps([{"role": "user", "content": "Else?"}])
    shown = json.dumps([{"role": "user", "content": [{"type": "image"}]}])
    write(
        tmp_path,
        row(1, 0, "a", 1.0),
        row(1, 1, "b", 1.0, messages=other),
        row(1, 2, "c", 1.0, messages=shown, media=[image]),
        row(1, 3, "d", 1.0, messages=shown, media=[image | {"source": "/data/2.png"}]),
    )

    assert len(answers(tmp_path, max_per_prompt=1)[0]) == 4


def test_responses_are_selected_by_step_and_by_a_reward_value(tmp_path):
    write(tmp_path, row(1, 0, "a", 0.0), row(2, 0, "b", 1.0), row(3, 0, "c", 0.0))

    assert answers(tmp_path, key="accuracy", min_score=0.5, steps=range(2, 4)) == (
        [(3, "c")], {"below 0.5": 1},
    )  # fmt: skip


def test_a_response_that_lacks_the_value_is_left_out(tmp_path):
    lacking = row(1, 1, "b", 1.0) | {"reward_values": {"overall": 1.0, "accuracy": float("nan")}}
    write(tmp_path, row(1, 0, "a", 1.0), lacking)

    assert answers(tmp_path, key="accuracy") == ([(1, "a")], {"without accuracy": 1})


def test_a_visible_end_token_is_removed_from_the_response(tmp_path):
    write(tmp_path, row(1, 0, "left<|im_end|>", 1.0))

    assert answers(tmp_path)[0] == [(1, "left")]


def test_media_are_the_runs_files_or_copies_of_embedded_images(tmp_path):
    parts = [{"type": "image"}, {"type": "text", "text": "And "}, {"type": "image"}]
    media = [
        {"kind": "image", "source": "/data/1.png", "files": ["a.jpg"], "problem": None},
        {"kind": "image", "source": "of 99 bytes", "files": ["b.jpg"], "problem": None},
    ]
    film = [{"kind": "video", "source": "of 99 bytes", "files": ["c.jpg"], "problem": None}]
    messages = json.dumps([{"role": "user", "content": parts}])
    write(
        tmp_path,
        row(1, 0, "left", 1.0, messages=messages, media=media),
        row(1, 1, "left", 1.0, media=film),
    )

    chosen, left_out = select_rollouts(tmp_path, Selection())

    rows = [row for one in chosen for row in one.rows]
    assert rows[0]["messages"][0] == {"role": "user", "content": "<image>And <image>"}
    assert rows[0]["images"] == ["/data/1.png", str(tmp_path / FOLDER / MEDIA / "b.jpg")]
    assert list(left_out) == ["with a video that was given as bytes: only single frames were kept"]


def test_the_command_writes_rows_and_reports_their_number(tmp_path, capsys):
    write(tmp_path, row(1, 0, "left", 1.0), row(2, 1, "right", 0.0))
    output = tmp_path / "data" / "sft.parquet"

    assert main([str(tmp_path), "--output", str(output), "--min_score", "0.9", "--steps", "1-2"]) == 0

    table = pq.read_table(output)
    assert table.column_names == ["messages", "score", "step"]
    assert table.to_pylist() == [
        {"messages": [*PROMPT, {"role": "assistant", "content": "left"}], "score": 1.0, "step": 1}
    ]
    said = capsys.readouterr().out
    assert "left out: 1 below 0.9\n" in said and "1 responses to 1 prompts" in said
    assert [path.name for path in output.parent.iterdir()] == ["sft.parquet"]


@pytest.mark.parametrize(
    ("switches", "reason"),
    [
        (["--min_score", "2"], "no rollout of .* can be used: 1 below 2"),
        (["--steps", "7"], "its rollouts are of steps 1 to 1"),
        (["--key", "length"], r"`--key length`: the reward function returned \['accuracy', 'overall'\]"),
        (["--output", "a.csv"], r"`--output` must end in .parquet, got a.csv"),
    ],
)
def test_an_error_is_reported_and_nothing_is_written(switches, reason, tmp_path, capsys):
    write(tmp_path, row(1, 0, "left", 1.0))
    output = tmp_path / "sft.parquet"

    assert main([str(tmp_path), "--output", str(output), *switches]) == 1

    assert re.search(reason, capsys.readouterr().err)
    assert not output.exists()
