# SPDX-License-Identifier: Apache-2.0
"""The pictures of the documentation are screenshots of runs that `make pictures` trains."""

import re

import pytest
from PIL import Image

from scripts.docs_pictures import DEMOS, GAME, PICTURES, Picture, take
from tests.architecture.source import ROOT
from tests.helpers.browser import open_browser
from tests.helpers.demo_runs import write_run

IMAGE = re.compile(r"""[("](?:docs/)?images/\w+\.png[)"]""")


def test_every_picture_is_one_that_the_script_takes():
    kept = {path.name for path in (ROOT / "docs" / "images").glob("*.png")}

    assert kept == {f"{name}.png" for name in PICTURES} | {GAME}
    assert {name for picture in PICTURES.values() for name in picture.runs} == set(DEMOS)


@pytest.mark.parametrize("page", ["docs/viewer.md", "docs/game_agent.md"])
def test_a_page_with_pictures_names_the_command(page):
    text = (ROOT / page).read_text()

    assert IMAGE.search(text) and "`make pictures`" in text


def test_no_other_page_has_pictures():
    pages = [
        path
        for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        if IMAGE.search(path.read_text())
    ]

    assert {path.name for path in pages} == {"viewer.md", "game_agent.md"}


@pytest.mark.browser
def test_a_picture_shows_the_runs_under_their_names(tmp_path):
    write_run(tmp_path / "grpo" / "checkpoints", steps=5)
    with open_browser() as browser:
        take(browser, tmp_path, Picture(("grpo",), "#curves", size=(640, 480)), tmp_path / "picture.png")

    assert Image.open(tmp_path / "picture.png").size == (640, 480)
