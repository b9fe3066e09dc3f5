# SPDX-License-Identifier: Apache-2.0
"""Conventions by which a reward function is called: ours, and by their parameters those of TRL and verl."""

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import ModuleType
from typing import Any

# Of the function: the name of its argument, and what that is.
ARGUMENTS = {
    "batch": ("reward_inputs", "a list of dictionaries, one for each response"),
    "sequential": ("reward_input", "the dictionary of one response"),
    "dataproto": ("data", "all responses as columns"),
}
REWARD_TYPES = tuple(ARGUMENTS)
NAMED_TYPES = {  # by the name of the first parameter, in a file without `REWARD_TYPE`
    **dict.fromkeys(("item", "row", "example", "sample", "response", "reward_input"), "sequential"),
    "data": "dataproto",
}
# In TRL the rows decide: those with messages as prompts get messages as completions.
READS_MESSAGES = re.compile(r"""\[\s*-?\d\s*\]\s*(\[|\.get\()\s*["']content["']""")
TEXTS = {"prompts": ("prompt", "user"), "completions": ("response", "assistant")}  # column and role, in TRL

Row = dict[str, Any]


def convention_of(
    function: Callable[..., Any], module: ModuleType, default_type: str, where: str
) -> tuple[Callable[..., Any], str, str | None]:
    """Return what to call, its type, and a note if only the parameters tell how."""
    if (other := adapted(function)) is not None:
        called, reward_type, library = other
        note = f"{where} has the arguments of a reward function for {library}, and is called with them"
        return called, reward_type, note
    if hasattr(module, "REWARD_TYPE"):
        return function, module.REWARD_TYPE, None
    first = next(iter(inspect.signature(function).parameters), "")
    reward_type = NAMED_TYPES.get(first, default_type)
    if reward_type == default_type:
        return function, default_type, None
    note = f'{where} is called with {ARGUMENTS[reward_type][1]}: REWARD_TYPE = "{reward_type}" would say so'
    return function, reward_type, note


def adapted(function: Callable[..., Any]) -> tuple[Callable[..., Any], str, str] | None:
    """Return what to call for a function of another library, its type and the library; None for one of ours.

    Values of verl's that are no numbers are left out of the scores, and TRL's None counts as 0.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    required = {each.name for each in parameters.values() if each.default is each.empty}
    if {"solution_str", "ground_truth"} <= parameters.keys():
        names = None if takes_all else parameters.keys()
        return _called(function, partial(_verl_arguments, names), _verl_scores), "sequential", "verl"
    if "completions" in required and (takes_all or len(required) > 1):
        answers = [
            each.name
            for each in parameters.values()
            if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
        ]
        arguments = partial(_trl_arguments, function, answers, takes_all)
        return _called(function, arguments, _trl_scores), "batch", "TRL"
    return None


def _called(
    function: Callable[..., Any], arguments: Callable[[Any], Row], scores: Callable[[Any], Any]
) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(inspect.unwrap(function)):

        async def call_async(rows: Any, **kwargs: Any) -> Any:
            return scores(await function(**arguments(rows), **kwargs))

        return call_async
    return lambda rows, **kwargs: scores(function(**arguments(rows), **kwargs))


def _verl_arguments(names: Collection[str] | None, row: Row) -> Row:
    truth = row["ground_truth"]
    if isinstance(truth, dict) and "ground_truth" in truth:  # verl's column `reward_model`
        truth = truth["ground_truth"]
    known = {"solution_str": row["response"], "ground_truth": truth}
    known |= {name: row.get(name) for name in ("data_source", "extra_info")}
    return {name: value for name, value in known.items() if names is None or name in names}


def _verl_scores(returned: Any) -> Any:
    if not isinstance(returned, dict) or "score" not in returned:
        return returned
    numbers = {name: value for name, value in returned.items() if hasattr(value, "__float__")}
    return {"overall" if name == "score" else name: value for name, value in numbers.items()}


def _trl_arguments(
    function: Callable[..., Any], answers: Sequence[str], takes_all: bool, rows: Sequence[Row]
) -> Row:
    """Fill the arguments of TRL by columns; one that no row has is the answer."""
    names = {name for row in rows for name in row} - {"prompt", "response"} if takes_all else set()
    columns = {name: [row.get(name) for row in rows] for name in names}
    columns |= {name: [row.get(name, row["ground_truth"]) for row in rows] for name in answers}
    for name, (key, role) in TEXTS.items():
        if takes_all or name in inspect.signature(function).parameters:
            columns[name] = [row[key] for row in rows]
            if READS_MESSAGES.search(_source(function)):
                columns[name] = [[{"role": role, "content": text}] for text in columns[name]]
    return columns


def _trl_scores(returned: Any) -> Any:
    return [0.0 if score is None else score for score in returned]


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # a function of another language, or made at run time
        return ""
