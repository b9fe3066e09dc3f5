# SPDX-License-Identifier: Apache-2.0
"""Train the demos and take the pictures of the documentation: screenshots of these runs in the viewer.

A run that is finished in the folder is not trained again. Needs Chromium, `apt-get install chromium`.

    python3 scripts/docs_pictures.py [--runs outputs/pictures] [--pictures docs/images]
"""

import argparse
import importlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DEMOS = {  # name of the run: its command
    "grpo": ("demo.py",),
    "rloo": ("demo.py", "trainer.experiment_name=rloo", "algorithm.adv_estimator=rloo"),
    "agent": ("agent_demo.py",),
    "diffusion": ("demo.py", "--diffusion"),
}
GAME = "game_agent.png"
DESKTOP, PHONE = (1280, 900), (390, 844)


class Picture(NamedTuple):
    """A screenshot: runs, an address in the viewer, and a window."""

    runs: tuple[str, ...]
    address: str
    size: tuple[int, int] = DESKTOP
    scheme: str = "light"


PICTURES = {
    "viewer": Picture(("grpo", "rloo"), "#curves?smooth=0.6", size=(1280, 752)),
    "viewer_phone": Picture(("grpo", "rloo"), "#curves?smooth=0.6", size=PHONE, scheme="dark"),
    "viewer_group": Picture(("grpo",), "#group/grpo/train/40/step40-0-7"),
    "viewer_conversation": Picture(("agent",), "#group/agent/train/5/step5-0-3", size=(1280, 1300)),
    "viewer_pictures": Picture(("diffusion",), "#group/diffusion/train/80/step80-0-1"),
}


def train(runs: Path, name: str) -> None:
    """Run a demo in its folder, unless it has drawn its curves there."""
    folder = runs / name
    if not (folder / "curves.png").exists():
        script, *arguments = DEMOS[name]
        command = [sys.executable, str(EXAMPLES / "quickstart" / script), "--folder", str(folder), *arguments]
        subprocess.run(command, check=True)


@contextmanager
def viewer(runs: Path, names: tuple[str, ...]) -> Iterator[str]:
    """Serve runs under their names; yields the address."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            Path(folder, name).symlink_to(runs / name / "checkpoints")
        command = [sys.executable, str(ROOT / "scripts" / "rollout_viewer.py"), folder, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            try:
                line = process.stdout.readline()
                yield next(word for word in line.split() if word.startswith("http://"))
            finally:
                process.send_signal(signal.SIGINT)


def take(browser: Browser, runs: Path, picture: Picture, path: Path) -> None:
    """Open a page of the viewer and write what it shows."""
    width, height = picture.size
    page = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme=picture.scheme, reduced_motion="reduce"
    )
    with viewer(runs, picture.runs) as address:
        page.goto(f"{address}{picture.address}")
        page.wait_for_selector("figure canvas, article")
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(1000)  # curves are drawn on canvases
        screenshot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    page.close()
    screenshot.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)  # a third of the bytes


def take_game(path: Path) -> None:
    """Write a picture of the game agent's game, which has no run."""
    sys.path.insert(0, str(EXAMPLES / "game_agent"))
    game = importlib.import_module("game")
    with game.open_page(scale=4) as page:
        played = game.Game(page)
        played.start(seed=3)
        page.screenshot(path=path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "pictures", help="folder of the runs")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "images", help="output folder")
    options = parser.parse_args()
    runs = options.runs.resolve()

    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        sys.exit("no Chromium: apt-get install chromium")
    for name in DEMOS:
        train(runs, name)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        for name, picture in PICTURES.items():
            take(browser, runs, picture, options.pictures / f"{name}.png")
        browser.close()
    take_game(options.pictures / GAME)


if __name__ == "__main__":
    main()
