# SPDX-License-Identifier: Apache-2.0
"""The game as an environment: the policy sees the page, names a button, and sees the page after the click.

    worker.rollout.multi_turn.environment=examples/game_agent/env.py:NumberGame

One browser runs next to each engine, and each conversation plays on a page of its own. The policy reads one
page and the question, and nothing that came before.
"""

import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from browser import Seen, start_browser
from game import DIGITS, NAMES, QUESTION

from verl.agents.interface import Message, Observation, ToolCall

INSTRUCTION = f"{QUESTION.removeprefix('<image>')} Answer with the colour of its button: red, green or blue."


class NumberGame:
    """One game: as many turns as levels, each with a click.

    Args:
        named_reward: Reward for naming any button; the right one has 1.
    """

    address: Path  # of the browser

    def __init__(self, levels: int = 5, digits: str = DIGITS, named_reward: float = 0.1) -> None:
        self.levels, self.digits, self.named_reward = levels, digits, named_reward
        self.num_right = 0

    @classmethod
    def prepare(cls, **_options: Any) -> None:
        cls.address = Path(tempfile.mkdtemp(prefix="number_game_")) / "browser.socket"
        start_browser(cls.address)

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        self.browser = Client(str(self.address))
        seen = self._ask("start", int(row["seed"]), self.levels, self.digits)
        return _prompt(seen)

    def step(self, text: str, calls: Sequence[ToolCall]) -> Observation:
        word = (text.lower().split() or [""])[0].strip(".,!")
        seen = self._ask("click", word)
        is_right, self.num_right = seen.num_right > self.num_right, seen.num_right
        reward = 1.0 if is_right else self.named_reward * (word in NAMES)
        return Observation(messages=_prompt(seen), reward=reward, done=seen.is_over)

    def close(self) -> None:
        self.browser.close()

    def _ask(self, method: str, *arguments: Any) -> Seen:
        self.browser.send((method, arguments))
        return Seen(*self.browser.recv())


def _prompt(seen: Seen) -> list[Message]:
    parts = [{"type": "image", "image": seen.screenshot}, {"type": "text", "text": INSTRUCTION}]
    return [{"role": "user", "content": parts}]
