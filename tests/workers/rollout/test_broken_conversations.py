# SPDX-License-Identifier: Apache-2.0
"""Errors that no rule foresees, while a conversation is led: it ends, and the engine continues."""

from dataclasses import replace

from tests.helpers.conversations import ADD, CALL, PROMPT, encode, rules_of, template_of
from verl.agents.interface import Observation
from verl.agents.parsers.interface import CallFormat
from verl.agents.parsers.registry import CALL_FORMATS
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.conversations.driver import ConversationDriver
from verl.workers.conversations.keys import Key
from verl.workers.rollout.interface import FinishedResponse, SamplingOptions


class ScriptedEngine:
    """Samples given turns; its first rank, which another process has, sends given answers to their calls."""

    def __init__(self, rules, turns, answers):
        self.rules, self.turns, self.answers = rules, turns, answers  # both by row
        self.open, self.arrived = [], []

    @property
    def num_unfinished(self):
        return len(self.open)

    def submit(self, requests, sampling):
        self.open += [request.uid for request in requests]

    def step(self, at_most):
        finished, self.open = [self._turn(uid) for uid in self.open], []
        return finished

    def _turn(self, uid):
        row = uid.uid if isinstance(uid, Key) else uid
        tokens = encode(self.rules, self.turns[row].pop(0) + "<|im_end|>")
        if self.turns[row] and row in self.answers:
            self.arrived.append((Key(row, 0), [self.answers[row]]))
        return FinishedResponse(uid, 0, tokens, [-1.0] * len(tokens), "stop")

    def agree(self, value):
        arrived, self.arrived = (self.arrived, []) if self.arrived else ([], [])
        return arrived, value[1]

    def abort(self, uids):
        pass


def rows_of(rules, names):
    text = template_of(rules.tokenizer)(PROMPT, True, "the prompt")
    row = {"raw_prompt_ids": encode(rules, text), "prompt_messages": PROMPT, "multi_modal_data": None}
    return [row | {"uid": name} for name in names]


def lead(rules, turns, answers=()):
    """Lead a conversation for each row; returns the responses by row."""
    engine = ScriptedEngine(rules, {name: list(texts) for name, texts in turns.items()}, dict(answers))
    driver = ConversationDriver(ContinuedSampling(engine), None, rules, lambda media: None)
    return {
        one.uid: one for found in driver.run(rows_of(rules, turns), SamplingOptions(n=1)) for one in found
    }


def test_a_turn_that_no_reader_can_read_ends_its_conversation_masked_with_the_reason():
    def parse(text, schemas):
        if "odd" in text:
            raise RecursionError("too deep")
        return CALL_FORMATS["hermes"].parse(text, schemas)

    rules = replace(rules_of(), format=CallFormat(parse, ""))

    found = lead(rules, {"bad": ["An odd turn"], "good": ["Five"]})

    bad, good = found["bad"].trajectory, found["good"].trajectory
    assert (good.stop_reason, good.is_masked) == ("stop", False)
    assert (bad.stop_reason, bad.is_masked) == ("tool", True)
    assert found["bad"].token_ids == encode(rules, "An odd turn<|im_end|>") and all(bad.is_sampled)
    [turn] = bad.turns
    [reason] = turn.observations
    assert reason.failed and "RecursionError('too deep')" in reason.text


def test_an_answer_that_no_reader_can_read_ends_its_conversation_masked_with_the_reason():
    rules = rules_of(schemas=[{"type": "function", "function": ADD}])
    answers = {"bad": Observation(text=5), "good": Observation("5")}  # `text` is not one

    found = lead(rules, {"bad": [CALL, "never"], "good": [CALL, "Five"]}, answers)

    bad, good = found["bad"].trajectory, found["good"].trajectory
    assert (good.stop_reason, good.is_masked, len(good.turns)) == ("stop", False, 2)
    assert (bad.stop_reason, bad.is_masked, len(bad.turns)) == ("tool", True, 1)
    assert bad.turns[0].observations[0].failed
    assert found["bad"].token_ids == encode(rules, CALL + "<|im_end|>")


class ReadyPool:
    """Tools that have answered when they are asked."""

    def __init__(self):
        self.called = []

    def start(self, key, row):
        pass

    def submit(self, key, calls):
        self.called.append(key)

    def ready(self, timeout_s):
        called, self.called = self.called, []
        return [(key, [Observation("5")]) for key in called]

    def end(self, key):
        pass


class FirstRank(ScriptedEngine):
    """Makes no step while a call is not answered."""

    def step(self, at_most):
        assert not self.pool.called
        return super().step(at_most)

    def agree(self, value):
        return value


def test_in_lockstep_an_answer_follows_its_turn_before_the_next_step_of_the_engine():
    rules, pool = rules_of(schemas=[{"type": "function", "function": ADD}]), ReadyPool()
    engine = FirstRank(rules, {"calls": [CALL, "Five"], "talks": ["Four"]}, {})
    engine.pool = pool
    sampling = ContinuedSampling(engine)
    driver = ConversationDriver(sampling, pool, rules, lambda media: None, in_lockstep=True)
    driver.submit(rows_of(rules, engine.turns), SamplingOptions(n=1))

    first, second = driver.step(8), driver.step(8)

    assert [one.uid for one in (*first, *second)] == ["talks", "calls"]
    assert len(second[0].trajectory.turns) == 2
