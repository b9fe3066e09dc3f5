# SPDX-License-Identifier: Apache-2.0
"""The Android agent with a stand-in for `adb`, which answers as two phones with one setting would."""

import io
import shlex
import subprocess
import sys

import pytest
from PIL import Image

from tests.agents.test_environments import begin, step, wait_for
from tests.architecture.test_examples import command_of
from tests.helpers.training import ROOT
from verl.agents.environments.loading import load_environments
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config

FOLDER = ROOT / "examples" / "android_agent"
ROW = {
    "task": "Turn on Wi-Fi.",
    "setup": "svc wifi disable",
    "app": "com.android.settings",
    "goal_command": "settings get global wifi_on | cat",
    "goal": "^1",
}
ADB = """#!{python}
import io, pathlib, sys
from PIL import Image

folder = pathlib.Path({folder!r})
_, serial, *words = sys.argv[1:]
state = folder / serial
with (folder / "log").open("a") as log:
    print(serial, *words[1:], file=log)
if not state.exists():
    sys.exit(f"adb: device '{{serial}}' not found")
match words:
    case ["exec-out", "screencap", "-p"]:
        color = dict(home="black", settings="gray", on="white")[state.read_text()]
        picture = io.BytesIO()
        Image.new("RGB", (101, 201), color).save(picture, "PNG")
        sys.stdout.buffer.write(picture.getvalue())
    case ["shell", "svc wifi disable"]:
        state.write_text("off")
    case ["shell", "input keyevent KEYCODE_HOME"] if state.read_text() == "off":
        state.write_text("home")
    case ["shell", "monkey -p com.android.settings -c android.intent.category.LAUNCHER 1"] if (
        state.read_text() == "home"
    ):
        state.write_text("settings")
    case ["shell", "input tap 50 20"] if state.read_text() == "settings":
        state.write_text("on")
    case ["shell", "settings get global wifi_on | cat"]:
        print(int(state.read_text() == "on"))
"""


@pytest.fixture
def phones(tmp_path):
    """The folder of the stand-in, its phones and the log of its commands."""
    adb = tmp_path / "adb"
    adb.write_text(ADB.format(python=sys.executable, folder=str(tmp_path)))
    adb.chmod(0o755)
    for serial in ("one", "two"):
        (tmp_path / serial).write_text("on")
    return tmp_path


def options_of(phones, **kwargs):
    given = {"serials": ["one", "two"], "adb": str(phones / "adb"), "settle_s": 0.0} | kwargs
    environment = f"{FOLDER / 'env.py'}:AndroidTask"
    return MultiTurnConfig(
        enable=True, environment=environment, environment_kwargs=given, tool_timeout_s=60.0
    )


def commands(phones):
    return [line.split(" ", 1) for line in (phones / "log").read_text().splitlines()]


def inputs(phones):
    return [line for _, line in commands(phones) if line.startswith("input")]


def color(observation):
    return Image.open(io.BytesIO(observation.images[0]["bytes"])).convert("RGB").getpixel((0, 0))


def text_of(observation):
    return observation.messages[0]["content"][1]["text"]


def test_a_task_starts_its_app_and_ends_with_the_touch_that_reaches_its_goal(phones):
    with ToolPool(options_of(phones, valid_reward=0.1)) as pool:
        opening = begin(pool, **ROW)
        assert color(opening) == (128, 128, 128) and text_of(opening).startswith("Task: Turn on Wi-Fi.")
        missed = step(pool, "I see a switch.\ntap 1000 1000")
        swiped = step(pool, "swipe 500 1000 500 0")
        done = step(pool, "Now the switch.\ntap 500 100\n")

    for valid in (missed, swiped):
        assert (valid.reward, valid.done) == (0.1, False)
    assert (done.reward, done.done) == (1.0, True)
    assert color(done) == (255, 255, 255)
    # Of 101 x 201 pixels the last are 100 and 200.
    assert inputs(phones) == [
        "input keyevent KEYCODE_HOME",
        "input tap 100 200",
        "input swipe 50 200 50 0 300",
        "input tap 50 20",
    ]


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        ("", "'' is no action"),
        ("I would tap the switch.", "'I would tap the switch.' is no action"),
        ("tap 500", "'tap 500' is no action"),
        ("tap 500 100 please", "is no action"),
        ("tap 500 1001", "Coordinates end at 1000"),
        ("tap -1 5", "is no action"),
        ("press POWER", "is no action"),
        ("type \u00fcber", "only printable ASCII without %s can be typed"),
    ],
)
def test_a_turn_that_is_no_action_is_answered_with_the_rule_and_touches_nothing(phones, turn, problem):
    with ToolPool(options_of(phones, valid_reward=0.1)) as pool:
        begin(pool, **ROW)
        before = inputs(phones)
        seen = step(pool, turn)

    assert problem in text_of(seen) and "tap X Y, swipe X Y TO_X TO_Y" in text_of(seen)
    assert (seen.reward, seen.done) == (0.0, False)
    assert inputs(phones) == before


def test_what_a_policy_types_is_one_word_for_the_shell_of_the_device(phones):
    with ToolPool(options_of(phones)) as pool:
        begin(pool, **ROW)
        step(pool, "type it's $(reboot); rm -rf /sdcard")

    *_, (_, line) = [command for command in commands(phones) if "input text" in command[1]]
    assert shlex.split(line) == ["input", "text", "it's%s$(reboot);%srm%s-rf%s/sdcard"]
    printed = subprocess.run(
        ["sh", "-c", line.replace("input text", "printf %s", 1)], capture_output=True, text=True
    )
    assert printed.stdout == "it's%s$(reboot);%srm%s-rf%s/sdcard"


def test_each_conversation_has_a_phone_of_its_own_and_the_next_one_waits_for_it(phones):
    with ToolPool(options_of(phones)) as pool:
        begin(pool, "a", **ROW)
        begin(pool, "b", **ROW)
        first, second = dict.fromkeys(serial for serial, line in commands(phones)[2:])  # after `prepare`
        pool.start("c", {"seed": 5, **ROW})
        pool.reset("c")
        step(pool, "tap 500 100", key="b")
        lines = len(commands(phones))
        pool.end("a")
        ((answered, _),) = wait_for(pool, 1)

    assert answered == "c"
    assert {serial for serial, _ in commands(phones)[lines:]} == {first} != {second}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"adb": "/no/adb"}, "no program '/no/adb'; install Android's platform tools"),
        ({"serials": ["one", "three"]}, "device 'three' not found"),
        ({"serials": "one"}, "`environment_kwargs.serials` must list devices"),
    ],
)
def test_a_device_that_does_not_answer_is_told_before_the_first_conversation(phones, kwargs, message):
    with pytest.raises(Exception, match=message), ToolPool(options_of(phones, **kwargs)) as pool:
        begin(pool, **ROW)


def test_the_example_is_a_run_whose_environment_loads():
    config = load_config(
        PPOConfig, [*command_of(FOLDER / "run.sh"), "data.train_files=/dev/null", "data.val_files=/dev/null"]
    )

    options = config.worker.rollout.multi_turn
    assert options.environment_kwargs == {"serials": ["emulator-5554", "emulator-5556"]}
    assert options.tool_concurrency > config.data.rollout_batch_size * config.worker.rollout.n
    assert load_environments(options)[0].name == "AndroidTask"
