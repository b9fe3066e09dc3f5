# SPDX-License-Identifier: Apache-2.0
"""Environments in real processes: their resets, steps and ends, and every way in which they fail."""

import io
import os
import re

import pytest
from PIL import Image

from tests.agents.environment_files import GOOD, TAKE
from tests.agents.test_tool_pool import gone, wait_for
from tests.helpers.nightly import at_night, by_day
from verl.agents.interface import Observation, ToolCall
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig


@pytest.fixture
def env_file(tmp_path):
    path = tmp_path / "env.py"
    path.write_text(GOOD + TAKE)
    return path


@pytest.fixture
def make_pool(env_file):
    pools = []

    def make(name="Counter", **options):
        given = {"tool_timeout_s": 30.0, "tool_memory_limit_gb": 0.5, "environment_kwargs": {"start": 10}}
        options = given | {"environment": f"{env_file}:{name}"} | options
        pools.append(ToolPool(MultiTurnConfig(enable=True, **options)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def begin(pool, key="a", **row):
    pool.start(key, {"seed": 5, **row})
    pool.reset(key)
    ((answered, (opening,)),) = wait_for(pool, 1)
    assert answered == key
    return opening


def step(pool, text, *calls, key="a"):
    pool.step(key, text, calls)
    ((answered, (observation,)),) = wait_for(pool, 1)
    assert answered == key
    return observation


def test_an_environment_begins_answers_turns_and_is_closed(make_pool, tmp_path):
    log = tmp_path / "log"
    pool = make_pool(environment_kwargs={"start": 10, "log": str(log)})

    opening = begin(pool)
    first, last = step(pool, "4"), step(pool, "6")
    pool.end("a")
    pool.close()

    assert opening == Observation(
        images=[], videos=[], messages=({"role": "user", "content": "10 are left. The seed is 5."},)
    )
    assert first.text.startswith("6 are left in ") and (first.reward, first.done) == (0.0, False)
    assert last.text == first.text.replace("6", "0", 1) and (last.reward, last.done) == (1.0, True)
    assert first.text != f"6 are left in {os.getpid()}."
    assert log.read_text() == "closed at 0\n"


def test_calls_reach_the_step_with_the_text(make_pool):
    pool = make_pool("Taker")
    begin(pool)

    calls = [ToolCall("take", {"number": 2}), ToolCall("take", {"number": 3})]

    assert step(pool, "I take some.", *calls).text.startswith("5 are left")


def test_a_step_may_give_the_messages_that_the_policy_reads_from_then_on(make_pool):
    pool = make_pool(environment_kwargs={"start": 10})
    begin(pool)

    given, mixed = step(pool, "new_prompt"), step(pool, "prompt_and_text")

    assert given.messages == ({"role": "user", "content": [{"type": "image"}]},) and given.reward == 2.0
    assert [sorted(image) for image in given.images] == [["bytes"]] and not given.done and not given.text
    assert mixed.failed and mixed.messages is None
    assert mixed.text.endswith("an Observation with `messages` and in addition a text, images or videos")


def test_rows_replace_single_arguments(make_pool):
    pool = make_pool(environment_kwargs={"start": 10})
    texts = {}
    for key, given in {
        "none": None,
        "a dictionary": {"start": 3, "log": None},
        "JSON": '{"start": 4}',
    }.items():
        texts[key] = begin(pool, key, env_kwargs=given).messages[0]["content"]

    assert [text.split()[0] for text in texts.values()] == ["10", "3", "4"]


def test_environments_begin_and_step_at_once(make_pool, tmp_path):
    pool, folder = make_pool(), tmp_path / "meet"
    folder.mkdir()
    for key in range(8):
        pool.start(key, {"seed": key, "meet": str(folder), "number": 8})  # waits for the other seven
        pool.reset(key)

    found = {key: opening.messages[0]["content"] for key, (opening,) in wait_for(pool, 8)}

    assert all(found[key].endswith(f"seed is {key}.") for key in range(8))


LOST = {
    "hang": r"Counter did not answer within 4 s; its state is lost",
    "spin": r"Counter did not answer within 4 s; its state is lost",
    "stop": r"Counter did not answer within 4 s; its state is lost",
    "leave": r"Counter exited with status 3; its state is lost",
    "crash": r"Counter was killed by SIGSEGV; its state is lost",
}
KEPT = {
    "complain": r"Counter failed: ValueError: bad day .* \(\d+ characters\) .*",
    "exit_politely": r"Counter failed: SystemExit: bye",
    "fill_memory": r"Counter failed: it needs more than the 0.5 GiB of memory that it may use",
    "large_image": r"Counter returned an image of 10000 x 10000 pixels, at most \d+ pixels",
    "thing": r"Counter returned object, not text.*",
}


@pytest.mark.parametrize("kind", at_night(LOST, "spin", "stop"))
def test_a_step_that_hangs_or_dies_ends_with_the_reason(make_pool, kind):
    pool = make_pool(tool_timeout_s=4.0)
    begin(pool)
    pid = int(step(pool, "1").text.split()[-1].rstrip("."))

    observation = step(pool, kind)

    assert observation.failed and observation.done
    assert re.fullmatch(LOST[kind], observation.text)
    assert gone([pid])
    assert begin(pool, "b").messages


@pytest.mark.parametrize("kind", KEPT)
def test_an_environment_survives_what_a_step_raises_or_returns(make_pool, kind):
    pool = make_pool()
    begin(pool)
    step(pool, "1")

    observation = step(pool, kind)

    assert observation.failed and not observation.done
    assert re.fullmatch(KEPT[kind], observation.text, re.DOTALL)
    assert step(pool, "1").text.startswith("8 are left")


def test_a_long_observation_is_cut_before_it_travels(make_pool):
    pool = make_pool()
    begin(pool)

    text = step(pool, "long").text

    assert len(text) < 20_000 and text[0] == "a" and text[-1] == "z" and "MIDDLE" not in text


BAD_OPENINGS = {
    **LOST,
    **{kind: KEPT[kind] for kind in ("complain", "exit_politely", "fill_memory", "large_image")},
    "thing": r"Counter returned object, not a list of messages .*",
    "long": r"Counter returned messages of 10000006 characters, at most \d+",
    "half_a_message": r"Counter returned message 0 without a `role` of .* and a `content` of text or parts.*",
    "unknown_role": r"Counter returned message 0 without a `role` of .*narrator.*",
    "words_of_the_policy": r"Counter returned messages that end with the assistant's, before its turn",
    "deep_message": r"Counter returned message 0 with over 64 levels of lists and objects",
    "odd_part": r"Counter returned a part of message 0 that is no text, image or video: .*",
    "empty_image": r"Counter returned image in message 0 must have one of .*",
    "over_already": r"Counter returned a beginning that is `done` or `failed`: .*",
    "no_message": r"Counter returned list, not a list of messages .*",
}


@pytest.mark.parametrize("kind", by_day(BAD_OPENINGS, "complain", "long", "unknown_role"))
def test_a_reset_that_fails_says_why_and_leaves_nothing(make_pool, kind, tmp_path):
    log = tmp_path / "log"
    pool = make_pool(tool_timeout_s=4.0, environment_kwargs={"start": 10, "log": str(log)})

    opening = begin(pool, reset=kind)
    pool.end("a")

    assert opening.failed and opening.messages is None
    assert re.fullmatch(BAD_OPENINGS[kind], opening.text, re.DOTALL)
    assert log.exists() == (kind not in LOST)  # the process was there to close it
    assert begin(pool, "b").messages


def test_what_the_constructor_raises_says_why(make_pool):
    pool = make_pool(environment_kwargs={})

    opening = begin(pool)

    assert opening.failed and "missing 1 required positional argument: 'start'" in opening.text


PICTURES = """
from pathlib import Path
from PIL import Image
from verl.agents.interface import Observation

RED = Image.new("RGB", (8, 4), "red")


class Env:
    def reset(self, row):
        path = Path(row["folder"]) / "blue.png"
        Image.new("RGB", (2, 2), "blue").save(path)
        image = {"none": None, "text": "Look", "image": RED, "both": ["Look", RED],
                 "observation": Observation("Look", images=[RED])}
        parts = [{"type": "image", "image": RED}, {"type": "text", "text": "and"},
                 {"type": "image", "path": str(path)}, {"type": "image", "bytes": path.read_bytes()}]
        image["messages"] = [{"role": "system", "content": "You see."}, {"role": "user", "content": parts}]
        return image[row["kind"]]

    def step(self, text, calls):
        return RED

    def close(self):
        pass
"""
LOOK, IMAGE = {"type": "text", "text": "Look"}, {"type": "image"}
OPENINGS = {
    "none": (None, []),
    "text": (({"role": "user", "content": "Look"},), []),
    "image": (({"role": "user", "content": [IMAGE]},), [(8, 4)]),
    "both": (({"role": "user", "content": [LOOK, IMAGE]},), [(8, 4)]),
    "observation": (({"role": "user", "content": [LOOK, IMAGE]},), [(8, 4)]),
    "messages": (
        (
            {"role": "system", "content": "You see."},
            {"role": "user", "content": [IMAGE, {"type": "text", "text": "and"}, IMAGE, IMAGE]},
        ),
        [(8, 4), (2, 2), (2, 2)],
    ),
}


@pytest.mark.parametrize("kind", by_day(OPENINGS, "messages"))
def test_a_reset_returns_any_form_of_a_prompt(tmp_path, kind):
    path = tmp_path / "pictures.py"
    path.write_text(PICTURES)
    with ToolPool(MultiTurnConfig(enable=True, environment=f"{path}:Env")) as pool:
        opening = begin(pool, kind=kind, folder=str(tmp_path))
        seen = step(pool, "go")

    messages, sizes = OPENINGS[kind]
    assert opening.messages == messages
    assert [Image.open(io.BytesIO(one["bytes"])).size for one in opening.images] == sizes
    assert isinstance(seen, Observation) and len(seen.images) == 1
