# SPDX-License-Identifier: Apache-2.0
"""A Gymnasium environment: the policy reads observations as text or images and writes actions as text.

environment: gymnasium
environment_kwargs: {id: FrozenLake-v1, actions: [left, down, right, up], make: {is_slippery: false}}
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from verl.agents.interface import Message, Observation, ToolCall

NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
INTEGER = re.compile(r"(?<![\w.])[-+]?\d+(?![\w.]*\d)")
SHOWN = 4  # digits of a number
MAX_DIGITS = 19  # of an integer of 64 bits


class Gymnasium:
    """One episode.

    Args:
        id: Registered name, such as `FrozenLake-v1`.
        module: Module to import first, which registers it.
        make: Arguments of `gymnasium.make`.
        actions: Names of the actions of a discrete space, in order.
        images: Show what `render` draws, not the observation as text.
        instructions: The system's message; None describes the spaces, an empty text is left out.
        invalid_reward: Reward of a turn that contains no action.
    """

    def __init__(
        self,
        id: str,
        module: str | None = None,
        make: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        images: bool = False,
        instructions: str | None = None,
        invalid_reward: float = 0.0,
    ) -> None:
        self.env = _make(id, module, make, images)
        self.names, self.images = list(actions or ()), images
        self.instructions, self.invalid_reward = instructions, invalid_reward
        self.rule = rule_of(self.env.action_space, self.names)

    @classmethod
    def prepare(cls, id: str | None = None, module: str | None = None, **kwargs: Any) -> None:
        """Make the environment once: a name or an option that is wrong ends the run before it starts."""
        if id is not None:
            cls(id, module, **kwargs).close()

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        first, _ = self.env.reset(seed=int(row["seed"]))
        text = self.instructions
        if text is None:
            spec, seen = self.env.spec, "a picture" if self.images else described(self.env.observation_space)
            name = spec.id if spec is not None else type(self.env.unwrapped).__name__
            text = f"You act in {name}. Each turn shows {seen}. Answer each turn with {self.rule}."
        system = [{"role": "system", "content": text}] if text else []
        seen = self._seen(first)
        parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in seen.images]
        return [*system, {"role": "user", "content": parts or seen.text}]

    def step(self, text: str, calls: Sequence[ToolCall]) -> Observation:
        action = action_of(self.env.action_space, self.names, text)
        if action is None:
            return Observation(f"That is no action: answer with {self.rule}.", reward=self.invalid_reward)
        observation, reward, terminated, truncated, _ = self.env.step(action)
        seen = self._seen(observation)
        return Observation(seen.text, seen.images, reward=float(reward), done=bool(terminated or truncated))

    def close(self) -> None:
        self.env.close()

    def _seen(self, observation: Any) -> Observation:
        if self.images:
            return Observation(images=[np.asarray(self.env.render(), dtype=np.uint8)])
        return Observation(as_text(self.env.observation_space, observation))


def _make(id: str, module: str | None, make: Mapping[str, Any] | None, images: bool) -> gymnasium.Env:
    if module is not None:
        importlib.import_module(module)
    mode = {"render_mode": "rgb_array"} if images else {}
    return gymnasium.make(id, **{**mode, **(make or {})})


def rule_of(space: gymnasium.Space, names: Sequence[str]) -> str:
    """Describe an action of a space.

    Raises:
        ValueError: Such actions cannot be read from a text, or the names do not fit.
    """
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box):
        raise ValueError(f"actions of {space} cannot be read from a text: wrap the environment")
    if not names:
        return described(space)
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"`actions` names the actions of a discrete space, and the environment has {space}")
    if len(names) != space.n or len({name.casefold() for name in names}) != len(names):
        raise ValueError(
            f"`actions` must name the {space.n} actions of {space}, each differently, got {names}"
        )
    return "one of " + ", ".join(names)


def described(space: gymnasium.Space) -> str:
    """Describe a value of a space, as in "4 numbers from -1 to 1"."""
    if isinstance(space, spaces.Discrete):
        return f"an integer from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return ", ".join(map(described, parts))
    if isinstance(space, spaces.Text):
        return "a text"
    count = "x".join(map(str, space.shape or ()))
    if isinstance(space, spaces.Box):
        is_bounded = np.isfinite(space.low).all() and np.isfinite(space.high).all()
        bounds = f" from {_compact(space.low)} to {_compact(space.high)}" if is_bounded else ""
        return f"{count} number{'s' * (count != '1')}{bounds}"
    if isinstance(space, spaces.MultiBinary):
        return f"{count} integers from 0 to 1"
    if isinstance(space, spaces.MultiDiscrete):
        return f"{count} integers from {_compact(space.start)} to {_compact(space.start + space.nvec - 1)}"
    return f"a value of {space}"


def action_of(space: gymnasium.Space, names: Sequence[str], text: str) -> Any:
    """Return the last action that a text names; None if it names none that the space has."""
    if isinstance(space, spaces.Discrete):
        number = _named(names, text) if names else _last_integer(text)
        if number is None:
            return None
        number += space.start if names else 0
        return int(number) if space.contains(int(number)) else None
    count = int(np.prod(space.shape or ()))
    found = [float(number) for number in NUMBER.findall(text)][-count:]
    if len(found) < count:
        return None
    given = np.asarray(found, dtype=np.float64).reshape(space.shape)
    with np.errstate(all="ignore"):
        action = given.astype(space.dtype)
    is_whole = action.dtype.kind != "f"
    if not np.isfinite(action).all() or (is_whole and (action != given).any()):
        return None
    return action if space.contains(action) else None


def as_text(space: gymnasium.Space, observation: Any) -> str:
    """Write an observation in a line, or one for each part of a dictionary or tuple."""
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{key}: {as_text(space[key], observation[key])}" for key in space)
    if isinstance(space, spaces.Tuple):
        return "\n".join(as_text(part, value) for part, value in zip(space, observation, strict=True))
    return observation if isinstance(observation, str) else _written(observation)


def _named(names: Sequence[str], text: str) -> int | None:
    longest_first = sorted(names, key=len, reverse=True)
    pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"
    found = re.findall(pattern, text, re.IGNORECASE)
    folded = [name.casefold() for name in names]
    return folded.index(found[-1].casefold()) if found else None


def _last_integer(text: str) -> int | None:
    found = INTEGER.findall(text)
    return int(found[-1]) if found and len(found[-1]) < MAX_DIGITS else None


def _compact(values: Any) -> str:
    """Write an array in short, and one of equal entries as a single number."""
    array = np.asarray(values)
    if array.size > 1 and (array == array.flat[0]).all():
        array = array.flat[0]
    return _written(array)


def _written(values: Any) -> str:
    return np.array2string(
        np.asarray(values),
        separator=", ",
        formatter={"float_kind": lambda value: f"{value:.{SHOWN}g}"},
        threshold=1 << 16,
    )
