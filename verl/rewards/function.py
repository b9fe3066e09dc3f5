# SPDX-License-Identifier: Apache-2.0
"""The user's reward function: load it from a file, call it by its convention, check its scores.

A reward file is plain Python; its `REWARD_TYPE` says how its function is called:

    batch (default)  f(list[dict], **kwargs) -> list[dict[str, float]]      also `async def`
    sequential       f(dict, **kwargs) -> dict[str, float]                  also `async def`
    dataproto        f(data, **kwargs) -> {"reward": (B,) tensor or list, other names: the same}

Each dict holds `response`, `response_length`, `ground_truth`, `prompt` and every other column of the row;
`data` has them as lists: `data.responses`, `data.prompts`, ... The result needs `overall`, for dataproto
`reward`: a number, or for a conversation a list with the reward of each turn; a number instead of a dict is
`overall`. Without `REWARD_TYPE` the name of the first parameter may tell the convention, and the arguments of
TRL or verl do. A parameter `servers` gets the models of `reward_servers` by name. Nothing here imports torch:
a process starts in a tenth of a second.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import groupby
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.rewards import turns
from verl.rewards.conventions import ARGUMENTS, REWARD_TYPES, convention_of
from verl.rewards.servers import SECTION, Specs, connect
from verl.utils import user_file
from verl.utils.user_file import find_function, import_file, shorten

OPTION = "worker.reward.reward_function"
KWARGS_OPTION = "worker.reward.reward_function_kwargs"
DEFAULT_FUNCTION = "main"
SERVERS = "servers"  # parameter that gets the models of `reward_servers`
TRACEBACK_HEADING = "Traceback in the reward function (most recent call last):"
describe_error = partial(user_file.describe_error, heading=TRACEBACK_HEADING)
describe_place = partial(user_file.describe_place, heading=TRACEBACK_HEADING)
SHOWN_COLUMNS = ("prompt", "response", "ground_truth")  # what an error shows of a row

Scores = dict[str, float]


class BadScoresError(ValueError):
    """A reward function returned something other than scores; the message is for the user."""


class RewardData(SimpleNamespace):
    """All responses of a step as columns, for a `dataproto` function.

    Example::

        data.responses       # ["<think>...", ...]
        data.ground_truth    # ["5", ...]
        len(data)            # 512
    """

    def __len__(self) -> int:
        return len(self.responses)

    @classmethod
    def from_inputs(cls, inputs: Sequence[dict[str, Any]]) -> "RewardData":
        """Turn rows into columns. `prompt` is renamed to `prompts`, `response` to `responses`."""
        names = {"prompt": "prompts", "response": "responses"}
        columns = {key: None for row in inputs for key in row}  # in the order of their first appearance
        values = {names.get(key, key): [row.get(key) for row in inputs] for key in columns}
        return cls(**({"prompts": [], "responses": [], "ground_truth": []} | values))


@dataclass(frozen=True)
class RewardFunction:
    """A reward function that was imported and can be called.

    Example::

        reward = load_reward_function("examples/reward_function/math.py:compute_score", {})
        reward.score([{"response": "...", "ground_truth": "5"}])  # [{"overall": 1.0, ...}]
    """

    function: Callable[..., Any]
    kwargs: dict[str, Any]
    path: Path
    function_name: str
    line: int  # where its definition starts; 0 when Python does not know
    name: str  # `REWARD_NAME`, or the name of the file
    reward_type: str
    is_async: bool
    note: str | None = None  # on a convention that nothing but the parameters told

    def __str__(self) -> str:
        return f"{self.path}:{self.function_name}"

    def score(self, inputs: Sequence[dict[str, Any]]) -> list[Scores]:
        """Score responses in this process, where `print` and `breakpoint()` work, without a time limit."""
        rows = range(len(inputs))
        if self.is_async:
            return self.check(asyncio.run(self._call_concurrently(inputs)), rows, inputs)
        if self.reward_type == "sequential":
            return [self.check(self.call([inputs[row]]), [row], [inputs[row]])[0] for row in rows]
        return self.check(self.call(inputs), rows, inputs)

    async def _call_concurrently(self, inputs: Sequence[dict[str, Any]]) -> list[Any]:
        if self.reward_type == "sequential":
            each = await asyncio.gather(*(self.call_async([row_input]) for row_input in inputs))
            return [scores for (scores,) in each]
        return await self.call_async(inputs)

    async def call_async(self, inputs: Sequence[dict[str, Any]]) -> Any:
        """Call an `async def` function once and await its result, which is that of `call`."""
        called = self.call(inputs)
        found = called[0] if self.reward_type == "sequential" else called
        found = await found if inspect.isawaitable(found) else found  # a decorator may have awaited it
        return [found] if self.reward_type == "sequential" else found

    def call(self, inputs: Sequence[dict[str, Any]]) -> Any:
        """Call the function once; a `sequential` one takes one dict, and its result is put into a list."""
        if self.reward_type == "sequential":
            (only,) = inputs
            return [self.function(only, **self.kwargs)]
        if self.reward_type == "dataproto":
            return self.function(RewardData.from_inputs(inputs), **self.kwargs)
        return self.function(list(inputs), **self.kwargs)

    def check(self, returned: Any, rows: Sequence[int], inputs: Sequence[dict[str, Any]]) -> list[Scores]:
        """Turn the result of `call`, awaited, into plain floats, or raise a `BadScoresError`."""
        try:
            if inspect.iscoroutine(returned[0] if self.reward_type == "sequential" else returned):
                raise self._bad(" returned a coroutine: its decorator hides `async def`; add functools.wraps")
            if self.reward_type == "dataproto":
                returned = self._rows_of_columns(returned, len(rows))
            if _size(returned) != len(rows):
                got = f"{_size(returned)} for {describe(rows, inputs)}"
                raise self._bad(f" must return a list of {len(rows)} dicts, one per response, got {got}")
            return [
                self._check_row(scores, describe([row], [row_input]), row_input.get("num_turns"))
                for scores, row, row_input in zip(returned, rows, inputs, strict=True)
            ]
        except BadScoresError:
            raise
        except (Exception, SystemExit) as error:
            what = f"{describe_error(error, self.path)} for {describe(rows, inputs)}"
            raise self._bad(f" returned something that cannot be read as scores: {what}") from error

    def _rows_of_columns(self, returned: Any, num_rows: int) -> list[dict[str, Any]]:
        if not isinstance(returned, dict) or not {"reward", "overall"} & returned.keys():
            got = str(sorted(map(str, returned))) if isinstance(returned, dict) else type(returned).__name__
            raise self._bad(f" must return a dict with `reward` for all responses, got {shorten(got)}")
        if {"reward", "overall"} <= returned.keys():
            raise self._bad(" must return `reward` or `overall`, got both")
        columns = {
            "overall" if key == "reward" else key: column.tolist() if hasattr(column, "tolist") else column
            for key, column in returned.items()
        }
        for key, column in columns.items():
            if _size(column) != num_rows:
                rule = f"must hold {num_rows} values, one per response, got {_size(column)}"
                raise self._bad(f": `{shorten(str(key))}` {rule}")
        return [{key: column[row] for key, column in columns.items()} for row in range(num_rows)]

    def _check_row(self, scores: Any, where: str, num_turns: int | None) -> Scores:
        if isinstance(scores, Real | Decimal) or getattr(scores, "ndim", None) == 0:
            scores = {"overall": scores}
        # Plain strings: another process could not unpickle a user's subclass.
        names = [str.__str__(str(key)) for key in scores] if isinstance(scores, dict) else []
        if "overall" not in names:
            got = f"the keys {shorten(str(sorted(names)))}"
            if not isinstance(scores, dict):
                got = f"{type(scores).__name__} {shorten(repr(scores))}"
            raise self._bad(f" must return a dict with `overall` for each response, got {got} for {where}")
        named = dict(zip(names, scores.values(), strict=True))
        if len(named) < len(names):
            raise self._bad(
                f" must give each score its own name, got {shorten(str(sorted(names)))} for {where}"
            )
        own = sorted(filter(turns.is_reward_of_turn, names))
        if own:
            raise self._bad(
                f" must return the rewards of turns as a list, `overall`, got {shorten(str(own))} for {where}"
            )
        by_turn = _as_list(named["overall"])
        if by_turn is not None:
            named |= self._by_turn(by_turn, num_turns, where)
        return {name: self._as_float(name, value, where) for name, value in named.items()}

    def _by_turn(self, rewards: list[Any], num_turns: int | None, where: str) -> Scores:
        got = f"got {shorten(repr(rewards))} for {where}"
        if num_turns is None:
            rule = "must be a finite number for a response that is not a conversation of turns"
            raise self._bad(f": `overall` {rule}, {got}")
        if len(rewards) != num_turns:
            raise self._bad(
                f": `overall` must hold one number for each turn ({num_turns}, as `num_turns` says), or be a"
                f" number for the whole response, {got}"
            )
        checked = [
            self._as_float(turns.name_of(number), reward, where) for number, reward in enumerate(rewards)
        ]
        return turns.values_of(checked)

    def _as_float(self, key: str, value: Any, where: str) -> float:
        number = turns.nearest_float(value)
        if not abs(number) <= turns.MAX_FLOAT32:
            bound = f" of at most {turns.MAX_FLOAT32:.4g}, as in float32" if math.isfinite(number) else ""
            raise self._bad(
                f": `{shorten(key)}` must be a finite number{bound}, got {shorten(repr(value))} for {where}"
            )
        return number

    def _bad(self, what: str) -> BadScoresError:
        return BadScoresError(f"`{OPTION}` ({self}){what}")


def load_reward_function(
    spec: str, kwargs: dict[str, Any] | None = None, default_type: str = "batch", servers: Specs | None = None
) -> RewardFunction:
    """Import a reward file, `path.py[:function]`, and check that its function can be called with `kwargs`.

    `default_type` is the `REWARD_TYPE` of a file that sets none. `servers` are the models of the run, for
    the function's parameter of that name.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file cannot be imported, has no such function or an unknown `REWARD_TYPE`, or `kwargs`
            do not fit the function.
    """
    kwargs = dict(kwargs or {})
    path, function_name = split_spec(spec)
    module = import_file(path, OPTION, "reward_file", TRACEBACK_HEADING)
    function = find_function(module, path, function_name, OPTION, "compute_score")
    code = getattr(inspect.unwrap(function), "__code__", None)
    line = code.co_firstlineno if code else 0
    where = f"{path}:{line}"
    called, reward_type, note = convention_of(function, module, default_type, f"{where} `{function_name}`")
    if reward_type not in REWARD_TYPES:
        raise ValueError(f"{path}: `REWARD_TYPE` must be one of {list(REWARD_TYPES)}, got {reward_type!r}")
    is_async = inspect.iscoroutinefunction(inspect.unwrap(called))
    if is_async and reward_type == "dataproto":
        what = f"`{function_name}` is `async def`, which `REWARD_TYPE` {reward_type!r} does not call"
        raise ValueError(f'{path}: {what}: set REWARD_TYPE = "sequential" or "batch"')
    if servers:
        if SERVERS not in inspect.signature(function).parameters:
            raise ValueError(
                f"`{SECTION}` has {sorted(servers)}, which {where} `{function_name}` does not take: give it a"
                f" parameter `{SERVERS}`, or remove the section"
            )
        kwargs[SERVERS] = connect(servers)
    _check_kwargs(called, kwargs, where, function_name, reward_type)
    name = str(getattr(module, "REWARD_NAME", path.stem))
    return RewardFunction(called, kwargs, path, function_name, line, name, reward_type, is_async, note)


def split_calls(reward_type: str, groups: Sequence[Hashable], batch_size: int) -> list[list[int]]:
    """Return the indices of the responses in each call; responses of a group are adjacent.

    `batch_size` (`worker.reward.batch_size`) counts the responses of a `batch` call; 0 is a group.
    """
    indices = list(range(len(groups)))
    if reward_type == "dataproto":
        return [indices]
    if reward_type == "sequential":
        batch_size = 1
    if batch_size > 0:
        return [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]
    return [list(group) for _, group in groupby(indices, key=lambda index: groups[index])]


def split_spec(spec: str) -> tuple[Path, str]:
    """Split `path.py[:function]` into an existing file and a function name."""
    path, separator, function_name = spec.rpartition(":")
    if not separator:
        path, function_name = spec, DEFAULT_FUNCTION
    if not function_name.isidentifier():
        raise ValueError(f"`{OPTION}` must be path.py:function, got {spec!r}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"`{OPTION}`: no file {Path(path).absolute()}")
    return Path(path).absolute(), function_name


def _check_kwargs(
    function: Callable[..., Any], kwargs: dict[str, Any], where: str, name: str, reward_type: str
) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(None, **kwargs)
    except TypeError as error:
        if not kwargs:
            argument, what = ARGUMENTS[reward_type]
            if _only_lacks_servers(signature):
                raise ValueError(
                    f"`{SECTION}` must name a model for the parameter `{SERVERS}` of {where} `{name}`:"
                    f" set `{SECTION}.judge.model_path` or `{SECTION}.judge.url`"
                ) from error
            raise ValueError(
                f"`{OPTION}`: {where} `{name}{signature}` must take one argument ({error}): it is called as"
                f" `{name}({argument})`, with {what}; others need a default, or a value in `{KWARGS_OPTION}`"
            ) from error
        raise ValueError(
            f"`{KWARGS_OPTION}` ({kwargs}) must be arguments of {where} `{name}`: {error}; it accepts"
            f" {list(signature.parameters)[1:]}"
        ) from error


def _only_lacks_servers(signature: inspect.Signature) -> bool:
    try:
        signature.bind(None, **{SERVERS: None})
    except TypeError:
        return False
    return True


def _size(values: Any) -> int | str:
    return len(values) if isinstance(values, list | tuple) else type(values).__name__


def _as_list(value: Any) -> list[Any] | None:
    """Return a list, tuple or array of one dimension as a list."""
    if getattr(value, "ndim", None) == 1:  # of numpy or torch
        return value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


def timeout_message(function: str, timeout_s: float, where: str) -> str:
    """Begin the error of a call that did not return in time; a description of its responses follows."""
    limit = f"`worker.reward.timeout_s` ({timeout_s:g} s)"
    return f"reward function {function} did not return within {limit}: {where}\nfor"


def describe(rows: Sequence[int], inputs: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "no response"
    which = f"row {rows[0]}"
    if len(rows) > 1:
        which = f"{len(rows)} responses (rows {min(rows)} to {max(rows)}), the first of which is {which}"
    shown = [f"{key}: {shorten(repr(inputs[0][key]))}" for key in SHOWN_COLUMNS if key in inputs[0]]
    return "\n  ".join([which, *shown])
