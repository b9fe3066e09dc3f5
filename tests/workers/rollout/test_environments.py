# SPDX-License-Identifier: Apache-2.0
"""Conversations with an environment on both engines: prompts with images, steps, seeds, failures, ranks."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.families import open_tiny
from tests.helpers.family_training import Row, as_batch, own_forward
from tests.helpers.nightly import by_day
from tests.workers.rollout.contexts import compare_contexts
from tests.workers.rollout.reference import hub_tensors, rollout_config, setup_of
from tests.workers.rollout.test_conversations import SAMPLING, engine, lead, rows_of, rules_with
from verl.agents.parsers.interface import NO_CALLS
from verl.agents.tools.tool_pool import ToolPool
from verl.workers.rollout.engines import build_rollout_engine

__all__ = ["engine"]  # a fixture
pytestmark = pytest.mark.heavy

ENVIRONMENT = '''
import os
import random
import time

from PIL import Image

from verl.agents.interface import Observation


class Env:
    """Shows pictures, and answers each turn after a time of its own."""

    def __init__(self, rounds=3, slow=0.02, log=None, fails_at=None, forgets_after=None):
        self.forgets_after = forgets_after
        self.rounds, self.slow, self.log, self.fails_at, self.round = rounds, slow, log, fails_at, 0

    def reset(self, row):
        self.row, self.random = row, random.Random(row["seed"])
        self.wait()
        if self.fails_at == "reset" or (self.fails_at == "one reset" and row["sample"] == 1):
            raise OSError("no such world")
        if self.fails_at == "own prompt":
            return None
        if self.fails_at == "length":
            return "long " * 1000
        parts = [{"type": "image", "image": self.picture()} for _ in range(self.random.randint(1, 2))]
        name = f"sample {row['sample']} " if self.fails_at == "sample" else ""
        return [{"role": "user", "content": [*parts, {"type": "text", "text": f"{name}of {row['uid']}"}]}]

    def step(self, text, calls):
        assert calls == []
        self.wait()
        self.round += 1
        if self.fails_at == "step":
            raise OSError("broken")
        if self.fails_at == "death":
            os._exit(1)
        done = self.round == self.rounds
        if self.round == self.forgets_after:
            seen = {"type": "image", "image": self.picture()}
            parts = [{"type": "text", "text": f"Round {self.round}."}, seen]
            return Observation(messages=[{"role": "user", "content": parts}], reward=float(self.round))
        return Observation(f"{len(text)} letters", [self.picture()], reward=float(self.round), done=done)

    def picture(self):
        size = self.random.choice([(56, 56), (56, 84), (84, 56)])
        return Image.new("RGB", size, (self.random.randrange(256), 90, 200))

    def wait(self):
        time.sleep(random.SystemRandom().uniform(0, self.slow))

    def close(self):
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{self.row['uid']} {self.row['sample']} after {self.round}\\n")
'''


@pytest.fixture
def make(tiny, tmp_path):
    """Make a pool and the rules of conversations with the environment."""
    path, pools = tmp_path / "env.py", []
    path.write_text(ENVIRONMENT)

    def make(options=None, **kwargs):
        rules = environment_rules(tiny, path, options, **kwargs)
        pools.append(ToolPool(rules.options))
        return pools[-1], rules

    yield make
    for pool in pools:
        pool.close()


def environment_rules(tiny, path, options=None, **kwargs):
    options = {"max_assistant_turns": None, "tool_concurrency": 4} | (options or {})
    rules = rules_with(tiny, NO_CALLS, environment=f"{path}:Env", environment_kwargs=kwargs, **options)
    return replace(rules, max_prompt_tokens=200)


def trained(tiny, rules, responses):
    """Return the rows that training gets."""
    made = []
    for response in responses:
        trajectory = response.trajectory
        own = trajectory.prompt
        prompt, ids = torch.tensor(own.token_ids), torch.tensor(response.token_ids)
        media = {"images": [*own.media["images"], *trajectory.media.get("images", [])], "videos": []}
        positions = tiny.family.positions(
            tiny.config, torch.cat([prompt, ids]), rules.media.loader.measure(media)
        )
        assert torch.equal(own.position_ids, positions[..., : len(prompt)])
        if trajectory.position_ids is not None:
            assert torch.equal(trajectory.position_ids, positions[..., len(prompt) :])
        is_sampled = torch.tensor(trajectory.is_sampled, dtype=torch.int64)
        made.append(Row(len(made), prompt, ids, positions, is_sampled, (None, media)))
    return as_batch(made)


def largest_difference(tiny, rules, responses):
    """Return how far the engine's log-probs are from those of training."""
    with torch.no_grad():
        expected, _ = own_forward(tiny, tiny.model, trained(tiny, rules, responses), rules.media.loader)
    differences = []
    for row, response in enumerate(responses):
        found = torch.tensor(response.log_probs)
        sampled = torch.tensor(response.trajectory.is_sampled)
        differences.append((found - expected[row, : len(found)])[sampled].abs().max().item())
    return max(differences)


def test_log_probs_after_prompts_of_the_environment_are_the_trainers(tiny, engine, make, tmp_path):
    log = tmp_path / "log"
    pool, rules = make(log=str(log))

    responses = lead(engine, pool, rules, rows_of(tiny, 3))
    pool.close()

    assert len({(one.uid, one.sample) for one in responses}) == len(responses) == 6
    assert largest_difference(tiny, rules, responses) < 1e-4
    prompts = {}
    for response in responses:
        turns, own = response.trajectory.turns, response.trajectory.prompt
        prompts.setdefault(response.uid, set()).add(tuple(own.token_ids))
        if response.finish_reason == "stop":
            assert [turn.reward for turn in turns] == [1.0, 2.0, 3.0]
        assert (
            own.text.count("<|image_pad|>") == len(own.media["images"]) and f"of {response.uid}" in own.text
        )
        roles = [message["role"] for message in response.trajectory.messages]
        assert roles == ["user", "assistant"] * len(turns)
    assert {len(found) for found in prompts.values()} == {1}, "the samples of a prompt begin equally"
    assert len(set.union(*prompts.values())) == 3
    closed = sorted(line.partition(" after")[0] for line in log.read_text().splitlines())
    assert closed == sorted(f"row {row} {sample}" for row in range(3) for sample in range(2))


def test_log_probs_of_contexts_that_an_environment_begins_are_the_trainers(tiny, engine, make):
    pool, rules = make({"max_tokens_per_turn": 60}, forgets_after=2)

    responses = lead(engine, pool, rules, rows_of(tiny, 3))

    difference, num_sampled = compare_contexts(tiny, rules.media.loader, responses)
    assert difference < 1e-4 and num_sampled > 50
    trajectories = [response.trajectory for response in responses]
    whole = [one for one in trajectories if len(one.turns) == 3]
    assert whole and all(len(one.context_starts) == 1 for one in whole)
    for one in whole:
        first, second = one.contexts
        assert (first.num_turns, second.num_turns, second.num_images) == (2, 1, 1)
        assert second.messages[0]["content"][0]["text"] == "Round 2." and second.messages == one.messages
        assert [turn.reward for turn in one.turns] == [1.0, 2.0, 3.0]


@pytest.mark.nightly("verl/agents")
def test_with_a_seed_the_order_of_answers_changes_no_conversation(tiny, engine, make):
    rows, sampling = rows_of(tiny, 6), SAMPLING.override({"seed": 5})
    pool, rules = make(slow=0.05)
    slower, _ = make({"tool_concurrency": 1}, slow=0.02)

    first = lead(engine, pool, rules, rows, sampling)
    second = lead(engine, slower, rules, rows[::-1], sampling)
    third = lead(engine, pool, rules, rows[:1], SAMPLING.override({"seed": 6}))

    tokens, again, other = (
        {(one.uid, one.sample): (one.trajectory.prompt.token_ids, one.token_ids) for one in found}
        for found in (first, second, third)
    )
    assert [*tokens] != [*again], "they ended in another order"
    assert tokens == again
    assert len({tuple(response) for _, response in tokens.values()}) == len(tokens) == 12
    assert other["row 0", 0] != tokens["row 0", 0]


def test_prompts_may_differ_between_the_samples_of_a_row(tiny, engine, make):
    pool, rules = make(fails_at="sample")

    responses = lead(engine, pool, rules, rows_of(tiny, 2))

    assert len({tuple(one.trajectory.prompt.token_ids) for one in responses}) == 4
    assert largest_difference(tiny, rules, responses) < 1e-4


def test_none_is_the_prompt_of_the_row(tiny, engine, make):
    pool, rules = make(fails_at="own prompt")
    [row] = rows_of(tiny, 1)

    responses = lead(engine, pool, rules, [row])

    assert all(one.trajectory.prompt is None for one in responses)
    assert all(one.trajectory.messages[:1] == tuple(row["prompt_messages"]) for one in responses)


def test_limits_end_a_conversation_after_its_step(tiny, engine, make):
    options = SAMPLING.override({"n": 1})
    found = {}
    for name, limit in (("assistant", {"max_assistant_turns": 2}), ("user", {"max_user_turns": 1})):
        pool, rules = make({"max_tokens_per_turn": 60, **limit}, rounds=9)
        [found[name]] = lead(engine, pool, rules, rows_of(tiny, 1), options)

    for one in found.values():
        turns = one.trajectory.turns
        assert [turn.reward for turn in turns] == [1.0, 2.0] and one.finish_reason == "length"
        assert turns[-1].stop == len(one.token_ids), "the last observation is not read"


def test_a_prompt_that_is_too_long_names_both_numbers_and_the_environment(tiny, engine, make):
    pool, rules = make(fails_at="length")

    with pytest.raises(ValueError, match=r"environment `.*env.py:Env` has \d{4} tokens, .*length` is 200"):
        lead(engine, pool, rules, rows_of(tiny, 1))

    assert engine.num_unfinished == 0


FAILURES = {"step": "Env failed: OSError: broken", "death": "Env exited with status 1; its state is lost"}


@pytest.mark.parametrize("kind", by_day(FAILURES, "step"))
def test_a_failed_step_is_shown_ends_its_conversation_or_stops_the_run(tiny, engine, make, kind):
    rows, options = rows_of(tiny, 1), SAMPLING.override({"n": 1})
    limits = {"max_assistant_turns": 2}

    (shown,) = lead(engine, *make({**limits, "on_tool_error": "show"}, fails_at=kind), rows, options)
    (ended,) = lead(engine, *make({**limits, "on_tool_error": "end"}, fails_at=kind), rows, options)
    with pytest.raises(
        RuntimeError, match=f"the environment failed.*=stop.* ends the run then: {FAILURES[kind]}"
    ):
        lead(engine, *make({**limits, "on_tool_error": "stop"}, fails_at=kind), rows, options)

    assert len(shown.trajectory.turns) == (1 if kind == "death" else 2) and not shown.trajectory.is_masked
    assert shown.finish_reason == "length"
    assert [one.text for one in shown.trajectory.turns[0].observations] == [FAILURES[kind]]
    assert len(ended.trajectory.turns) == 1 and ended.trajectory.is_masked
    assert engine.num_unfinished == 0


@pytest.mark.parametrize("on_tool_error", by_day(["show", "end"], "end", paths=["verl/agents"]))
def test_a_conversation_that_cannot_begin_does_not_count(tiny, engine, make, on_tool_error):
    pool, rules = make({"on_tool_error": on_tool_error}, fails_at="one reset")

    responses = {one.sample: one for one in lead(engine, pool, rules, rows_of(tiny, 1))}

    failed = responses[1].trajectory
    assert failed.is_masked and not responses[0].trajectory.is_masked
    assert len(responses[1].token_ids) == 1 and failed.prompt is None
    assert failed.plain_turns()[0]["observations"][0]["failed"]
    with pytest.raises(RuntimeError, match=r"ends the run then: Env failed: OSError: no such world"):
        lead(engine, *make({"on_tool_error": "stop"}, fails_at="reset"), rows_of(tiny, 1))


def responses_on_two_ranks(rank, world_size, folder, path):
    tiny = open_tiny(folder)
    engine = build_rollout_engine(rollout_config(tensor_parallel_size=2, max_model_len=600), setup_of(folder))
    engine.sync_weights(hub_tensors(tiny.model))
    rules = environment_rules(tiny, path)
    pool = ToolPool(rules.options) if rank == 0 else None
    responses = lead(engine, pool, rules, rows_of(tiny, 3))
    if pool is not None:
        pool.close()
    difference = largest_difference(tiny, rules, responses)
    engine.close()
    return {(one.uid, one.sample): one.token_ids for one in responses}, difference


@pytest.mark.nightly("verl/workers/conversations")
def test_ranks_of_one_engine_lead_the_same_conversations(tiny, tmp_path):
    path = tmp_path / "env.py"
    path.write_text(ENVIRONMENT)

    (first, error), (second, _) = run_distributed(responses_on_two_ranks, 2, tiny.folder, path)

    assert first == second and len(first) == 6
    assert error < 1e-4
