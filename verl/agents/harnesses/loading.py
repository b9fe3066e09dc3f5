# SPDX-License-Identifier: Apache-2.0
"""Load the agent named in a config, a function of a file or a shipped one, as a member of the pool.

async def run(row, policy, **agent_kwargs):
    reply = await policy.generate([{"role": "user", "content": row["question"]}])
    return float(reply.text == row["answer"])
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from verl.agents.harnesses.policy import AsyncPolicy, Policy
from verl.agents.interface import AgentResult, Observation
from verl.agents.tools.answers import BadAnswerError, plain_reward
from verl.agents.tools.loading import LoadedTool, find_named
from verl.config.multi_turn import MultiTurnConfig

OPTION = "worker.rollout.multi_turn.agent"
AGENT = "agent"  # its name in the pool
NO_PROXY = ("NO_PROXY", "no_proxy")
RESULT = ("reward", "turn_rewards")
# What packages import at their first call: a third of a second in the process of each conversation.
LAZY_PARTS = {"openai": ("openai.resources.chat", "httpcore")}


def load_agents(options: MultiTurnConfig) -> list[LoadedTool]:
    """Import the agent of a config; none if it has none.

    Raises:
        ValueError: The file cannot be imported, or has no such function.
    """
    if options.agent is None:
        return []
    function, path, _ = find_named(options.agent, OPTION, {})
    return [LoadedTool(AGENT, [], path, True, partial(AgentRunner, function, options.agent_kwargs), AGENT)]


class AgentRunner:
    """Runs an agent in its process; the state of a conversation is its row."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self.function, self.kwargs = function, dict(kwargs)
        for package in LAZY_PARTS.keys() & sys.modules.keys():  # that the agent's file imports
            for part in LAZY_PARTS[package]:
                importlib.import_module(part)

    def create(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return row

    def __call__(self, row: Mapping[str, Any], **address: str) -> Any:
        """Run the agent; `address` are the fields of its `Policy`."""
        is_async = inspect.iscoroutinefunction(inspect.unwrap(self.function))
        policy = (AsyncPolicy if is_async else Policy)(**address)
        os.environ |= {"OPENAI_BASE_URL": policy.base_url, "OPENAI_API_KEY": policy.api_key}
        for name in NO_PROXY:  # the endpoint is on this machine
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
        returned = self.function(row, policy, **self.kwargs)
        return _awaited(returned) if inspect.isawaitable(returned) else as_result(returned)


async def _awaited(returned: Any) -> AgentResult:
    return as_result(await returned)


def as_result(returned: Any) -> AgentResult:
    """Read what an agent returned: None, a reward, or a dictionary with `reward` and `turn_rewards`.

    Raises:
        BadAnswerError: It is none of these.
    """
    if returned is None:
        return AgentResult()
    if isinstance(returned, Observation):
        return AgentResult(reward=plain_reward(returned.reward))
    if isinstance(returned, Mapping):
        if unknown := set(returned) - set(RESULT):
            raise BadAnswerError(f"a dictionary with {sorted(unknown, key=str)}; it may have {RESULT}")
        rewards = returned.get("turn_rewards") or ()
        if isinstance(rewards, str | bytes | Mapping) or not hasattr(rewards, "__iter__"):
            raise BadAnswerError(f"`turn_rewards` that are no list: {rewards!r:.100}")
        turn_rewards = tuple(map(plain_reward, rewards))
        return AgentResult(reward=plain_reward(returned.get("reward")), turn_rewards=turn_rewards)
    return AgentResult(reward=plain_reward(returned))
