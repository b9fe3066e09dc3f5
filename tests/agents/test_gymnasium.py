# SPDX-License-Identifier: Apache-2.0
"""Environments of Gymnasium by name: their texts, pictures, actions, ends, and what is wrong with options."""

import io

import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from tests.agents.test_environments import begin, step
from verl.agents.environments.loading import load_environments
from verl.agents.environments.shipped.gymnasium_env import action_of, as_text, described, rule_of
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import SHIPPED_ENVIRONMENTS, MultiTurnConfig

LAKE = {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "make": {"is_slippery": False}}
WAY = ["down", "down", "right", "right", "down", "right"]  # across the map of 4 x 4

WORLD = """
import gymnasium
import numpy as np


class World(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Discrete(3)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(3))
        return self.state, {}

    def step(self, action):
        self.state = action
        return action, 0.25, False, False, {}

    def render(self):
        return np.full((4, 6, 3), 100 * self.state, dtype=np.uint8)


gymnasium.register("verl_tests/World-v0", World, max_episode_steps=2)
"""


def options_for(**kwargs):
    return MultiTurnConfig(enable=True, environment="gymnasium", environment_kwargs=kwargs)


def test_every_shipped_environment_loads_by_its_name():
    for name in SHIPPED_ENVIRONMENTS:
        (loaded,) = load_environments(MultiTurnConfig(enable=True, environment=name))
        assert loaded.schemas == []


def test_the_lake_is_crossed_by_the_names_of_actions():
    with ToolPool(options_for(**LAKE, invalid_reward=-0.5)) as pool:
        opening = begin(pool)
        wrong = step(pool, "I swim.")
        seen = [step(pool, f"First left, then: {action.upper()}!") for action in WAY]

    rule = "one of left, down, right, up"
    system = (
        f"You act in FrozenLake-v1. Each turn shows an integer from 0 to 15. Answer each turn with {rule}."
    )
    assert opening.messages == ({"role": "system", "content": system}, {"role": "user", "content": "0"})
    assert (wrong.text, wrong.reward) == (f"That is no action: answer with {rule}.", -0.5)
    assert not wrong.done and not wrong.failed
    assert [one.text for one in seen] == ["4", "8", "9", "10", "14", "15"]
    assert [one.reward for one in seen] == [0.0] * 5 + [1.0]
    assert [one.done for one in seen] == [False] * 5 + [True]


def test_a_hole_ends_the_episode_without_a_reward():
    with ToolPool(options_for(**LAKE)) as pool:
        begin(pool)
        step(pool, "right")
        last = step(pool, "down")

    assert (last.text, last.reward, last.done) == ("5", 0.0, True)


def test_a_module_registers_and_pictures_replace_texts(tmp_path, monkeypatch):
    (tmp_path / "registers_world.py").write_text(WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    kwargs = {"id": "verl_tests/World-v0", "module": "registers_world", "images": True, "instructions": ""}
    with ToolPool(options_for(**kwargs)) as pool:
        openings = [begin(pool, key, seed=seed) for key, seed in enumerate((1, 1, 2, 3, 4, 5))]
        first, second = step(pool, "2", key=0), step(pool, "1", key=0)

    def shade(observation):
        [image] = [Image.open(io.BytesIO(one["bytes"])) for one in observation.images]
        assert image.size == (6, 4)
        return image.getpixel((0, 0))[0]

    assert openings[0].messages == ({"role": "user", "content": [{"type": "image"}]},)
    shades = [shade(opening) for opening in openings]
    assert shades[0] == shades[1] and len(set(shades)) > 1, "the seed decides how it begins"
    assert (shade(first), shade(second), first.text) == (200, 100, "")
    assert (first.done, second.done, second.reward) == (False, True, 0.25)  # cut off after two steps


WRONG = {
    "an id": ({"id": "FrozenLagoon-v1"}, r"environment_kwargs`: making .* failed: .*FrozenLagoon"),
    "names": ({"id": "FrozenLake-v1", "actions": ["left", "right"]}, r"`actions` must name the 4 actions"),
    "names of numbers": (
        {"id": "Pendulum-v1", "actions": ["left"]},
        r"`actions` names the actions of a disc",
    ),
    "an option": ({"id": "FrozenLake-v1", "make": {"is_icy": 1}}, r"is_icy"),
    "an argument": ({"id": "FrozenLake-v1", "slip": 1}, r"cannot be made with .*environment_kwargs.*'slip'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_option_that_is_wrong_is_named_before_any_conversation(name):
    kwargs, reason = WRONG[name]

    with pytest.raises(ValueError, match=reason):
        ToolPool(options_for(**kwargs))


BOX = spaces.Box(-2.0, 2.0, (2,), np.float32)
ACTIONS = [
    (spaces.Discrete(4), [], "1, no: 3.", 3),
    (spaces.Discrete(4), [], "4", None),
    (spaces.Discrete(4), [], "step 2.5", None),
    (spaces.Discrete(4, start=-1), [], "-1", -1),
    (spaces.Discrete(2, start=5), ["no", "yes"], "No. Yes", 6),
    (spaces.Discrete(2), ["go", "go on"], "GO ON", 1),
    (spaces.Discrete(2), ["go", "no"], "gone", None),
    (BOX, [], "at 9 I choose [-0.5, 1e0]", [-0.5, 1.0]),
    (BOX, [], "-0.5, 2.1", None),
    (BOX, [], "1.5", None),
    (spaces.MultiDiscrete([2, 3]), [], "1 2", [1, 2]),
    (spaces.MultiDiscrete([2, 3]), [], "1 2.5", None),
    (spaces.MultiBinary(2), [], "0 1", [0, 1]),
    # numbers that no action has, and that would be another one after a conversion
    (spaces.MultiBinary(2), [], "256 257", None),
    (spaces.MultiDiscrete([2, 3]), [], "1e999 1", None),
    (spaces.Box(0, 255, (1,), np.uint8), [], "300", None),
    (spaces.Box(-np.inf, np.inf, (1,), np.float32), [], "1e300", None),
    (spaces.Discrete(4), [], "1" * 30, None),
    (spaces.Discrete(4), [], "1" * 5000, None),
]


@pytest.mark.parametrize(("space", "names", "text", "expected"), ACTIONS)
def test_an_action_is_the_last_one_of_a_text(space, names, text, expected):
    action = action_of(space, names, text)

    assert (action is None) == (expected is None)
    if expected is not None:
        assert np.allclose(action, expected) and space.contains(action)


def test_spaces_and_observations_are_described():
    both = spaces.Dict({"place": spaces.Discrete(3), "speed": BOX})
    observation = {"place": 2, "speed": np.array([0.12345678, -2.0], np.float32)}

    assert described(both) == "an integer from 0 to 2, 2 numbers from -2 to 2"
    assert described(spaces.Box(-np.inf, np.inf, (3, 2))) == "3x2 numbers"
    assert rule_of(spaces.MultiDiscrete([2, 3]), []) == "2 integers from 0 to [1, 2]"
    assert as_text(both, observation) == "place: 2\nspeed: [0.1235, -2]"
    with pytest.raises(ValueError, match="cannot be read from a text"):
        rule_of(both, [])
