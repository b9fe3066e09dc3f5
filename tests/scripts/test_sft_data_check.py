# SPDX-License-Identifier: Apache-2.0
"""The conversations of a fine-tuning run are shown and judged before the run."""

import json
import subprocess
import sys

import pytest

from tests.helpers.training import ROOT
from verl.cli.data_check import main

ANSWER = 2  # tokens that are learned of a turn of one word: the word, and the end of the turn


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def conversation(row, *more):
    told = [{"role": "user", "content": row["problem"]}, {"role": "assistant", "content": row["answer"]}]
    return {"messages": [*told, *more], "images": row["images"]}


@pytest.fixture
def rows(folder):
    """Eight conversations, each a question about an image of 4 tokens and its answer of one word."""
    lines = (folder / "train.jsonl").read_text().splitlines()
    return [conversation(json.loads(line)) for line in lines]


@pytest.fixture
def check(folder, rows, tmp_path, capsys):
    """Runs the command on files of rows; returns the exit status and what it wrote."""

    def run(rows, *options):
        file = write(tmp_path / "rows.jsonl", rows)
        status = main(
            [
                "--sft", f"data.train_files={file}", "trainer.val_before_train=false", "--out", str(tmp_path),
                f"data.image_dir={folder / 'images'}", f"worker.actor.model.model_path={folder / 'vl'}",
                f"trainer.save_checkpoint_path={tmp_path / 'checkpoints'}", "data.max_length=64",
                "data.min_pixels=784", "data.max_pixels=50176", "data.num_workers=0",
                "worker.actor.global_batch_size=8", "trainer.n_gpus_per_node=2", *options,
            ]
        )  # fmt: skip
        told = capsys.readouterr()
        return status, told.out + told.err

    return run


def test_a_conversation_is_shown_with_its_learned_lines_marked(check, rows, folder, tmp_path):
    again = ({"role": "user", "content": "Really?"}, {"role": "assistant", "content": "red"})
    rows[0]["messages"] += again

    status, text = check(rows, "--rows", "1")

    question = rows[0]["messages"][0]["content"].removeprefix("<image>")
    answer = rows[0]["messages"][1]["content"]
    assert status == 0
    assert f"4 of images), {2 * ANSWER} of them learned\n" in text
    assert f"image {folder / 'images' / rows[0]['images'][0]}: 56 x 56\n" in text
    shown = [line.strip() for line in text.splitlines() if line.strip()[:2] in ("| ", "+ ")]
    assert shown == [
        "| <|im_start|>user",
        f"| <|vision_start|><|image_pad|><|vision_end|>{question}<|im_end|>",
        "| <|im_start|>assistant",
        f"+ {answer}<|im_end|>",
        "| <|im_start|>user",
        "| Really?<|im_end|>",
        "| <|im_start|>assistant",
        "+ red<|im_end|>",
    ]
    assert (tmp_path / "train_0.png").exists() and not (tmp_path / "checkpoints").exists()


def test_tokens_are_counted_over_the_rows_that_are_used(check, rows):
    rows[1]["messages"].pop()  # nothing to train on
    rows[2]["messages"][0]["content"] += " and again?" * 30
    rows[3]["images"] = ["missing.png"]

    status, text = check(rows, "data.on_bad_row=skip", "worker.actor.global_batch_size=4", "--rows", "0")

    (sums,) = [line for line in text.splitlines() if "tokens of the rows that are used" in line]
    num_all, num_learned = [int(word.rstrip(",")) for word in sums.split() if word.rstrip(",").isdigit()]
    assert status == 0
    assert "8 rows, 5 used" in text
    assert num_learned == 5 * ANSWER and f"({num_learned / num_all:.1%})" in sums
    assert "longer than `data.max_length`: 1 rows" in text
    assert "row 1: no message has the role `assistant`: there is nothing to train on" in text
    assert "row 3: the image" in text and "missing.png cannot be read" in text


def test_reasons_that_would_stop_a_fine_tuning_run_are_reported_and_exit_2(check, rows):
    rows[1]["messages"].pop()
    rows[2]["messages"][0]["content"] += " and again?" * 30

    status, text = check(rows, "data.filter_overlong_prompts=false", "--rows", "0")

    verdict = text.partition("a run with this config would stop:\n")[2]
    assert status == 2
    assert "1 rows of `data.train_files` are bad: repair them" in verdict
    assert "1 rows of `data.train_files` are longer than `data.max_length` (64)" in verdict
    assert "must have at least `worker.actor.global_batch_size` (8) usable rows, has 6" in verdict


def test_a_template_that_leaves_nothing_to_learn_is_reported_with_its_first_row(check, rows, tmp_path):
    template = tmp_path / "open.jinja"  # a turn that no special token closes
    template.write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [{"messages": [message | {"content": "red"} for message in row["messages"]]} for row in rows]

    status, text = check(rows, f"data.override_chat_template={template}")

    assert status == 2
    assert "has 8 rows and none can be used" in text
    assert "row 0: the chat template ends message 1, of the assistant, with" in text


def test_options_of_the_other_kind_of_run_are_answered_with_the_switch(check, run, rows, capsys):
    assert main(["data.train_files=owner/rows", "worker.actor.model.model_path=owner/model",
                 "data.val_files=owner/rows", "data.max_length=9"]) == 2  # fmt: skip
    assert "these are options of supervised fine-tuning: add `--sft`" in capsys.readouterr().err
    assert main(["--sft", *run]) == 2
    assert "these are options of reinforcement learning: leave out `--sft`" in capsys.readouterr().err
    assert "leave out" not in check(rows, "data.max_lengths=9")[1]  # wrong for both


@pytest.mark.parametrize("command", ["data_check.py", "data_check.py --sft", "reward_check.py"])
def test_a_wrong_option_is_reported_before_torch_is_imported(command, tmp_path):
    script, *switches = command.split()
    code = (
        "import runpy, sys\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'scripts' / script)!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "    raise\n"
    )

    arguments = [sys.executable, "-c", code, *switches, "data.train_file=x"]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path)

    assert done.returncode == 2, done.stderr
    assert "did you mean `data.train_files`?" in done.stderr
