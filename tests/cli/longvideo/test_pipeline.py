# SPDX-License-Identifier: Apache-2.0
"""`verl-longvideo-reason` with real videos and a chat server: rows, interruptions, bad replies, errors."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
from verl_longvideo.command import main

from tests.cli.longvideo.narrator import PROSE, QUESTION, Narrator, images_of, text_of
from tests.helpers.chat_server import Reply
from tests.helpers.training import ROOT

FILES = ("train.parquet", "val.parquet", "sft_train.parquet", "sft_val.parquet")
CATEGORIES = ["temporal", "goal and purpose", "spatial", "plot and narrative"]


def read(out, name):
    return pq.read_table(out / name).to_pylist()


def written(out):
    return {name: (out / name).read_bytes() for name in (*FILES, "malformed.jsonl", "parsed.jsonl")}


def times_of_clips(out):
    return {path: path.stat().st_mtime_ns for path in (out / "clips").rglob("0*.mp4")}


def test_each_clip_is_captioned_and_each_category_asked_for_once(whole):
    out, server = whole

    assert sorted(server.kinds) == ["caption"] * 9 + ["reason"] * 12 + ["reformat"] * 12
    captions = [body for body in server.requests if "frames of a clip" in text_of(body)]
    assert {body["model"] for body in captions} == {"vlm"} and {
        len(images_of(body)) for body in captions
    } == {3}
    assert (out / "timelines" / "more" / "c.mkv.txt").read_text() == (
        "[0:00:00 - 0:00:02] A pattern moves. It is 0:00:00.\n"
        "[0:00:02 - 0:00:04] A pattern moves. It is 0:00:02.\n"
        "[0:00:04 - 0:00:05] A pattern moves. It is 0:00:04.\n"
    )
    reasons = [text_of(body) for body in server.requests if "exam questions" in text_of(body)]
    assert all("[0:00:02 - 0:00:04] A pattern moves." in text for text in reasons)


def test_the_rows_have_question_answer_and_reasoning_and_no_video_is_in_two_files(whole):
    out, _ = whole
    rows = {name: read(out, name) for name in FILES}
    videos = {name: {row["videos"][0] for row in each} for name, each in rows.items()}

    assert {name: len(each) for name, each in rows.items()} == dict.fromkeys(FILES, 4)
    assert videos["val.parquet"] == videos["sft_val.parquet"]
    assert len(set.union(*videos.values())) == 3
    row = rows["train.parquet"][0]
    assert [each["subject"] for each in rows["train.parquet"]] == CATEGORIES
    assert row["problem"].startswith("<video>What happens temporal?\nA. It moves left.\nB. It moves right.\n")
    assert (row["answer"], row["choices"][1]) == ("B", "It moves right.")
    assert row["response"] == f"<think>{PROSE}</think><answer>B</answer>"
    asked, answered = rows["sft_train.parquet"][0]["messages"]
    assert asked["role"] == "user" and asked["content"].startswith("<video>What happens temporal?")
    assert answered == {"role": "assistant", "content": row["response"]}
    report = json.loads((out / "report.json").read_text())
    assert report["by_category"] == dict.fromkeys(CATEGORIES, 3) and report["by_answer"] == {"B": 12}


def test_a_second_command_asks_nothing_and_writes_the_same(command, whole, tmp_path):
    out, _ = whole
    before = written(out)
    clips = times_of_clips(out)

    with Narrator() as server:
        assert main(command(out, server)) == 0

    assert server.requests == [] and written(out) == before
    assert times_of_clips(out) == clips and len(clips) == 9


@pytest.mark.nightly("examples/verl_longvideo")
def test_a_killed_command_continues_and_ends_as_an_uninterrupted_one(command, whole, tmp_path):
    out, _ = whole
    answered = 0
    for limit, ending in (
        (4, signal.SIGKILL),
        (12, signal.SIGINT),
    ):  # requests: among captions, and questions
        with Narrator() as server:
            arguments = command(tmp_path, server, "--concurrency", "1")
            process = subprocess.Popen([sys.executable, "-m", "verl_longvideo.command", *arguments], cwd=ROOT)
            while len(server.requests) < limit:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(ending)
            assert process.wait() == (130 if ending == signal.SIGINT else -ending)
        answered += len(server.requests)
    with Narrator() as server:
        assert main(command(tmp_path, server)) == 0

    assert written(tmp_path) == written(out)
    assert 33 <= answered + len(server.requests) <= 35  # only those in flight at a kill are asked again


def test_the_clips_of_an_interrupted_cut_are_those_of_a_whole_one(command, whole, tmp_path):
    out, _ = whole
    shutil.copytree(out / "clips", tmp_path / "clips")
    for video in ("a.mp4", "more/c.mkv"):
        folder = tmp_path / "clips" / video
        index = json.loads((folder / "index.json").read_text())
        (folder / "index.json").write_text(json.dumps({"digest": index["digest"], "is_whole": False}))
        (folder / "00002.mp4").unlink()
    kept = tmp_path / "clips" / "a.mp4" / "00000.mp4"
    age = kept.stat().st_mtime_ns

    assert main(command(tmp_path, "http://localhost:9/v1", "--until", "split")) == 0

    assert kept.stat().st_mtime_ns == age
    for path in times_of_clips(out):
        assert (tmp_path / path.relative_to(out)).read_bytes() == path.read_bytes()


def test_what_failed_is_named_and_only_that_is_asked_again(command, whole, videos, tmp_path, capsys):
    out, _ = whole
    broken = {"clip from 0:00:02 to 0:00:04 of a longer": Reply("too busy", status=503)}
    with Narrator(broken) as server:
        assert main(command(tmp_path, server, "--concurrency", "1")) == 1
        told = capsys.readouterr()
        assert "6 of 9 answers; 6 new" in told.out and "0 of 3 videos have all their captions" in told.out
        assert "3 parts are unfinished" in told.err and "caption: a.mp4, 0:00:02 - 0:00:04: " in told.err
        server.fail, server.requests[:] = {}, []
        assert main(command(tmp_path, server)) == 0

    assert [text_of(body).count("0:00:02 to") for body in server.requests].count(1) == 3
    assert len(server.requests) == 3 + 24
    assert written(tmp_path) == written(out)


def test_malformed_replies_are_counted_by_name_and_asked_again_only_on_request(
    command, whole, tmp_path, capsys
):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "questions")
    bad = {
        'category "spatial"': Reply(QUESTION.replace("ANSWER: B", "ANSWER: E")),
        'category "temporal"': Reply(QUESTION.replace("What happens", "What do the captions show")),
    }
    with Narrator(bad) as server:
        assert main(command(tmp_path, server)) == 0
        told = capsys.readouterr()
        rows = [json.loads(line) for line in (tmp_path / "malformed.jsonl").read_text().splitlines()]
        assert "6 of 12 replies can be used" in told.out and "6 replies are malformed" in told.err
        assert sum(len(read(tmp_path, name)) for name in FILES[:3]) == 6
        reasons = {row["name"]: row["reason"] for row in rows}
        assert reasons["a.mp4, spatial 1"] == "the answer must be one of ['A', 'B', 'C', 'D'], found 'E'"
        assert "it speaks of the captions" in reasons["more/c.mkv, temporal 1"] and len(rows) == 6

        server.fail, server.requests[:] = {}, []
        assert main(command(tmp_path, server)) == 0 and server.requests == []
        assert main(command(tmp_path, server, "--retry-malformed")) == 0

    assert server.kinds[-6:] == ["reason"] * 6  # their rewritten reasons were there
    assert written(tmp_path) == written(whole[0])


def test_only_what_a_changed_prompt_or_model_concerns_is_asked_again(command, whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "out")
    prompts = tmp_path / "prompts"
    assert main(["--write-prompts", str(prompts)]) == 0
    (prompts / "categories.yaml").write_text(
        "temporal: The order of things.\ncounting: How many there are.\n"
    )
    with Narrator() as server:
        assert main(command(tmp_path / "out", server, "--prompts", str(prompts), "--no-rewrite")) == 0

    assert server.kinds == ["reason"] * 6  # the description of temporal changed, counting is new
    rows = read(tmp_path / "out", "train.parquet")
    assert [row["subject"] for row in rows] == ["temporal", "counting"]
    assert rows[0]["response"].startswith(
        "<think>The pattern moves to the right at the start.\nIt still does"
    )


def test_clips_are_sent_as_video_on_request(command, tmp_path):
    with Narrator() as server:
        assert main(command(tmp_path, server, "--send", "video", "--until", "caption")) == 0

    parts = server.requests[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["text", "video_url"]
    assert parts[1]["video_url"]["url"].startswith("data:video/mp4;base64,")


def test_an_unreachable_model_ends_the_command_at_once(command, tmp_path, capsys):
    assert main(command(tmp_path, "http://127.0.0.1:9/v1", "--concurrency", "1")) == 1

    told = capsys.readouterr().err
    assert "caption: 8 requests were not sent" in told and "cannot be reached" in told


def test_a_video_that_cannot_be_read_is_named_and_the_others_are_used(command, videos, tmp_path, capsys):
    folder = shutil.copytree(videos, tmp_path / "videos")
    (folder / "bad.mp4").write_bytes(b"no video")
    with Narrator() as server:
        assert main(command(tmp_path / "out", server, videos=folder)) == 1

    told = capsys.readouterr()
    assert "3 of 4 videos, 9 clips; 4 new" in told.out
    assert "split: bad.mp4: " in told.err and "cannot be cut" in told.err
    assert sum(len(read(tmp_path / "out", name)) for name in FILES[:3]) == 12


def test_a_dry_run_counts_the_requests_and_writes_nothing(command, videos, tmp_path, capsys):
    out = tmp_path / "out"

    assert main(command(out, "http://localhost:9/v1", "--dry-run")) == 0

    told = capsys.readouterr().out
    assert "videos    3, 0:00:15 in all" in told and "about 9 requests to vlm" in told
    assert "at most 12 requests to thinker" in told and not out.exists()


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        (["--caption-url", "localhost"], "`base_url` must be like http://host:8000/v1"),
        (["--reason-key-env", "NOT_SET_AT_ALL"], r"NOT_SET_AT_ALL) must name an environment variable"),
        (["--val-videos", "3"], "`--val-videos` (3) must be less than the number of videos (3)"),
        (["--clip-seconds", "0"], "`--clip-seconds` must be at least 1, got 0"),
        (["--prompts", "/nowhere"], "`--prompts` (/nowhere) must be a folder"),
        (["--videos", "/nowhere"], "`--videos` (/nowhere) must be a folder of videos"),
    ],
)
def test_wrong_switches_are_told_before_anything_is_written(command, tmp_path, capsys, switches, said):
    assert main(command(tmp_path / "out", "http://localhost:9/v1", *switches)) == 2

    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_missing_switches_and_wrong_templates_are_named(command, videos, tmp_path, capsys):
    assert main(["--videos", str(videos)]) == 2
    assert "`--out`, `--caption-url`, `--caption-model`, `--reason-url`, `--reason-model` must be given" in (
        capsys.readouterr().err
    )

    (tmp_path / "caption.jinja").write_text("{{ begin }}")
    assert main(command(tmp_path / "out", "http://localhost:9/v1", "--prompts", str(tmp_path))) == 2
    assert "caption.jinja cannot be rendered: 'begin' is undefined" in capsys.readouterr().err
