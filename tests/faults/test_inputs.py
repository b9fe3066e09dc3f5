# SPDX-License-Identifier: Apache-2.0
"""Files that are damaged: media during the run, and data before it starts."""

import json
import sys

import pyarrow.json
import pyarrow.parquet
import pytest

from tests.faults.conftest import COMMON
from tests.faults.runs import Run, assert_same, metrics_of, steps_again
from tests.helpers.training import QUICKSTART, quickstart_arguments
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))
from moving import NUM_SAMPLED, write_video_questions
from shapes import write_questions

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def media_folder(tmp_path_factory):
    """Eight questions on images and eight on videos; a batch has both."""
    folder = tmp_path_factory.mktemp("media")
    save_tiny_model(folder / "model", "qwen2_5_vl")
    (folder / "images").mkdir()
    (folder / "videos").symlink_to("images")
    images = write_questions(folder, "train", 8, seed=1, with_images=True).read_text().splitlines()
    videos = write_video_questions(folder, "films", 8, seed=1).read_text().splitlines()
    rows = [json.loads(line) for pair in zip(images, videos, strict=True) for line in pair]
    rows = [{"images": [], "videos": []} | row for row in rows]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_questions(folder, "val", 4, seed=2, with_images=True)
    return folder


@pytest.fixture(scope="module")
def media_arguments(media_folder):
    options = [f"worker.rollout.num_video_frames={NUM_SAMPLED}", "data.max_prompt_length=64"]
    return quickstart_arguments(media_folder, media_folder / "model", *COMMON, *options)


@pytest.fixture(scope="module")
def undisturbed_media(media_folder, media_arguments):
    return metrics_of(media_folder / "undisturbed", media_arguments)


def cut_off(files):
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("kind, pattern", [("an image", "train_*.png"), ("a video", "films_*.mp4")])
def test_damaged_media_end_the_run_which_resumes_once_they_are_fixed(
    kind, pattern, tmp_path, media_folder, media_arguments, undisturbed_media, record
):
    files = {file: file.read_bytes() for file in (media_folder / "images").glob(pattern)}
    run = Run(tmp_path, media_arguments)
    run.come_to(step=3, saved=2)

    try:
        run.harm(lambda: cut_off(files))
        assert run.end() == 1
    finally:
        for file, content in files.items():
            file.write_bytes(content)

    assert "the run failed in step" in run.stderr
    assert any(f"{file.name}" in run.stderr for file in files)
    assert "data.on_bad_row=skip" in run.stderr
    assert "the same command resumes from the last checkpoint" in run.stderr
    next_run = Run(tmp_path, media_arguments)
    assert next_run.end() == 0, next_run.stderr
    assert_same([*run.steps, *next_run.steps], undisturbed_media)
    record(
        f"{kind} is damaged during the run",
        again=steps_again(run, next_run),
        noticed_s=run.noticed_s("the run failed"), went_on_s=next_run.went_on_s(),
    )  # fmt: skip


def test_a_damaged_parquet_file_is_named_before_anything_starts(tmp_path, text_arguments, record):
    rows = next(argument for argument in text_arguments if argument.startswith("data.train_files="))
    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.json.read_json(rows.partition("=")[2]), file)
    cut_off([file])
    run = Run(tmp_path / "run", [*text_arguments, f"data.train_files={file}"])

    assert run.end() == 2
    assert str(file) in run.stderr
    assert "Traceback" not in run.stderr
    record("a parquet file is damaged", noticed_s=run.noticed_s(str(file)))
