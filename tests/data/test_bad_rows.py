# SPDX-License-Identifier: Apache-2.0
"""Rows whose media crash or hang their decoder, and the file that lists every bad row."""

import json
import os

import psutil
import pytest
import torch

from tests.data.test_rl_dataset import open_media, write
from tests.helpers.endings import ENDINGS
from tests.helpers.hostile_images import know_format, save_hostile
from tests.helpers.media import save_image
from verl.data.bad_rows import BadRow, BadRowReport
from verl.models.tiny import save_tiny_model
from verl.utils.processes.fork_server import fork, shared_server


@pytest.fixture(scope="module")
def media_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl")


def hostile_rows(folder, stage, deeds):
    """Rows with a picture each; some end or hold up the process that reads them."""
    fork(know_format).kill()  # so does the process that forks those
    rows = []
    for number, deed in enumerate(deeds):
        if deed is None:
            save_image(folder / f"{number}.png", 60, 50)
        else:
            save_hostile(folder / f"{number}.png", deed, stage)
        rows.append({"problem": "<image>", "answer": "a", "images": [f"{number}.png"]})
    return write(folder, rows)


def test_a_picture_that_ends_or_holds_up_its_decoder_is_a_bad_row_and_the_next_is_read(media_model, tmp_path):
    files = hostile_rows(tmp_path, "pixels", [None, "abort", "segfault", None, "kill", "hang", None])

    dataset = open_media(media_model, files, image_dir=str(tmp_path), row_timeout_s=2.0)
    items = [dataset[index] for index in range(7)]

    bad = {item.index: item for item in items if isinstance(item, BadRow)}
    assert set(bad) == {1, 2, 4, 5}
    for index, ending in (
        (1, "was killed by SIGABRT"), (2, "was killed by SIGSEGV"),
        (4, "was killed by SIGKILL, as the kernel does when memory runs out"), (5, "did not end within 2 s"),
    ):  # fmt: skip
        told = f"rows.jsonl, row {index}: the process that read the image {tmp_path}/{index}.png {ending}"
        assert str(bad[index]).endswith(told)
    assert torch.equal(items[0]["prompts"], items[3]["prompts"])


def test_a_row_whose_process_was_killed_for_others_sake_is_read_by_the_next(media_model, tmp_path):
    files = hostile_rows(tmp_path, "pixels", ["kill_once"])

    item = open_media(media_model, files, image_dir=str(tmp_path))[0]

    assert (tmp_path / "0.png.seen").exists() and not isinstance(item, BadRow)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_picture_whose_header_ends_the_process_is_found_when_rows_are_measured(
    workers, media_model, tmp_path, monkeypatch
):
    monkeypatch.setattr("verl.data.dataset.MEDIA_ROWS_FOR_ONE_PROCESS", 1)
    files = hostile_rows(tmp_path, "header", [None, *ENDINGS, None, "hang"])
    options = dict(image_dir=str(tmp_path), row_timeout_s=2.0, filter_overlong_prompts_workers=workers)

    dataset = open_media(media_model, files, on_bad_row="skip", **options)

    assert [row.index for row in dataset.bad_rows] == [1, 2, 3, 5] and len(dataset) == 2
    with pytest.raises(
        ValueError, match=r"rows\.jsonl, rows? 1(.|\n)*the process that read(.|\n)*on_bad_row=skip"
    ):
        open_media(media_model, files, **options)


def test_media_are_read_in_another_process_that_starts_with_the_first_of_them(media_model, tmp_path):
    save_image(tmp_path / "a.png", 60, 50)
    rows = [{"problem": "1?", "answer": "1"}, {"problem": "<image>", "answer": "a", "images": ["a.png"]}]
    shared_server(os.getpid()).start()  # forks for a process that has threads
    others = children()
    dataset = open_media(media_model, write(tmp_path, rows), image_dir=str(tmp_path))

    assert not children() - others
    dataset[0]
    assert len(children() - others) == 1  # renders the chat template
    dataset[1]
    assert len(children() - others) == 2


def children():
    return set(psutil.Process().children(recursive=True))


def test_bad_rows_are_listed_in_the_report_once_whoever_opens_the_data(media_model, tmp_path):
    rows = [{"problem": "<image>" * (n % 2), "answer": n} for n in range(30)]
    files, path = write(tmp_path, rows), tmp_path / "run" / "bad_rows.jsonl"
    message = rf"rows 1, 3, 5 and 12 more: the prompt has 1 <image>.*\n  all of them: {path}\nrepair the data"

    with pytest.raises(ValueError, match=message):
        open_media(media_model, files, report=BadRowReport(path))
    for _ in range(2):
        open_media(media_model, files, report=BadRowReport(path), on_bad_row="skip")

    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(entry["file"], entry["row"]) for entry in entries] == [(files, n) for n in range(1, 30, 2)]
    assert all("1 <image> but the row has 0 images" in entry["reason"] for entry in entries)


def test_a_run_without_bad_rows_writes_no_report(media_model, tmp_path):
    report = BadRowReport(tmp_path / "run" / "bad_rows.jsonl")

    open_media(media_model, write(tmp_path, [{"problem": "1?", "answer": "1"}]), report=report)

    assert not (tmp_path / "run").exists()


def test_a_report_that_was_cut_off_is_mended_and_goes_on(tmp_path):
    path = tmp_path / "bad_rows.jsonl"
    BadRowReport(path).add([BadRow(n, f"a, b.jsonl, row {n}", "cut") for n in range(3)])
    path.write_text(path.read_text()[:-9])

    BadRowReport(path).add([BadRow(n, f"a, b.jsonl, row {n}", "again") for n in range(4)])

    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(entry["file"], entry["row"]) for entry in entries] == [("a, b.jsonl", n) for n in range(4)]
    assert [entry["reason"] for entry in entries] == ["cut", "cut", "again", "again"]


@pytest.mark.parametrize("content", ["not JSON\n", "[1]\n", "{}\n", None])
def test_a_report_that_cannot_be_used_is_a_warning_and_stays_as_it_is(content, tmp_path, caplog):
    path = tmp_path / "bad_rows.jsonl"
    path.mkdir() if content is None else path.write_text(content)

    BadRowReport(path).add([BadRow(0, "rows.jsonl, row 0", "cut")])

    assert f"bad rows could not be listed: path={path}" in caplog.text
    assert content is None or path.read_text() == content
