# SPDX-License-Identifier: Apache-2.0
"""The order of a step and of a validation with models that sleep while others have the devices."""

from contextlib import contextmanager

import pytest

from tests.trainer.rollouts.sampling import REWARD, Engine, make_collector, make_config, numbered_prompts
from verl.config.reward_servers import RewardServerConfig
from verl.config.worker import RewardConfig
from verl.rewards.manager import RewardManager
from verl.trainer.metrics import StageTimer
from verl.trainer.reward_servers.servers import RewardServers
from verl.trainer.rollouts.schedule import InTurn
from verl.trainer.validation import Validator


class Engines(Engine):
    """An engine that records when it wakes and sleeps."""

    def __init__(self, events):
        super().__init__(lambda number: [0.2, 0.8])
        self.events = events

    @contextmanager
    def awake(self, version, timer):
        self.events.append("engine wakes")
        yield
        self.events.append("engine sleeps")


class Model:
    """A served model that records when it wakes and sleeps, and what was scored meanwhile."""

    def __init__(self, events, calls):
        self.events, self.calls = events, calls

    def wake(self):
        assert not self.calls.exists(), "nothing is scored before"
        self.events.append("model wakes")

    def sleep(self):
        self.events.append(f"model sleeps after {len(self.calls.read_text())} calls")
        self.calls.unlink()

    def close(self):
        """Nothing is open."""


@pytest.fixture
def events():
    return []


@pytest.fixture
def manager(reward_file, events, tmp_path):
    """A reward function that notes its calls, with a model that shares the devices."""
    calls = tmp_path / "calls"
    path = reward_file(REWARD.replace("tokens = [", f"open({str(calls)!r}, 'a').write('x'); tokens = [", 1))
    configs = {"judge": RewardServerConfig(model_path="owner/judge")}
    with RewardServers(configs, "cpu", tmp_path, num_devices=1) as servers:
        servers.models["judge"] = Model(events, calls)
        assert servers.share_devices
        with RewardManager(RewardConfig(reward_function=path), awake=servers.awake) as manager:
            yield manager


def test_a_step_samples_then_scores_and_is_done_with_both_before_it_trains(events, manager):
    engines = Engines(events)
    schedule = InTurn(engines, make_collector(make_config(prompts=4, n=2), engines, manager))
    timer = StageTimer()

    collected = schedule.collect(1, timer)
    values = collected.scoring.result()

    assert events == ["engine wakes", "engine sleeps", "model wakes", "model sleeps after 8 calls"]
    assert sorted(values["overall"]) == [0.2] * 4 + [0.8] * 4
    assert timer.seconds["reward"] > 0


def test_several_calls_of_the_engine_are_scored_in_one_turn(events, manager):
    engines = Engines(events)
    config = make_config(prompts=4, n=2, call=2)
    InTurn(engines, make_collector(config, engines, manager)).collect(1, StageTimer())

    assert events == ["engine wakes", "engine sleeps", "model wakes", "model sleeps after 8 calls"]


def test_a_validation_scores_after_it_has_sampled(events, manager):
    engines, config = Engines(events), make_config(n=2)
    schedule = InTurn(engines, make_collector(config, engines, manager))
    prompts = [next(numbered_prompts(3))]
    validator = Validator(schedule.collector.sampler, None, prompts, config.worker, 1, 0)

    with schedule.current(1, StageTimer()):
        validator.sample(1)
    metrics = validator.measure()

    assert events == ["engine wakes", "engine sleeps", "model wakes", "model sleeps after 3 calls"]
    assert metrics["val/overall_reward"] == pytest.approx(0.2)
