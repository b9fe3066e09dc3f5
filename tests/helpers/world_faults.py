# SPDX-License-Identifier: Apache-2.0
"""An environment and an agent that fail in every way, as the policy's turns and the samples' numbers say.

A turn `<hang>` calls the function `hang` of their file. The first samples of each prompt fail before a turn.
"""

import re
from collections.abc import Iterator
from typing import Any

from tests.helpers.agent_faults import FAILING, TOOLS

DEEDS = TOOLS.partition("class Unmade")[0]

ENVIRONMENT = (
    DEEDS
    + """
def nothing():
    pass

def finish():
    return Observation("over", reward=2.0, done=True)

def no_messages():
    return []

BEGINNINGS = dict(enumerate((complain, hang, leave, no_messages)))


class World:
    def reset(self, row):
        return BEGINNINGS.get(row["sample"], lambda: "What now?")()

    def step(self, text, calls):
        return globals()[text.strip("<>")]()

    def close(self):
        pass
"""
)

AGENT = (
    DEEDS
    + """
import urllib.error
import urllib.request

from verl.agents.harnesses.policy import PolicyError

ASK = {"role": "user", "content": "What now?"}

def many_rewards():
    return {"turn_rewards": [0.5] * 9}

def never_ask():
    return 1.0

def finish():
    return 2.0

def ask_in_a_loop():
    while True:
        try:
            policy.generate([ASK])
        except PolicyError:
            pass

def ask_too_much():
    policy.generate([ASK | {"content": "a" * 10_000_000}])

def write_no_json():
    headers = {"Authorization": f"Bearer {policy.api_key}"}
    request = urllib.request.Request(policy.base_url + "/chat/completions", b"{", headers)
    try:
        urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        assert b"no JSON" in error.read()
        return f"refused with {error.code}"

BEGINNINGS = dict(enumerate((complain, hang, leave, never_ask)))
RETURNED = ("finish", "thing", "endless_reward", "many_rewards")


def run(row, given):
    global policy
    policy = given
    if row["sample"] in BEGINNINGS:
        return BEGINNINGS[row["sample"]]()
    messages = [ASK]
    for _ in range(2):  # about one in nine has no fault
        answer = policy.generate(messages)
        kind = answer.text.strip("<>")
        result = globals()[kind]()
        if kind in RETURNED:
            return result
        messages += [answer.message, {"role": "user", "content": result}]
    return 1.0
"""
)

LOOPED = r"agent neither returned nor had a turn of the policy within \d+ s"
STEPS = {kind: reason.replace("fault", "World", 1) for kind, reason in FAILING.items() if kind != "unmade"}
STEPS["hang"] = r"World did not answer within \d+ s"  # the run of a test sets its own limit
ANSWERED_STEPS = {
    "good": "fine",
    "long": "aaa",
    "nothing": "",
    "finish": "over",
    "leave_a_child": "it runs on",
    "flood": "written",
}
BEGUN = {
    0: "{} failed: ValueError: bad day",
    1: "{} (did not answer|neither returned nor had a turn of the policy) within",
    2: "{} exited with status 3",
    3: "{} returned list|the agent returned without a turn of the policy",
}
UNKNOWN = "(World|agent) failed: KeyError"  # the policy wrote something else
# An agent returns no pictures, and leads its conversation without the file that ends with it.
NOT_OF_AGENTS = ("unmade", "damaged_image", "large_image", "close_files")
RUNS = {kind: reason.replace("fault", "agent", 1) for kind, reason in FAILING.items()} | {
    "hang": LOOPED,
    "ask_in_a_loop": LOOPED,
    "ask_too_much": "agent failed: PolicyError: the (messages have 10000|conversation has 3 turns)",
    "thing": "agent returned a reward that is no finite number in float32: <object object",
    "many_rewards": "the agent returned 9 `turn_rewards` for",
}
RUNS = {kind: reason for kind, reason in RUNS.items() if kind not in NOT_OF_AGENTS}
ANSWERED_RUNS = {
    "good": "fine",
    "leave_a_child": "it runs on",
    "flood": "written",
    "write_no_json": "refused with 400",
    "finish": "",
}


def texts_of(*kinds: dict[str, str]) -> tuple[str, ...]:
    """Return the turns of the policy that call these functions."""
    return tuple(f"<{kind}>" for group in kinds for kind in group)


def happened(row: dict[str, Any], name: str, reasons: dict[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield what was called in a conversation and whether it failed, and check what was said of it.

    Args:
        name: The name by which messages call the environment or agent.
        reasons: What was said, as patterns, by the function that was called.
    """
    kind = "beginning" if row["sample"] in BEGUN else ""
    for turn in row["turns"]:
        if kind not in ("beginning", "ask_in_a_loop"):  # what an agent gets in its loop has no deed
            kind = turn["text"].strip("<>")
        pattern = BEGUN[row["sample"]].format(name) if kind == "beginning" else reasons.get(kind, UNKNOWN)
        for one in turn["observations"]:
            assert re.match(pattern, one["text"]), (kind, one)
            yield kind, one["failed"]
