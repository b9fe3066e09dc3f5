# SPDX-License-Identifier: Apache-2.0
"""The data of a run is shown and judged before the run."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from PIL import Image

from tests.helpers.training import ROOT
from verl.cli.data_check import main
from verl.cli.data_report.report import answer_lines, evenly

TILE, LABEL, GAP = 192, 16, 4


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def odd(folder, tmp_path):
    """Eight rows: 1 with another marker, 2 much too long, 3 with a missing image, 5 with one cut off."""
    rows = rows_of(folder / "train.jsonl")
    rows[1]["problem"] = "<video>What colour?"
    rows[2]["problem"] += " and again?" * 20
    rows[3]["images"] = ["missing.png"]
    cut = tmp_path / "cut.png"
    cut.write_bytes((folder / "images" / rows[5]["images"][0]).read_bytes()[:120])
    rows[5]["images"] = [str(cut)]
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def words_of(text, begin):
    """The words of the only line that begins so."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(begin)]
    return line.split()


def test_a_prompt_is_shown_as_the_model_sees_it(run, folder, tmp_path, capsys):
    assert main([*run, "--rows", "1", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out

    # 56 x 56 pixels are 4 x 4 patches of 14; four of them make a token.
    row = rows_of(folder / "train.jsonl")[0]
    question = row["problem"].removeprefix("<image>")
    assert "prompt: 23 tokens (19 of text, 4 of images)" in text
    assert f"image {folder / 'images' / row['images'][0]}: 56 x 56\n" in text
    assert f"| <|vision_start|><|image_pad|><|vision_end|>{question}<|im_end|>\n" in text
    assert f"answer: {row['answer']!r}" in text
    with Image.open(tmp_path / "train_0.png") as sheet:
        assert sheet.size == (GAP + TILE + GAP, GAP + TILE + LABEL + GAP)
        expected = Image.open(folder / "images" / row["images"][0]).convert("RGB").getpixel((0, 0))
        assert sheet.getpixel((GAP, GAP)) == expected


def test_the_frames_of_a_video_are_on_one_contact_sheet(run, folder, tmp_path, capsys):
    videos = f"data.train_files={folder / 'videos.jsonl'}"
    status = main([*run, videos, "--rows", "1", "--out", str(tmp_path)])
    text = capsys.readouterr().out

    # Four frames of 56 x 56 are two pairs of 4 tokens. Frames 0, 3, 6 and 9 of 10 at four a second.
    assert "8 of videos)" in text
    assert "4 of 10 frames, 56 x 56, from 0.00 to 2.25 s" in text
    with Image.open(tmp_path / "train_0.png") as sheet:
        assert sheet.size == (GAP + 4 * (TILE + GAP), GAP + TILE + LABEL + GAP)
    assert status == 2 and "must have at least `data.rollout_batch_size` (4) usable rows, has 2" in text


def test_the_shares_of_a_mixture_are_shown_with_the_length_of_an_epoch(run, folder, tmp_path, capsys):
    sources = [
        f"data.sources.{name}.{key}"
        for name, file in (("small", "val"), ("large", "train"))
        for key in (f"train_files={folder / file}.jsonl", f"weight={1 + 3 * (name == 'large')}")
    ]

    assert main([*run, "data.train_files=", *sources, "--rows", "0", "--out", str(tmp_path)]) == 0

    output = capsys.readouterr().out
    assert "source small: 20.0% of the rows, each of its 8 once in 40\n" in output
    assert "source large: 80.0% of the rows, each of its 8 once in 10\n" in output


def test_rows_that_a_run_leaves_out_are_counted_by_file_with_their_reasons(
    run, odd, folder, tmp_path, capsys
):
    files = f'data.train_files=["{odd}", "{folder / "train.jsonl"}"]'
    status = main([*run, files, "data.on_bad_row=skip", "--rows", "0", "--decode", "--out", str(tmp_path)])
    text = capsys.readouterr().out

    assert status == 0
    assert words_of(text, f"{odd} ")[-4:] == ["8", "4", "1", "3"]  # rows, used, too long, bad
    assert words_of(text, f"{folder / 'train.jsonl'} ")[-4:] == ["8", "8", "0", "0"]
    assert "16 rows, 12 used" in text and "183 tokens" in text
    assert f"{odd}, row 1: the prompt has 0 <image> but the row has 1 images" in text
    assert f"{odd}, row 3: the image {folder / 'images' / 'missing.png'} cannot be read" in text
    assert f"{odd}, row 5: the image {tmp_path / 'cut.png'} cannot be read" in text
    assert [row["row"] for row in rows_of(tmp_path / "bad_rows.jsonl")] == [1, 3, 5]
    assert not (tmp_path / "checkpoints").exists()


def test_reasons_that_would_stop_a_run_are_reported_and_exit_2(run, odd, tmp_path, capsys):
    options = [f"data.train_files={odd}", "data.filter_overlong_prompts=false", "data.rollout_batch_size=8"]
    status = main([*run, *options, "--rows", "0", "--out", str(tmp_path)])

    assert status == 2
    verdict = capsys.readouterr().out.partition("a run with this config would stop:\n")[2]
    assert "2 rows of `data.train_files` are bad" in verdict  # the third is found when it is decoded
    assert "1 rows of `data.train_files` are longer than `data.max_prompt_length` (64)" in verdict
    assert "must have at least `data.rollout_batch_size` (8) usable rows, has 5" in verdict


def test_a_row_that_cannot_be_decoded_is_found_when_it_is_shown(run, odd, tmp_path, capsys):
    assert main([*run, f"data.train_files={odd}", "--rows", "5", "--out", str(tmp_path)]) == 2

    text = capsys.readouterr().out
    assert "3 rows of `data.train_files` are bad" in text
    assert [row["row"] for row in rows_of(tmp_path / "bad_rows.jsonl")] == [1, 3, 5]


def test_data_without_a_usable_row_exit_2_with_the_reasons(run, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"problem": "<image>What?", "answer": "red"}\n')

    assert main([*run, f"data.train_files={bad}", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{bad}, row 0: the prompt has 1 <image> but the row has 0 images" in error


def test_answers_that_no_response_can_hold_are_warned_of(run, folder, tmp_path, capsys):
    rows = rows_of(folder / "train.jsonl")
    for row, answer in zip(rows, ["red", "zigzag zigzag", "blue"], strict=False):
        row["answer"] = answer
    path = tmp_path / "long.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arguments = [*run, f"data.train_files={path}", "--rows", "0", "--out", str(tmp_path)]

    assert main([*arguments, "data.max_response_length=2"]) == 0
    text = capsys.readouterr().out
    found = re.search(r"shortest 1, half up to 1, longest (\d+); 7 of 8 answers are one token\n", text)
    assert found is not None
    longest = found[1]
    assert (
        f"warning: `data.train_files`: answers take up to {longest} tokens; `data.max_response_length` is 2:"
        " no response can hold 1 of 8 of them, such as 'zigzag zigzag'"
    ) in text
    assert re.search(r"words that the tokenizer splits into 4 tokens or more: 'zigzag' into \d\n", text)
    assert "warning: `data.val_files`" not in text

    assert main([*arguments, f"data.max_response_length={longest}"]) == 0
    assert "warning:" not in capsys.readouterr().out


def test_an_answer_with_a_lone_surrogate_is_counted_as_a_template_renders_it(run, folder, tmp_path, capsys):
    rows = rows_of(folder / "train.jsonl")
    rows[0]["answer"] = "red \ud800"
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    assert main([*run, f"data.train_files={path}", "--rows", "2"]) == 0

    text = capsys.readouterr().out
    assert r"answer: 'red \ud800'" in text and "longest " in text
    text.encode()  # a terminal can show it


def test_answers_with_parts_are_not_counted():
    rows = [{"answer": {"ground_truth": "red"}}, {"answer": None}, {"answer": ""}]
    config = SimpleNamespace(answer_key="answer", max_response_length=1)
    dataset = SimpleNamespace(rows=rows, indices=[0, 1, 2], config=config)

    assert answer_lines("data.train_files", dataset) == []  # pyright: ignore[reportArgumentType]


def test_columns_of_media_that_nothing_reads_are_noted_or_end_the_check(run, folder, tmp_path, capsys):
    rows = rows_of(folder / "train.jsonl")
    path = tmp_path / "thumbnails.jsonl"
    path.write_text("".join(f"{json.dumps(row | {'thumbnail_image': 'a'})}\n" for row in rows))
    arguments = [*run, "--rows", "0", "--out", str(tmp_path)]

    assert main([*arguments, f"data.train_files={path}"]) == 0
    assert "note: `data.train_files`: " in (text := capsys.readouterr().out)
    assert "has the column `thumbnail_image` of images, which no option reads" in text
    assert main([*arguments, "data.image_key=pictures"]) == 2
    assert "set `data.image_key=images` (it is `pictures` now)" in capsys.readouterr().err


def test_the_runs_own_list_of_bad_rows_is_not_overwritten(run, tmp_path, capsys):
    assert main([*run, "--out", str(tmp_path / "checkpoints")]) == 2
    assert "holds the run's own list of bad rows" in capsys.readouterr().err


@pytest.mark.nightly("verl/cli")
def test_the_script_runs_from_anywhere_without_ray_or_an_engine(run, tmp_path):
    code = (
        "import runpy, sys\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'scripts' / 'data_check.py')!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not {'ray', 'vllm'} & set(sys.modules)\n"
        "    raise\n"
    )
    command = [sys.executable, "-c", code, *run, "--rows", "1", "--out", "sheets"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "sheets").iterdir()} == {"train_0.png", "val_0.png"}


def test_a_wrong_config_exits_2_and_help_0(capsys):
    assert main(["data.train_file=x"]) == 2
    assert "did you mean `data.train_files`?" in capsys.readouterr().err
    for switches, status in ((["--help"], 0), (["--rows", "-1"], 2), (["--row-s"], 2)):
        with pytest.raises(SystemExit) as end:
            main(switches)
        assert end.value.code == status


def test_shown_rows_are_spread_from_the_first_to_the_last():
    assert evenly(10, 3) == [0, 4, 9]
    assert evenly(2, 5) == [0, 1]
    assert evenly(7, 1) == [0]
    assert evenly(7, 0) == evenly(0, 3) == []
