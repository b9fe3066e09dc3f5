# SPDX-License-Identifier: Apache-2.0
"""Agents on both engines: the tokens of every call, log-probs, failures and limits."""

from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest

from tests.helpers.conversations import rules_of
from tests.helpers.distributed import run_distributed
from tests.helpers.families import open_tiny
from tests.helpers.family_training import TEMPERATURE
from tests.helpers.nightly import by_day
from tests.workers.rollout.contexts import compare_contexts, contexts_of
from tests.workers.rollout.reference import hub_tensors, rollout_config, setup_of
from verl.agents.endpoint.server import Endpoint
from verl.agents.interface import ToolCall
from verl.agents.media import ConversationMedia
from verl.agents.parsers.interface import CallFormat
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.conversations.agent_driver import AgentDriver
from verl.workers.conversations.agent_leader import AgentLeader
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import SamplingOptions

pytestmark = pytest.mark.heavy

# A program that knows nothing of training: two tools, a retry, a context that it shortens by itself.
AGENT = """
import base64
import io
import json

from openai import OpenAI
from PIL import Image


def function(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


NUMBER = {"type": "integer"}
TOOLS = [function("add", a=NUMBER, b=NUMBER), function("draw", size=NUMBER)]


def add(a, b):
    return str(a + b)


def draw(size):
    file = io.BytesIO()
    Image.new("RGB", (size, 56), (90, 200, 40)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return [{"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {"url": url}}]


def run(row, policy):
    client = OpenAI(max_retries=0)
    messages = [{"role": "user", "content": f"Begin with {row['number']}."}]

    def ask():
        answer = client.chat.completions.create(
            model="gpt-5", messages=messages, tools=TOOLS, temperature=0.2, max_tokens=24
        )
        return answer.choices[0].message

    ask()  # thrown away, and asked again
    for turn in range(4):
        message = ask()
        messages.append(message)
        for call in message.tool_calls or []:
            answer = {"add": add, "draw": draw}[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "Go on."})
        if turn == 2:
            del messages[1:-2]  # forget the past
    return {"reward": 0.5, "turn_rewards": [1.0, 2.0]}
"""
SAMPLING = SamplingOptions(n=2, temperature=TEMPERATURE, max_tokens=60, seed=3)


def sometimes_calls():
    """Return a format in which a turn's text decides its call, since a random model writes none."""

    def parse(text, schemas):
        assert [schema["function"]["name"] for schema in schemas] == ["add", "draw"]
        number = sum(map(ord, text))
        calls = [ToolCall("add", {"a": number, "b": 1}), ToolCall("draw", {"size": 56 + 28 * (number % 3)})]
        return [[], calls[:1], calls[1:]][number % 3]

    return CallFormat(parse, "")


class Recorder:
    """An engine that notes what it was given and what it returned, by uid."""

    def __init__(self, engine):
        self._engine, self.prompts, self.turns = engine, {}, {}
        self.is_aborted = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def submit(self, requests, sampling):
        self.prompts |= {request.uid: request for request in requests}
        self._engine.submit(requests, sampling)

    def step(self, at_most=1):
        finished = self._engine.step(at_most)
        self.turns |= {one.uid: one for one in finished}
        return finished

    def abort(self, uids):
        uids = list(uids)
        self.is_aborted += uids
        self._engine.abort(uids)


@pytest.fixture(scope="module", params=[pytest.param("hf", marks=pytest.mark.slow), "vllm"])
def engine(request, tiny, single_process):
    options = dict(max_model_len=1600, max_num_batched_tokens=1600, multi_turn=MultiTurnConfig(enable=True))
    engine = build_rollout_engine(rollout_config(name=request.param, **options), setup_of(tiny.folder))
    engine.sync_weights(hub_tensors(tiny.model))
    yield engine
    engine.close()


def at_once(driver, rows, sampling):
    return [one for finished in driver.run(rows, sampling) for one in finished]


def with_rests(driver, rows, sampling):
    """Lead conversations that rest again and again while one of another row has the engine."""
    found, other = [], rows[0] | {"uid": "other 0"}
    driver.submit(rows, sampling)
    while len(found) < len(rows) * sampling.n:
        found += driver.step(12)
        if len(found) % 3 == 0 and driver.sampling.engine.num_unfinished:
            driver.interrupt()
            assert driver.sampling.engine.num_unfinished == 0
            if driver.sampling.version == 0:
                assert len(at_once(driver, [other], sampling)) == sampling.n
            driver.sampling.version += 1
            ended = [(one.uid, one.sample) for one in found]
            samples = range(sampling.n)
            left = {row["uid"]: {n: None for n in samples if (row["uid"], n) not in ended} for row in rows}
            driver.submit([row for row in rows if left[row["uid"]]], sampling, left)
    return found


@pytest.fixture
def lead(tiny, engine, tmp_path):
    """Run an agent's source for a number of rows; returns the responses and the recorded engine."""
    closing = []

    def run(source, rows=3, sampling=SAMPLING, max_tokens=1300, form=None, through=at_once, **options):
        path = tmp_path / "agent.py"
        path.write_text(source)
        config = {"agent": f"{path}:run", "tool_timeout_s": 30.0} | options
        rules = rules_with(tiny, form or sometimes_calls(), max_tokens, config)
        leader = leader_of(rules)
        closing.append(leader)
        recorder = Recorder(engine)
        driver = AgentDriver(ContinuedSampling(recorder), leader, rules.media.loader.decode)
        found = through(driver, rows_of(rows), sampling)
        assert engine.num_unfinished == 0
        return found, recorder, rules

    yield run
    for each in closing:
        each.close()


def leader_of(rules):
    pool = ToolPool(rules.options)
    loader = rules.media.loader
    endpoint = Endpoint(loader.on_disk, shows_tools=True, on_call=pool.hold)
    return AgentLeader(pool, endpoint, rules, loader.decode)


def rules_with(tiny, form, max_tokens, options):
    media = ConversationMedia(
        MediaLoader(tiny.processor, MediaOptions(1, 1 << 20)), partial(tiny.family.positions, tiny.config)
    )
    rules = rules_of(max_tokens=max_tokens, tokenizer=tiny.processor.tokenizer, media=media, **options)
    render = rules.renderer.template

    def template(messages, add_generation_prompt, name, tools=()):
        text = render(messages, add_generation_prompt, name)
        # The tiny model's own template shows none.
        return "".join(f"{tool['function']['name']} " for tool in tools) + text

    rules.renderer.template = template
    return replace(rules, format=form, max_prompt_tokens=300)


def rows_of(count):
    row = {"raw_prompt_ids": [5, 6], "prompt_messages": [], "multi_modal_data": None}
    return [row | {"uid": f"row {number}", "number": number} for number in range(count)]


def test_the_tokens_of_every_call_are_those_of_the_engine(tiny, engine, lead):
    responses, recorder, rules = lead(AGENT)

    assert len({(one.uid, one.sample) for one in responses}) == len(responses) == 6
    by_conversation = defaultdict(dict)
    for uid, turn in recorder.turns.items():
        by_conversation[uid.key][uid.number] = turn
    loader = rules.media.loader
    num_images = 0
    for response in responses:
        trajectory, calls = response.trajectory, by_conversation[response.uid, response.sample]
        assert len(calls) == len(trajectory.turns) == 5 and not trajectory.is_masked
        # The call that was thrown away, the conversation, and the shortened one.
        assert len(trajectory.context_starts) == 2
        found = {}
        for number, (start, stop) in enumerate(contexts_of(response)):
            before = trajectory.prompt.token_ids if number == 0 else []
            for turn in trajectory.turns:
                if start <= turn.start < stop:
                    tokens = (*before, *response.token_ids[start : turn.start])
                    found[tokens, tuple(response.token_ids[turn.start : turn.stop])] = turn
        for number, turn in calls.items():
            request = recorder.prompts[(response.uid, response.sample), number]
            shape = loader.shape_of(request.media) if request.media else None
            given = loader.expand(request.prompt_token_ids, shape) if shape else request.prompt_token_ids
            assert found.pop((tuple(given), tuple(turn.token_ids)))
        assert not found
        sampled = [index for turn in trajectory.turns for index in range(turn.start, turn.stop)]
        assert [index for index, is_own in enumerate(trajectory.is_sampled) if is_own] == sorted(sampled)
        num_images += len(trajectory.media.get("images", ()))
        assert sorted(turn.reward or 0 for turn in trajectory.turns) == [0, 0, 0.5, 1.0, 2.0]
    assert num_images > 2
    lengths = {len(turn.token_ids) for turn in recorder.turns.values()}
    assert len(lengths) > 3


def test_log_probs_of_each_context_are_the_trainers(tiny, engine, lead):
    responses, _, rules = lead(AGENT)

    difference, num_sampled = compare_contexts(tiny, rules.media.loader, responses)

    assert difference < 1e-4 and num_sampled > 100


@pytest.mark.nightly("verl/agents")
def test_calls_continue_after_rests_with_the_tokens_that_they_had(tiny, engine, lead):
    responses, _, rules = lead(AGENT, through=with_rests)

    difference, num_sampled = compare_contexts(tiny, rules.media.loader, responses)
    assert difference < 1e-4 and num_sampled > 100
    assert len({(one.uid, one.sample) for one in responses}) == len(responses) == 6
    several = 0
    for response in responses:
        trajectory = response.trajectory
        assert len(trajectory.turns) == 5 and not trajectory.is_masked
        # The shortened context, unless its answer happens to be the one that was thrown away, and its own.
        assert len(trajectory.context_starts) in (1, 2)
        assert len(response.versions) == len(response.token_ids)
        for turn in trajectory.turns:
            versions = response.versions[turn.start : turn.stop]
            assert versions == sorted(versions)
            several += len(set(versions)) > 1
    assert several > 0, "no turn was interrupted"


FAULTS = """
import os
import signal
import threading
import time

from openai import APIError, APITimeoutError, AuthenticationError, BadRequestError, OpenAI

QUESTION = [{"role": "user", "content": "Well?"}]


def ask(client, **options):
    return client.chat.completions.create(model="gpt", messages=QUESTION, **options)


def run(row, policy):
    client = OpenAI(max_retries=0)
    faults = ["none", "raises", "dies", "leaves", "calls nothing", "bad reward", "asks too much", "hangs"]
    fault = faults[row["number"]]
    if fault == "calls nothing":
        return 1.0
    ask(client, max_tokens=2)
    if fault == "raises":
        raise OSError("no such file")
    if fault == "hangs":
        time.sleep(600)
    if fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "leaves":
        try:
            ask(client, timeout=0.001)
        except APITimeoutError:
            ask(client, max_tokens=2)
    if fault == "bad reward":
        return "good"
    if fault == "asks too much":
        for refused in ({"n": 3}, {"stop": ["x"]}):
            try:
                ask(client, **refused)
            except BadRequestError as error:
                assert error.param == list(refused)[0]
        try:
            OpenAI(api_key="sk-other", max_retries=0).models.list()
        except AuthenticationError:
            return 3.0
    return 1.0
"""


def by_row(responses):
    return {int(one.uid.split()[1]): one for one in responses}


@pytest.mark.parametrize("faults", by_day([7, 8], paths=["verl/agents"]))  # the last one hangs
def test_each_fault_costs_its_own_conversation_only(tiny, engine, lead, faults):
    one = SAMPLING.override({"n": 1})
    responses, _, _ = lead(FAULTS, faults, one, tool_timeout_s=15.0, on_tool_error="end")

    found = by_row(responses)
    none, raises, dies, leaves, nothing, bad, asks, *hangs = (found[number] for number in range(faults))
    assert len(responses) == faults
    assert [one.trajectory.is_masked for one in found.values()].count(True) == faults - 3
    for fine, reward in ((none, 1.0), (leaves, 1.0), (asks, 3.0)):
        assert not fine.trajectory.is_masked and fine.trajectory.turns[-1].reward == reward
    for failed, text in (
        (raises, "OSError: no such file"),
        (dies, "was killed by SIGKILL"),
        (bad, "a reward that is no finite number in float32: 'good'"),
        *((one, "neither returned nor had a turn of the policy within 15 s") for one in hangs),
    ):
        assert failed.trajectory.is_masked and len(failed.trajectory.turns) == 1
        observation = failed.trajectory.turns[0].observations[-1]
        assert observation.failed and text in observation.text
    [turn] = nothing.trajectory.turns  # stands for the one that is missing
    assert nothing.trajectory.is_masked and [one.text for one in turn.observations] == [
        "the agent returned without a turn of the policy"
    ]
    assert nothing.trajectory.is_sampled == [False] and nothing.trajectory.prompt is None
    # The call that its agent did not wait for left no token, unless the engine was faster.
    assert len(leaves.trajectory.turns) in (2, 3)


ODD_TURN = """
from openai import OpenAI

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def run(row, policy):
    ask = OpenAI(max_retries=0).chat.completions.create
    question = [{"role": "user", "content": "Well?"}]
    ask(model="gpt", messages=question, max_tokens=2)
    if row["number"] == 0:
        ask(model="gpt", messages=question, tools=[TOOL])  # to its end, else it is not read
    return 1.0
"""


@pytest.mark.nightly("verl/agents")
def test_a_turn_that_no_reader_can_read_ends_its_agent_with_the_reason(tiny, engine, lead):
    def parse(text, schemas):
        raise RecursionError("too deep")

    one, form = SAMPLING.override({"n": 1}), CallFormat(parse, "")

    responses, _, _ = lead(ODD_TURN, 2, one, form=form, on_tool_error="end")

    bad, good = (by_row(responses)[number].trajectory for number in range(2))
    assert (len(good.turns), good.is_masked, good.turns[-1].reward) == (1, False, 1.0)
    assert (len(bad.turns), bad.is_masked) == (1, True)  # the turn that was read
    assert "RecursionError('too deep')" in bad.turns[-1].observations[-1].text


@pytest.mark.slow
def test_shown_faults_count_with_their_turns_and_stopping_ones_end_the_run(tiny, engine, lead):
    one = SAMPLING.override({"n": 1})
    responses, _, _ = lead(FAULTS, 2, one, on_tool_error="show")
    assert not any(each.trajectory.is_masked for each in responses)
    assert by_row(responses)[1].trajectory.turns[0].observations[0].failed

    with pytest.raises(RuntimeError, match=r"on_tool_error=stop` ends the run then: .*no such file"):
        lead(FAULTS, 2, one, on_tool_error="stop")
    assert engine.num_unfinished == 0


LONG = """
from openai import BadRequestError, OpenAI


def run(row, policy):
    client, messages, refused = OpenAI(max_retries=0), [{"role": "user", "content": "Count."}], None
    while refused is None:
        try:
            answer = client.chat.completions.create(model="gpt", messages=messages)
        except BadRequestError as error:
            refused = error.code
        else:
            messages += [answer.choices[0].message, {"role": "user", "content": "Further."}]
    return {"context_length_exceeded": 1.0, "max_assistant_turns": 2.0}[refused]
"""


@pytest.mark.slow
def test_calls_without_room_or_turns_are_refused(tiny, engine, lead):
    one = SAMPLING.override({"n": 1})
    (full,), _, _ = lead(LONG, 1, one, max_tokens=150)
    (turns,), _, _ = lead(LONG, 1, one, max_assistant_turns=3, max_tokens_per_turn=5)
    (prompt,), _, _ = lead(LONG.replace("Count.", "Count. " * 200), 1, one)

    assert full.trajectory.turns[-1].reward == 1.0 and full.finish_reason == "length"
    assert 100 < len(full.token_ids) <= 150
    assert turns.trajectory.turns[-1].reward == 2.0 and len(turns.trajectory.turns) == 3
    assert all(turn.stop - turn.start <= 5 for turn in turns.trajectory.turns)
    assert prompt.trajectory.is_masked and prompt.trajectory.turns[0].observations[0].failed


@pytest.mark.slow
def test_the_seconds_of_a_conversation_are_limited_and_what_it_has_counts(tiny, engine, lead):
    source = FAULTS.replace("time.sleep(600)", "[ask(client, max_tokens=1) for _ in range(10**6)]")
    source = source.replace('"dies", ', '"hangs", ', 1)  # the third row
    one = SAMPLING.override({"n": 1})

    responses, _, _ = lead(source, 3, one, max_tokens=100_000, max_seconds=8.0)

    found = by_row(responses)
    assert len(found[2].trajectory.turns) > 5 and not found[2].trajectory.is_masked
    assert [found[number].trajectory.stop_reason for number in range(3)] == ["stop", "stop", "seconds"]
    assert found[2].finish_reason == "length"


PARALLEL = """
import asyncio

from openai import AsyncOpenAI


async def run(row, policy):
    client = AsyncOpenAI()
    messages = [{"role": "user", "content": "Well?"}]
    create = client.chat.completions.create
    answers = await asyncio.gather(*[create(model="gpt", messages=messages, max_tokens=4) for _ in range(6)])
    answered = answers[2].choices[0].message.model_dump()
    mine = await policy.generate([*messages, answered, messages[0]], max_tokens=4)
    assert mine.message["role"] == "assistant" and mine.token_ids
    return 1.0
"""


@pytest.mark.nightly("verl/agents", "verl/workers/conversations")
def test_calls_at_once_are_contexts_of_their_own(tiny, engine, lead):
    responses, _, _ = lead(PARALLEL, 2)
    narrow, _, _ = lead(PARALLEL, 2, max_tokens=6 * 80)

    for one in (*responses, *narrow):
        assert len(one.trajectory.turns) == 7 and len(one.trajectory.context_starts) == 5
        assert one.trajectory.turns[-1].reward == 1.0 or any(turn.reward for turn in one.trajectory.turns)


def turns_on_two_ranks(rank, world_size, folder, path):
    tiny = open_tiny(folder)
    engine = build_rollout_engine(
        rollout_config(tensor_parallel_size=2, max_model_len=1600), setup_of(folder)
    )
    engine.sync_weights(hub_tensors(tiny.model))
    recorder = Recorder(engine)
    rules = rules_with(tiny, sometimes_calls(), 1300, {"agent": f"{path}:run", "tool_timeout_s": 60.0})
    leader = leader_of(rules) if rank == 0 else None
    driver = AgentDriver(ContinuedSampling(recorder), leader, rules.media.loader.decode)
    found = [one for finished in driver.run(rows_of(3), SAMPLING) for one in finished]
    assert engine.num_unfinished == 0
    driver.close()
    engine.close()
    turns = {uid: one.token_ids for uid, one in recorder.turns.items()}
    return turns, {(one.uid, one.sample): one.token_ids for one in found}


@pytest.mark.slow  # two more engines; test_environments.py has them in every suite
def test_ranks_of_one_engine_sample_the_same_calls(tiny, tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(AGENT)

    (turns, responses), others = run_distributed(turns_on_two_ranks, 2, tiny.folder, path)

    assert (turns, responses) == others
    assert len(responses) == 6 and len(turns) == 30
