# SPDX-License-Identifier: Apache-2.0
"""Android as an environment: the policy sees the screen, and each of its turns is a touch.

    worker.rollout.multi_turn.environment=examples/android_agent/env.py:AndroidTask
    "worker.rollout.multi_turn.environment_kwargs={serials: [emulator-5554, emulator-5556]}"

A row has the columns `task`, what is to be done; `setup`, a command of the device's shell that comes first,
and `app`, what is started then (both optional); and `goal`, the regular expression found in the output of the
device's shell for `goal_command` once the task is done, which ends the conversation with a reward of 1. The
policy reads one screen and the task, and nothing from before.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from time import sleep
from typing import Any

from phone import Phone, free_serial, size_of

from verl.agents.interface import Message, Observation, ToolCall

SCALE = 1000  # of coordinates: 0 0 is the upper left corner, 1000 1000 the lower right one
NUMBER = r"(\d{1,4})"
ACTIONS = {
    "tap": re.compile(rf"tap {NUMBER} {NUMBER}"),
    "swipe": re.compile(rf"swipe {NUMBER} {NUMBER} {NUMBER} {NUMBER}"),
    "type": re.compile(r"type (.+)"),
    "press": re.compile(r"press (BACK|HOME|ENTER)"),
}
FORMS = "tap X Y, swipe X Y TO_X TO_Y, type TEXT, press BACK, press HOME or press ENTER"
INSTRUCTION = (
    f"Answer with the next action on a line of its own: {FORMS}."
    f" Coordinates go from 0 to {SCALE}, from left to right and from top to bottom."
)


class AndroidTask:
    """One task on a device that no other conversation has meanwhile.

    Args:
        serials: Devices of this machine, as `adb devices` lists them.
        adb: The program, by name or path.
        settle_s: Wait after an action before the screen is read.
        valid_reward: Reward of an action that could be carried out and did not reach the goal.
    """

    def __init__(
        self, serials: Sequence[str], adb: str = "adb", settle_s: float = 1.0, valid_reward: float = 0.0
    ) -> None:
        self.serials, self.adb = serials, adb
        self.settle_s, self.valid_reward = settle_s, valid_reward
        self.held = ExitStack()

    @classmethod
    def prepare(cls, serials: Sequence[str] = (), adb: str = "adb", **_options: Any) -> None:
        """Check that every device answers."""
        if not serials or isinstance(serials, str):
            raise ValueError(
                f"`environment_kwargs.serials` must list devices of `adb devices`, got {serials!r}"
            )
        for serial in serials:
            Phone(serial, adb).screenshot()

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        self.task, self.goal = row["task"], re.compile(row["goal"])
        self.goal_command = row["goal_command"]
        self.phone = Phone(self.held.enter_context(free_serial(self.serials)), self.adb)
        if row.get("setup"):
            self.phone.shell(row["setup"])
        self.phone.press("HOME")
        if row.get("app"):
            self.phone.start(row["app"])
        return self._seen()

    def step(self, text: str, calls: Sequence[ToolCall]) -> Observation:
        if problem := self._act(text):
            return Observation(messages=self._seen(problem), reward=0.0)
        is_done = self.goal.search(self.phone.shell(self.goal_command)) is not None
        return Observation(messages=self._seen(), reward=1.0 if is_done else self.valid_reward, done=is_done)

    def close(self) -> None:
        self.held.close()

    def _act(self, text: str) -> str:
        """Carry out the last line; return what is wrong with it, if anything."""
        line = (text.strip().splitlines() or [""])[-1].strip()
        name, *_ = line.split(" ", 1)
        found = ACTIONS[name].fullmatch(line) if name in ACTIONS else None
        if found is None:
            return f"{line[:80]!r} is no action. "
        if name in ("tap", "swipe"):
            places = [int(number) for number in found.groups()]
            if max(places) > SCALE:
                return f"Coordinates end at {SCALE}. "
            getattr(self.phone, name)(*self._pixels(places))
        else:
            try:
                getattr(self.phone, name)(found[1])
            except ValueError as error:
                return f"{error}. "
        return ""

    def _pixels(self, places: Sequence[int]) -> list[int]:
        """Return the pixels of x, y, x, y, ... on a scale that ends at the last row and column."""
        return [round(place * (self.size[number % 2] - 1) / SCALE) for number, place in enumerate(places)]

    def _seen(self, problem: str = "") -> list[Message]:
        sleep(self.settle_s)
        screen = self.phone.screenshot()
        self.size = size_of(screen)  # of the screen as it is turned now
        text = f"{problem}Task: {self.task}\n{INSTRUCTION}"
        return [
            {"role": "user", "content": [{"type": "image", "image": screen}, {"type": "text", "text": text}]}
        ]
