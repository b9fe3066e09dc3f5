# SPDX-License-Identifier: Apache-2.0
"""The tools, the environment and the agent of docs/agents.md can be used as they are written there."""

import re

from tests.agents.endpoint.test_server import Leader, reply_to
from tests.agents.test_environments import begin, step
from tests.architecture.source import ROOT
from verl.agents.endpoint.server import MODEL, Endpoint
from verl.agents.harnesses.loading import AGENT
from verl.agents.interface import ToolCall
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.DOTALL)


def test_the_function_and_the_class_of_the_page_answer_calls(tmp_path):
    path = tmp_path / "tools.py"
    path.write_text("\n".join(BLOCKS))
    options = MultiTurnConfig(enable=True, tools=(f"{path}:exchange", f"{path}:Notes", "calculator"))
    calls = [
        ToolCall("exchange", {"amount": 10.0, "currency": "EUR"}),
        ToolCall("remember", {"text": "first"}),
        ToolCall("remember", {"text": "second"}),
        ToolCall("calculator", {"expression": "2 + 3 * 4"}),
    ]

    with ToolPool(options) as pool:
        pool.start("a", {})
        pool.submit("a", calls)
        finished = []
        while not finished:
            finished = pool.ready(60.0)

    ((_, observations),) = finished
    assert [one.text for one in observations] == ["9.00 EUR", "1 notes", "2 notes", "14"]


def test_the_environment_of_the_page_is_won_by_halving(tmp_path):
    path = tmp_path / "guess.py"
    path.write_text("\n".join(BLOCKS))
    options = MultiTurnConfig(enable=True, environment=f"{path}:Guess", environment_kwargs={"highest": 20})
    low, high, answers = 1, 20, []

    with ToolPool(options) as pool:
        opening = begin(pool)
        while not answers or not answers[-1].done:
            guess = (low + high) // 2
            answers.append(step(pool, f"{guess}"))
            low, high = (guess + 1, high) if answers[-1].text == "Higher." else (low, guess - 1)

    assert opening.messages[0]["content"].startswith("Guess my number from 1 to 20.")
    assert len(answers) <= 5 and answers[-1].reward == 1.0


def test_the_agent_of_the_page_tries_again(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text("\n".join(BLOCKS))
    options = MultiTurnConfig(enable=True, agent=f"{path}:run", agent_kwargs={"tries": 2})
    with ToolPool(options) as pool, Endpoint(None, shows_tools=False) as endpoint:
        leader = Leader(endpoint)
        leader.answer = lambda call: call.answer(
            reply_to(call.request, f"{len(call.request.messages)} it is")
        )
        pool.start("a", {"question": "How many?", "ground_truth": "3"})
        address = {"base_url": endpoint.base_url, "api_key": endpoint.open("a"), "model": MODEL}
        pool.submit("a", [ToolCall(AGENT, address)])
        finished = []
        while not finished:
            finished = pool.ready(60.0)
        leader.is_running = False
        leader.thread.join()

    ((_, [result]),) = finished
    assert result.reward == 0.5 and not result.failed
    assert leader.calls[1].request.messages[-1].text == "That is wrong. Try again."
