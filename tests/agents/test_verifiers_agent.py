# SPDX-License-Identifier: Apache-2.0
"""An environment of `verifiers` runs unmodified on the endpoint, with its own harness, tasks and rewards."""

import os

import pytest

from tests.agents.endpoint.test_server import Leader, reply_to
from tests.agents.test_tool_pool import wait_for
from verl.agents.endpoint.server import MODEL, Endpoint
from verl.agents.harnesses.loading import AGENT
from verl.agents.interface import AgentResult, ToolCall
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig

# A package as the documentation of `verifiers` has it: tasks, a reward, and a harness of several turns that
# runs in the process of the episode.
PACKAGE = """
import verifiers.v1 as vf
from openai import AsyncOpenAI


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def found(self, trace) -> float:
        answers = [message.content for message in trace.branches[-1].messages if message.role == "assistant"]
        return float(answers[-1] == str(self.data.number)) / len(answers)


class GuessTaskset(vf.Taskset[GuessTask]):
    def load(self):
        for number in (3, 5):
            yield GuessTask(GuessData(prompt="Guess.", number=number), self.config.task)


class TellHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(4):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            text = answer.choices[0].message.content
            if text == str(data.number):
                break
            hint = "higher" if int(text) < data.number else "lower"
            messages += [answer.choices[0].message, {"role": "user", "content": hint}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["GuessTaskset", "TellHarness"]
"""


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Run the environment for rows with a policy that counts upwards; returns results and calls."""
    (tmp_path / "guess_numbers.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    kwargs = {
        "environment": "guess-numbers",
        "config": {"agent": {"harness": {"id": "guess-numbers"}, "runtime": {"type": "subprocess"}}},
    }
    options = MultiTurnConfig(enable=True, agent="verifiers", agent_kwargs=kwargs)
    endpoint = Endpoint(None, shows_tools=False)
    leader = Leader(endpoint)

    def count(call):
        turns = sum(one.message["role"] == "assistant" for one in call.request.messages)
        call.answer(reply_to(call.request, str(turns + 2)))

    leader.answer = count
    with ToolPool(options) as pool:

        def run(*rows):
            for number, row in enumerate(rows):
                pool.start(number, row)
                address = {"base_url": endpoint.base_url, "api_key": endpoint.open(number), "model": MODEL}
                pool.submit(number, [ToolCall(AGENT, address)])
            found = {key: observation for key, [observation] in wait_for(pool, len(rows), 120)}
            return [found[number] for number in range(len(rows))], leader.calls

        yield run
    leader.is_running = False
    leader.thread.join()
    endpoint.close()


@pytest.mark.nightly
def test_an_episode_is_led_by_its_own_harness_and_scored_by_its_own_reward(results):
    found, calls = results({"index": 0}, {"index": 1}, {"prompt": "Guess.", "number": 4}, {"index": 7})

    assert [type(one) for one in found[:3]] == [AgentResult] * 3, [one.text for one in found]
    assert [one.reward for one in found[:3]] == [1 / 2, 1 / 4, 1 / 3]  # 2, 3; 2, 3, 4, 5; 2, 3, 4
    assert found[3].failed and "no task 7" in found[3].text
    asked = [call.request.messages[-1].text for call in calls if call.key == 1]
    assert asked == ["Guess.", "higher", "higher", "higher"]
