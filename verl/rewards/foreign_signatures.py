# SPDX-License-Identifier: Apache-2.0
"""Recognize reward functions written for TRL or verl, and write a function that calls them as they expect."""

import inspect
import re
from collections.abc import Callable
from typing import Any

VERL_ARGUMENTS = {
    "data_source": 'row.get("data_source")',
    "solution_str": 'row["response"]',
    "ground_truth": "truth",
    "extra_info": 'row.get("extra_info")',
}
VERL = """\
REWARD_TYPE = "sequential"


{define} {name}(row, **kwargs):
    truth = row["ground_truth"]
    if isinstance(truth, dict) and "ground_truth" in truth:  # verl's column `reward_model`
        truth = truth["ground_truth"]
    result = {call}(
        {arguments},
        **kwargs,
    )
    values = result if isinstance(result, dict) else {{"score": result}}
    numbers = {{name: float(value) for name, value in values.items() if hasattr(value, "__float__")}}
    return {{"overall": numbers.pop("score"), **numbers}}
"""
TRL = """\
REWARD_TYPE = "batch"


def {name}(reward_inputs, **kwargs):
    names = {names}
    columns = {{name: [row.get(name) for row in reward_inputs] for name in names}}
    {columns}
    scores = {call}
    return [{{"overall": float(score or 0)}} for score in scores]  # None counts as 0
"""
ALL_COLUMNS = '{name for row in reward_inputs for name in row} - {"prompt", "response"}'
# In TRL the rows decide: those with messages as prompts get messages as completions.
READS_MESSAGES = re.compile(r"""\[\s*-?\d\s*\]\s*(\[|\.get\()\s*["']content["']""")


def wrapper_for(function: Callable[..., Any], name: str) -> tuple[str, str, str] | None:
    """Return the library that a function was written for, the name of a wrapper, and its code."""
    signature = inspect.signature(function)
    takes_all = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    required = {each.name for each in signature.parameters.values() if each.default is each.empty}
    is_async, wrapper = inspect.iscoroutinefunction(function), f"{name}_here"
    if {"solution_str", "ground_truth"} <= signature.parameters.keys():
        taken = {
            key: value for key, value in VERL_ARGUMENTS.items() if takes_all or key in signature.parameters
        }
        code = VERL.format(
            name=wrapper,
            define="async def" if is_async else "def",
            call=f"await {name}" if is_async else name,
            arguments=",\n        ".join(f"{key}={value}" for key, value in taken.items()),
        )
        return "verl", wrapper, code
    if "completions" in required and (takes_all or len(required) > 1):
        call = f"{name}(**columns, **kwargs)"
        code = TRL.format(
            name=wrapper,
            names=ALL_COLUMNS if takes_all else "()",
            columns="\n    ".join(_trl_columns(function, signature, takes_all)),
            call=f"asyncio.run({call})" if is_async else call,
        )
        return "TRL", wrapper, f"import asyncio\n\n{code}" if is_async else code
    return None


def _trl_columns(function: Callable[..., Any], signature: inspect.Signature, takes_all: bool) -> list[str]:
    """Write the lines that fill the arguments of TRL and those of the row's answer."""
    texts = {"prompts": 'row["prompt"]', "completions": 'row["response"]'}
    if READS_MESSAGES.search(_source(function)):
        roles = {"prompts": "user", "completions": "assistant"}
        texts = {key: f'[{{"role": "{roles[key]}", "content": {text}}}]' for key, text in texts.items()}
    filled = {key: text for key, text in texts.items() if takes_all or key in signature.parameters}
    for each in signature.parameters.values():
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD and each.name not in texts:
            filled[each.name] = f'row.get("{each.name}", row["ground_truth"])'
    return [f'columns["{key}"] = [{text} for row in reward_inputs]' for key, text in filled.items()]


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # a function of another language, or made at run time
        return ""
