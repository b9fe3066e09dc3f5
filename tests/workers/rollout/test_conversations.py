# SPDX-License-Identifier: Apache-2.0
"""Conversations on both engines: their tokens and log-probs, the pace of each, limits, failures, ranks."""

import itertools
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.helpers.conversations import rules_of
from tests.helpers.distributed import run_distributed
from tests.helpers.families import open_tiny
from tests.helpers.family_training import TEMPERATURE, Row, as_batch, own_forward
from tests.workers.rollout.reference import change_weights, hub_tensors, rollout_config, setup_of
from verl.agents.interface import ToolCall
from verl.agents.media import ConversationMedia
from verl.agents.parsers.interface import CallFormat
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.conversations.driver import ConversationDriver
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import RolloutRequest, SamplingOptions

pytestmark = pytest.mark.heavy

TOOLS = '''
import time
from PIL import Image

def look(number: int) -> Image.Image:
    """Show a picture.

    Args:
        number: Which one.
    """
    time.sleep(0.02 * (number % 3))
    if number == 13:
        raise OSError("no such picture")
    if number == 14:
        return Image.new("RGB", (1, 1000))  # too narrow for the model
    return Image.new("RGB", (56, 84 if number % 2 else 56), (40 * number % 256, 90, 200))
'''
LOOK = {"name": "look", "parameters": {"properties": {"number": {"type": "integer"}}}}
SAMPLING = SamplingOptions(n=2, temperature=TEMPERATURE, max_tokens=60)


def always_calls():
    """Return a format in which every turn calls `look`, since a random model writes no calls."""
    numbers = itertools.count()
    return CallFormat(lambda text, schemas: [ToolCall("look", {"number": next(numbers) % 12})], "")


def rules_with(tiny, form, max_tokens=400, **options):
    media = ConversationMedia(
        MediaLoader(tiny.processor, MediaOptions(1, 1 << 20)), partial(tiny.family.positions, tiny.config)
    )
    options = {"max_assistant_turns": 3, "schemas": [{"function": LOOK}]} | options
    rules = rules_of(max_tokens=max_tokens, tokenizer=tiny.processor.tokenizer, media=media, **options)
    return replace(rules, format=form)


def rows_of(tiny, count):
    messages = [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}]
    text = tiny.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tiny.processor.tokenizer.encode(text, add_special_tokens=False)
    row = {"raw_prompt_ids": ids, "prompt_messages": messages, "multi_modal_data": None}
    return [row | {"uid": f"row {number}"} for number in range(count)]


def lead(engine, pool, rules, rows, sampling=SAMPLING):
    driver = ConversationDriver(ContinuedSampling(engine), pool, rules, rules.media.loader.decode)
    found = [response for finished in driver.run(rows, sampling) for response in finished]
    assert engine.num_unfinished == 0
    return found


def trained(tiny, rules, rows, responses):
    """Return the rows that training gets."""
    prompts = {row["uid"]: torch.tensor(row["raw_prompt_ids"]) for row in rows}
    made = []
    for response in responses:
        prompt, trajectory = prompts[response.uid], response.trajectory
        ids = torch.tensor(response.token_ids)
        shape = rules.media.loader.measure(trajectory.media)
        positions = tiny.family.positions(tiny.config, torch.cat([prompt, ids]), shape)
        if trajectory.position_ids is not None:
            assert torch.equal(trajectory.position_ids, positions[..., len(prompt) :])
        is_sampled = torch.tensor(trajectory.is_sampled, dtype=torch.int64)
        made.append(Row(len(made), prompt, ids, positions, is_sampled, (None, trajectory.media)))
    return as_batch(made)


@pytest.fixture(scope="module", params=[pytest.param("hf", marks=pytest.mark.slow), "vllm"])
def engine(request, tiny, single_process):
    # fewer tokens at once than the prompts of a test have
    options = dict(max_model_len=600, max_num_batched_tokens=600, multi_turn=MultiTurnConfig(enable=True))
    engine = build_rollout_engine(rollout_config(name=request.param, **options), setup_of(tiny.folder))
    engine.sync_weights(hub_tensors(tiny.model))
    yield engine
    engine.close()


@pytest.fixture
def pool(tmp_path):
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    options = MultiTurnConfig(enable=True, tools=(f"{path}:look",), tool_concurrency=4)
    with ToolPool(options) as pool:
        yield pool


def test_a_later_part_of_a_prompts_conversations_has_random_numbers_of_its_own(tiny, engine, pool):
    rules, rows = rules_with(tiny, always_calls(), max_assistant_turns=1), rows_of(tiny, 1)

    def tokens(n, first_sample):
        sampling = replace(SAMPLING, seed=7, n=n, first_sample=first_sample)
        found = sorted(lead(engine, pool, rules, rows, sampling), key=lambda one: one.sample)
        assert [one.sample for one in found] == list(range(n))
        return [tuple(one.token_ids) for one in found]

    first, later = tokens(2, 0), tokens(2, 2)

    assert len({*first, *later}) == 4
    assert tokens(1, 3) == later[1:]


def test_log_probs_of_three_turns_with_images_between_them_are_the_trainers(tiny, engine, pool):
    rules, rows = rules_with(tiny, always_calls()), rows_of(tiny, 3)

    responses = lead(engine, pool, rules, rows)

    assert len({(one.uid, one.sample) for one in responses}) == len(responses) == 6
    assert {len(one.trajectory.turns) for one in responses} == {3}
    assert all(len(one.trajectory.media["images"]) == 2 for one in responses)
    batch = trained(tiny, rules, rows, responses)
    with torch.no_grad():
        expected, _ = own_forward(tiny, tiny.model, batch, rules.media.loader)
    for row, response in enumerate(responses):
        found = torch.tensor(response.log_probs)
        assert not found[~torch.tensor(response.trajectory.is_sampled)].any()
        assert (found - expected[row, : len(found)]).abs().max() < 1e-4


def test_without_calls_conversations_are_the_responses_of_one_turn_bit_for_bit(tiny, engine, pool):
    rules, rows = rules_with(tiny, CallFormat(lambda text, schemas: [], "")), rows_of(tiny, 4)
    sampling = SAMPLING.override({"max_tokens": 30})
    requests = [RolloutRequest(row["uid"], row["raw_prompt_ids"]) for row in rows]
    state = engine.rng_state()
    alone = {(one.uid, one.sample): one for part in engine.generate(requests, sampling) for one in part}
    engine.set_rng_state(state)

    responses = lead(engine, pool, replace(rules, max_tokens=30), rows, sampling)

    for one in responses:
        expected = alone[one.uid, one.sample]
        assert (one.token_ids, one.log_probs) == (expected.token_ids, expected.log_probs)
        assert one.finish_reason == expected.finish_reason


def test_a_failed_call_is_shown_ends_its_conversation_or_stops_the_run(tiny, engine, pool):
    rows, options = rows_of(tiny, 1), SAMPLING.override({"n": 1})
    fails = CallFormat(lambda text, schemas: [ToolCall("look", {"number": 13})], "")

    (shown,) = lead(engine, pool, rules_with(tiny, fails, on_tool_error="show"), rows, options)
    (ended,) = lead(engine, pool, rules_with(tiny, fails, on_tool_error="end"), rows, options)
    with pytest.raises(RuntimeError, match=r"on_tool_error=stop.* ends the run then: .*no such picture"):
        lead(engine, pool, rules_with(tiny, fails, on_tool_error="stop"), rows, options)

    assert len(shown.trajectory.turns) == 3 and not shown.trajectory.is_masked
    assert all(turn.observations[0].failed for turn in shown.trajectory.turns[:2])
    assert len(ended.trajectory.turns) == 1 and ended.trajectory.is_masked
    assert engine.num_unfinished == 0  # of the run that was stopped too


def test_a_picture_that_the_model_cannot_read_is_a_failed_call(tiny, engine, pool):
    rows, options = rows_of(tiny, 1), SAMPLING.override({"n": 1})
    narrow = CallFormat(lambda text, schemas: [ToolCall("look", {"number": 14})], "")

    (shown,) = lead(engine, pool, rules_with(tiny, narrow, on_tool_error="show"), rows, options)
    (ended,) = lead(engine, pool, rules_with(tiny, narrow, on_tool_error="end"), rows, options)
    with pytest.raises(RuntimeError, match=r"on_tool_error=stop.* ends the run then: .*Error: "):
        lead(engine, pool, rules_with(tiny, narrow, on_tool_error="stop"), rows, options)

    assert len(shown.trajectory.turns) == 3 and shown.trajectory.turns[0].observations[0].failed
    assert len(ended.trajectory.turns) == 1 and ended.trajectory.is_masked
    assert engine.num_unfinished == 0


def calls_what_it_says():
    """Return a format in which every turn calls `look` with a number that depends on its text only."""
    return CallFormat(lambda text, schemas: [ToolCall("look", {"number": sum(map(ord, text)) % 12})], "")


@pytest.mark.nightly("verl/workers/conversations", "verl/agents")
def test_with_a_seed_the_order_of_answers_changes_no_conversation(tiny, engine, pool, tmp_path):
    rules, rows = rules_with(tiny, calls_what_it_says()), rows_of(tiny, 8)
    sampling = SAMPLING.override({"seed": 5, "n": 4})

    first = lead(engine, pool, rules, rows, sampling)
    options = MultiTurnConfig(enable=True, tools=(f"{tmp_path / 'tools.py'}:look",), tool_concurrency=1)
    with ToolPool(options) as slower:
        second = lead(engine, slower, rules, rows[::-1], sampling)

    tokens, again = ({(one.uid, one.sample): one.token_ids for one in found} for found in (first, second))
    assert [*tokens] != [*again], "they ended in another order"
    assert tokens == again
    assert len(set(map(tuple, tokens.values()))) == len(tokens) == 32


def models_of(tiny):
    """Return the weights of versions 0, 1 and 2."""
    models = [tiny.model]
    for seed in (1, 2):
        models.append(deepcopy(models[-1]))
        change_weights(models[-1], seed)
    return models


def load(sampling, models, version):
    with sampling.interrupted(version):
        sampling.engine.sync_weights(hub_tensors(models[version]))
        sampling.engine.wake()


def lead_through_changes(tiny, engine, pool, models, options=SAMPLING):
    """Lead conversations that get new weights twice, and wait twice while others have the engine."""
    sampling, rules, rows = ContinuedSampling(engine), rules_with(tiny, always_calls()), rows_of(tiny, 4)
    driver = ConversationDriver(sampling, pool, rules, rules.media.loader.decode)
    sampling.version = 0
    found, others = [], [row | {"uid": f"other {number}"} for number, row in enumerate(rows_of(tiny, 2))]
    driver.submit(rows[:3], options)
    for version in (1, 2):
        for _ in range(2):
            found += driver.step(2)
        load(sampling, models, version)
        found += driver.step(3)
        driver.interrupt()
        assert engine.num_unfinished == 0
        between = [one for part in driver.run(others, options.override({"n": 1})) for one in part]
        assert {one.uid for one in between} == {"other 0", "other 1"}
        ended = [(one.uid, one.sample) for one in found]
        left = {
            row["uid"]: {sample: None for sample in range(2) if (row["uid"], sample) not in ended}
            for row in rows[: 2 + version]
        }
        driver.submit([row for row in rows if left.get(row["uid"])], options, left)
    while len(found) < 8:
        found += driver.step(16)
    assert engine.num_unfinished == 0
    load(sampling, models, 0)
    return rules, rows, found


def difference_by_version(tiny, rules, rows, models, responses):
    """Between each sampled token's log-prob and that of the weights of its version, after all before it."""
    batch = trained(tiny, rules, rows, responses)
    with torch.no_grad():
        each = [own_forward(tiny, model, batch, rules.media.loader)[0] for model in models]
    by_version, differences = torch.stack(each), []  # (V, B, R)
    for row, response in enumerate(responses):
        is_sampled = torch.tensor(response.trajectory.is_sampled)
        found, versions = torch.tensor(response.log_probs), torch.tensor(response.versions)
        assert not versions[~is_sampled].any() and not found[~is_sampled].any()
        expected = by_version[versions, row, range(len(versions))]
        differences.append((found - expected)[is_sampled].abs().max())
    return max(differences).item()


def test_each_turn_has_the_log_probs_of_the_weights_that_sampled_it_through_changes_and_rests(
    tiny, engine, pool
):
    models = models_of(tiny)

    rules, rows, responses = lead_through_changes(tiny, engine, pool, models)

    assert len({(one.uid, one.sample) for one in responses}) == len(responses) == 8
    assert {len(one.trajectory.turns) for one in responses} == {3}
    assert all(len(one.trajectory.media["images"]) == 2 for one in responses)
    assert {version for one in responses for version in one.versions} == {0, 1, 2}
    assert any(
        len(set(one.versions[turn.start : turn.stop])) > 1
        for one in responses
        for turn in one.trajectory.turns
    )
    assert difference_by_version(tiny, rules, rows, models, responses) < 1e-4


def test_a_forgotten_conversation_begins_anew_and_others_of_its_prompt_do_not(tiny, engine, pool):
    sampling, rules = ContinuedSampling(engine), rules_with(tiny, always_calls())
    driver = ConversationDriver(sampling, pool, rules, rules.media.loader.decode)
    rows = rows_of(tiny, 2)
    driver.submit(rows, SAMPLING)
    driver.step(6)
    driver.interrupt()

    driver.forget()
    sampling.version = 7
    driver.submit(rows[:1], SAMPLING, {"row 0": {1: None}})
    found = []
    while not found:
        found += driver.step(16)

    assert [(one.uid, one.sample) for one in found] == [("row 0", 1)]
    (response,) = found
    sampled = [
        version for version, own in zip(response.versions, response.trajectory.is_sampled, strict=True) if own
    ]
    assert set(sampled) == {7} and len(response.trajectory.turns) == 3
    assert engine.num_unfinished == 0


@pytest.mark.nightly("verl/workers/conversations", "verl/agents")
def test_in_lockstep_the_times_of_tools_do_not_decide_when_weights_change(tiny, engine, tmp_path):
    models, found = models_of(tiny), []
    for scale in (0.02, 0.002):
        path = tmp_path / f"tools_{scale}.py"
        path.write_text(TOOLS.replace("0.02", str(scale)))
        sampling, rules = ContinuedSampling(engine), rules_with(tiny, calls_what_it_says())
        options = MultiTurnConfig(enable=True, tools=(f"{path}:look",), tool_concurrency=4)
        with ToolPool(options) as pool:
            driver = ConversationDriver(sampling, pool, rules, rules.media.loader.decode, in_lockstep=True)
            driver.submit(rows_of(tiny, 4), SAMPLING.override({"seed": 5}))
            ended = driver.step(8)
            load(sampling, models, 1)
            while len(ended) < 8:
                ended += driver.step(16)
        load(sampling, models, 0)
        found.append([(one.uid, one.sample, one.token_ids, one.log_probs, one.versions) for one in ended])

    assert found[0] == found[1]
    assert {0, 1} == {version for *_, versions in found[0] for version in versions}


def responses_on_two_ranks(rank, world_size, folder, path):
    tiny = open_tiny(folder)
    engine = build_rollout_engine(rollout_config(tensor_parallel_size=2, max_model_len=600), setup_of(folder))
    engine.sync_weights(hub_tensors(tiny.model))
    options = MultiTurnConfig(enable=True, tools=(f"{path}:look",), tool_concurrency=4)
    pool = ToolPool(options) if rank == 0 else None
    rules, rows = rules_with(tiny, always_calls()), rows_of(tiny, 3)
    responses = lead(engine, pool, rules, rows)
    models = models_of(tiny)
    continued = lead_through_changes(tiny, engine, pool, models)
    error = difference_by_version(tiny, *continued[:2], models, continued[2])
    if pool is not None:
        pool.close()
    with torch.no_grad():
        expected, _ = own_forward(tiny, tiny.model, trained(tiny, rules, rows, responses), rules.media.loader)
    differences = [
        (torch.tensor(one.log_probs) - expected[row, : len(one.log_probs)]).abs().max().item()
        for row, one in enumerate(responses)
    ]
    engine.close()
    tokens = {(one.uid, one.sample): one.token_ids for one in responses}
    return tokens, [(one.uid, one.sample, one.token_ids) for one in continued[2]], max(*differences, error)


@pytest.mark.slow  # two more engines; test_environments.py has them in every suite
def test_ranks_of_one_engine_lead_the_same_conversations(tiny, tmp_path):
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)

    (first, continued, error), (second, again, _) = run_distributed(
        responses_on_two_ranks, 2, tiny.folder, path
    )

    assert first == second and len(first) == 6
    assert continued == again and len(continued) == 8
    assert error < 1e-4
