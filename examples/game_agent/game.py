# SPDX-License-Identifier: Apache-2.0
"""The game in a headless Chromium: what an agent sees of it, and the clicks that it makes.

A player is a function from a game to the name of a button. To play another game: a page with the attributes
that `game.html` names, and its question here.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).resolve().parent
QUESTION = "<image>Which number is the largest?"
NAMES = ("red", "green", "blue")  # of the buttons: their colours
DIGITS = "12345"  # that buttons show, unless another set is asked for
SIZE = (168, 84)  # pixels of the window; 18 visual tokens of the tiny model
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BUTTONS = """buttons => buttons.map(button => {
    const { left, top, right, bottom } = button.getBoundingClientRect();
    return { name: button.name, value: Number(button.value), box: [left, top, right, bottom] };
})"""


@dataclass(frozen=True)
class Button:
    """A button as the page knows it: {"name": "red", "value": 4, "box": [56, 0, 112, 56]}.

    Attributes:
        name: What an answer calls it.
        value: The number on it.
        box: Left, top, right and bottom in pixels.
    """

    name: str
    value: int
    box: tuple[float, float, float, float]


class Game:
    """A page of the game in a browser.

    Example::

        with open_page() as page:
            game = Game(page)
            game.start(seed=7)
            while not game.is_over:
                image, button = game.screenshot(), game.buttons()[0]
                game.click(button.name)
            game.num_right
    """

    def __init__(self, page: Page) -> None:
        self.page = page

    def start(self, seed: int, *, levels: int = 5, digits: str = DIGITS) -> None:
        """Open the game of a seed: the same levels every time."""
        options = urlencode({"seed": seed, "levels": levels, "digits": digits})
        self.page.goto(f"{(HERE / 'game.html').as_uri()}?{options}")

    def screenshot(self) -> bytes:
        """What a player sees, as PNG."""
        return self.page.screenshot()

    def buttons(self) -> list[Button]:
        """The buttons of this level, from left to right."""
        found = self.page.eval_on_selector_all("button", BUTTONS)
        return [Button(one["name"], one["value"], tuple(one["box"])) for one in found]

    def click(self, name: str) -> tuple[float, float]:
        """Click the button of that name, or beside all of them if there is none; returns where, in pixels."""
        boxes = [button.box for button in self.buttons() if button.name == name]
        width, height = SIZE
        left, top, right, bottom = boxes[0] if boxes else (0, height - 2, width, height)
        place = ((left + right) / 2, (top + bottom) / 2)
        self.page.mouse.click(*place)
        return place

    @property
    def level(self) -> int:
        """Levels that are done."""
        return self._number("level")

    @property
    def num_right(self) -> int:
        """Right clicks."""
        return self._number("right")

    @property
    def is_over(self) -> bool:
        """Whether all levels are done."""
        return self.level == self._number("levels")

    def _number(self, name: str) -> int:
        return int(self.page.evaluate("name => document.body.dataset[name]", name))


Player = Callable[[Game], str]


def random_player(rng: random.Random) -> Player:
    """Clicks any button."""
    return lambda game: rng.choice(NAMES)


def expert(game: Game) -> str:
    """Reads the numbers from the page instead of the picture, and is always right."""
    return max(game.buttons(), key=lambda button: button.value).name


@contextmanager
def open_page(scale: float = 1.0) -> Iterator[Page]:
    """An empty page of `SIZE`; screenshots have `scale` times its pixels.

    Raises:
        FileNotFoundError: There is no Chromium.
    """
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), None) or playwright.chromium.executable_path
        if not os.path.exists(found):
            raise FileNotFoundError(
                "no Chromium: `apt-get install chromium`, or `python3 -m playwright install chromium`"
            )
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses root a sandbox
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        width, height = SIZE
        viewport = {"width": width, "height": height}
        yield browser.new_context(viewport=viewport, device_scale_factor=scale).new_page()
        browser.close()
