# SPDX-License-Identifier: Apache-2.0
"""What a diffusion run makes is served, shown next to its scores, and played."""

import json
import re

import numpy as np
import pytest
from playwright.sync_api import expect

from tests.helpers.rollouts import rollout
from tests.helpers.viewer import request, viewer
from verl.trainer.kinds.pictures import PictureLog, described
from verl.viewer.rollout_store import VALIDATION, RolloutStore

SIDE, NUM_FRAMES = 48, 16


def ball(angle, *, frames=None):
    """A red ball after `angle` turns around the middle, (3, H, W); with `frames` on its way, (F, 3, H, W)."""
    if frames is not None:
        return np.stack([ball(angle + number / 40) for number in range(frames)])
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    turn = 2 * np.pi * angle
    near = np.exp(-20 * ((x - 0.5 - 0.3 * np.cos(turn)) ** 2 + (y - 0.5 - 0.3 * np.sin(turn)) ** 2))
    return np.stack([255 * near, 255 * x * (1 - near), 200 * y]).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two steps with a prompt for pictures and one for videos, and their validations."""
    folder = tmp_path_factory.mktemp("project") / "balls"
    store = RolloutStore(folder)
    log = PictureLog(folder, 1)
    for step in (1, 2):
        rows = []
        for group, frames in enumerate((None, NUM_FRAMES)):
            text = "a red ball that turns" if frames else "a red ball"
            for sample, score in enumerate([0.2, 0.9, 0.5]):
                pixels = ball(step / 8 + score, frames=frames)
                steps = np.arange(8)
                columns = {
                    "prompt": text, "messages": json.dumps([{"role": "user", "content": text}]),
                    "response": described(pixels), "response_length": 8, "score": score,
                    "advantage": score - 0.5, "reward_values": {"overall": score, "accuracy": 1.0},
                    "tokens": [f"step {number} " for number in steps], "token_ids": steps,
                    "is_trained": steps < 7, "rollout_log_probs": -steps / 8, "old_log_probs": -steps / 8,
                    "advantages": np.full(8, score - 0.5), "ground_truth": "red",
                }  # fmt: skip
                rows.append(rollout(step, group, sample, **columns, **log.keep_picture(pixels)))
        store.write(step, rows)
        own = {"group": f"val{step}-0-0", "advantages": None, "old_log_probs": None, "advantage": None}
        store.write(step, [rows[0] | own], VALIDATION)
    return folder


@pytest.fixture(scope="module")
def address(folder):
    with viewer(folder) as found:
        yield found


def group_of(address, number, step=1):
    return request(address, f"/api/runs/0/groups/train/{step}/step{step}-0-{number}").json


def test_a_picture_is_sent_as_png_and_a_video_as_mp4_in_ranges(address, folder):
    picture = group_of(address, 0)[0]["picture"]
    video = group_of(address, 1)[0]["picture"]

    sent = request(address, f"/media/0/{picture['files'][0]}")
    assert (sent.status, sent.headers["content-type"]) == (200, "image/png")
    assert (picture["source"], picture["whole"]) == ("48 x 48 pixels", None)
    part = request(address, f"/media/0/{video['whole']}", Range="bytes=4-11")
    assert (part.status, part.headers["content-type"]) == (206, "video/mp4")
    assert part.body == (folder / "rollouts/media" / video["whole"]).read_bytes()[4:12]
    assert len(video["files"]) == 8 and video["source"] == "16 frames of 48 x 48 pixels"


def test_other_endings_in_the_media_folder_are_not_sent(address, folder):
    for ending in (".html", ".image", ".svg", ".png.html"):
        (folder / "rollouts/media" / ("0" * 40 + ending)).write_text("<script>")
        assert request(address, f"/media/0/{'0' * 40}{ending}").status == 404


def test_rows_of_the_table_name_the_file_of_a_thumbnail(address):
    rows = request(address, "/api/rollouts?run=0&kind=train&step_max=1").json["rows"]

    made = group_of(address, 0) + group_of(address, 1)
    assert [row["picture_start"] for row in rows] == [row["picture"]["files"][0] for row in made]
    assert [row["response_start"] for row in rows[::3]] == [
        "picture of 48 x 48 pixels", "video of 16 frames of 48 x 48 pixels",
    ]  # fmt: skip


def test_an_export_names_the_files(address):
    lines = request(address, "/api/export?format=jsonl&run=0&kind=validation").body.decode().splitlines()

    rows = [json.loads(line) for line in lines]
    assert [row["picture"]["files"] for row in rows] == [
        group_of(address, 0, step)[0]["picture"]["files"] for step in (1, 2)
    ]


def open_group(page, address, number, query=""):
    page.goto(f"{address}#group/balls/train/2/step2-0-{number}{query}")
    expect(page.locator("article")).to_have_count(3)


@pytest.mark.browser
def test_pictures_stand_side_by_side_with_their_scores(page, address):
    open_group(page, address, 0)

    images = page.locator("article .made img")
    expect(images).to_have_count(3)
    shown = [
        images.nth(number).evaluate("image => image.decode().then(() => image.naturalWidth)")
        for number in range(3)
    ]
    assert shown == [SIDE] * 3
    boxes = [image.bounding_box() for image in images.all()]
    assert len({box["y"] for box in boxes}) == 1 and min(box["width"] for box in boxes) > 200
    expect(page.locator("article .score")).to_have_text(["0.200", "0.900", "0.500"])
    expect(page.locator("article .facts").nth(1)).to_have_text(
        "advantage 0.400 · 8 steps · stop · accuracy 1"
    )
    expect(page.locator("article").first).not_to_contain_text("picture of")  # its caption says the size
    images.first.click()
    expect(page.locator("dialog.lightbox img")).to_be_visible()


@pytest.mark.browser
def test_the_steps_of_sampling_are_colored_like_tokens(page, address):
    open_group(page, address, 0, "?look=tokens")

    expect(page.locator("article .tokens").first).to_contain_text("step 0 step 1")
    expect(page.locator("article .untrained").first).to_have_text("not trained: 1 step")
    expect(page.locator("article .made img")).to_have_count(3)


@pytest.mark.browser
def test_a_video_plays_and_its_frames_are_below(page, address):
    open_group(page, address, 1)

    video = page.locator("article video").first
    expect(page.locator("article").first.locator(".frames img")).to_have_count(8)
    assert re.fullmatch(r"/media/0/[0-9a-f]{40}\.mp4", video.get_attribute("src"))
    assert video.bounding_box()["y"] < page.locator(".frames").first.bounding_box()["y"]
    seconds = video.evaluate("""async (video) => {
        const ended = new Promise((done) => { video.onended = done; });
        await video.play();
        await ended;
        return video.duration;
    }""")
    assert seconds == pytest.approx(NUM_FRAMES / 16, abs=0.05)


@pytest.mark.browser
def test_the_table_and_the_history_of_a_prompt_show_thumbnails(page, address):
    page.goto(f"{address}#rollouts?kind=train")
    expect(page.locator(".response-cell img")).to_have_count(12)
    page.goto(f"{address}#group/balls/validation/2/val2-0-0?steps=1")
    expect(page.locator(".over-steps .response-cell img")).to_have_count(4)
    expect(page.locator("article .badge.bad")).to_have_count(0)
