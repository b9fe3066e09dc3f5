# SPDX-License-Identifier: Apache-2.0
"""Environments that tests write to files: a useful one, and one for each way to fail."""

from tests.agents.failures import WAYS_TO_FAIL

GOOD = (
    '''
import asyncio, os, signal, sys, time

from PIL import Image

from verl.agents.interface import Observation


def large_image():
    return Image.new("1", (10_000, 10_000))

def new_prompt():
    picture = {"type": "image", "image": Image.new("RGB", (4, 4))}
    return Observation(messages=[{"role": "user", "content": [picture]}], reward=2, done=False)

def prompt_and_text():
    return Observation("and this", messages=[{"role": "user", "content": "Go."}])

def half_a_message():
    return [{"role": "user"}]

def unknown_role():
    return [{"role": "narrator", "content": "Once"}]

def words_of_the_policy():
    return [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "I go."}]

def deep_message():
    deep = []
    for _ in range(600):
        deep = [deep]
    return [{"role": "user", "content": "Go.", "note": deep}]

def odd_part():
    return [{"role": "user", "content": [{"type": "smell", "smell": "roses"}]}]

def empty_image():
    return [{"role": "user", "content": [{"type": "image"}]}]

def over_already():
    return Observation("nothing to do", done=True)

def no_message():
    return []


class Counter:
    """Counts down from a number; each turn takes the number that it says."""

    def __init__(self, start, log=None):
        self.left, self.log = start, log

    async def reset(self, row):
        self.row = row
        if "meet" in row:  # those of as many conversations as there should be
            with open(os.path.join(row["meet"], str(row["seed"])), "w"):
                pass
            while len(os.listdir(row["meet"])) < row["number"]:
                await asyncio.sleep(0.01)
        if row.get("reset"):
            return globals()[row["reset"]]()
        return f"{self.left} are left. The seed is {row['seed']}."

    def step(self, text, calls):
        if text in globals():
            return globals()[text]()
        self.left -= sum(call.arguments["number"] for call in calls) if calls else int(text)
        done = self.left <= 0
        return Observation(f"{self.left} are left in {os.getpid()}.", reward=float(done), done=done)

    async def close(self):
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"closed at {self.left}\\\\n")
'''.replace("\\\\n", "\\n")
    + WAYS_TO_FAIL
)

TAKE = """

class Taker(Counter):
    tools = [
        {
            "type": "function",
            "function": {
                "name": "take",
                "description": "Take some.",
                "parameters": {
                    "type": "object",
                    "properties": {"number": {"type": "integer"}},
                    "required": ["number"],
                },
            },
        }
    ]
"""
