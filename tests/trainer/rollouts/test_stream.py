# SPDX-License-Identifier: Apache-2.0
"""Streams and partial rollouts with scripted engines: nothing is lost or too old, and they resume."""

import time
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import pytest
import torch

from tests.trainer.rollouts.sampling import make_collector, make_config, numbered_prompts, numbers_of
from verl.config.trainer import AsyncConfig
from verl.protocol import DataProto
from verl.single_controller.ray.failure import WorkerError
from verl.single_controller.ray.resource_pool import ClusterError
from verl.trainer.metrics import StageTimer
from verl.trainer.rollouts.engine_registry import EngineRegistry
from verl.trainer.rollouts.engines import OwnEngines
from verl.trainer.rollouts.group_stream import PartialRollouts, version_metrics
from verl.trainer.rollouts.sampler import with_uids
from verl.trainer.rollouts.schedule import AHEAD_FILE, InTurn, OneStepAhead
from verl.trainer.rollouts.stream import Stream
from verl.trainer.rollouts.stream_groups import PROMPTS_FILE
from verl.utils.background import in_background
from verl.workers.rollout.interface import INTERRUPTED, FinishedResponse

PROMPTS, N, LAST = 4, 2, 6
BOTH = pytest.mark.parametrize("kind", [Stream, PartialRollouts])
LIMIT = 6  # tokens of a response
COLUMNS = "uid", "raw_prompt_ids"
started = []  # schedules of the test, with their engines


class ScriptedEngine:
    """Writes a token a step with the version of its weights.

    Sample s of prompt k has 1 + (k + s) % 5 tokens.
    """

    def __init__(self, finished, number):
        self.number, self.finished = number, finished  # by all engines
        self.version, self.open, self.error = None, {}, None
        self.loads, self.most_open = [], 0
        self.continued = {}  # token ids that it was given, by uid and sample
        self.is_stuck = False  # after the first token of each response
        self.call_s = 0.001

    def load_weights(self, weights):
        self.fail_if_told()
        self.version = weights.version
        self.loads.append(weights.version)

    def fail_if_told(self):
        if self.error is not None:
            raise self.error

    def rows_to_compare(self):
        return [None]

    def rng_state(self):
        return [len(self.loads)]

    def set_rng_state(self, state):
        self.restored = state

    def generate(self, prompts, options):
        for uid, [number] in zip(*(prompts.non_tensor_batch[key] for key in COLUMNS), strict=True):
            for sample in range(options.n):
                yield [FinishedResponse(uid, sample, [number % 7 + 1], [-float(self.version)], "stop")]
                self.fail_if_told()

    def sample(self, prompts, options, at_most):
        self.fail_if_told()
        if prompts is not None:
            columns = prompts.non_tensor_batch
            for uid, [number], begun in zip(
                columns["uid"], columns["raw_prompt_ids"], columns["begun"], strict=True
            ):
                assert not any((uid, sample) in self.finished for sample in begun)
                for sample, before in begun.items():
                    self.open[uid, sample] = (number, list(before.token_ids), list(before.versions))
                    self.continued[uid, sample] = list(before.token_ids)
        self.most_open = max(self.most_open, len(self.open))
        time.sleep(self.call_s)
        for _ in range(at_most):
            finished = []
            for (uid, sample), (number, tokens, versions) in list(self.open.items()):
                if self.is_stuck and tokens:
                    continue
                tokens.append(number % 7 + 1)
                versions.append(self.version)
                if len(tokens) == 1 + (number + sample) % 5:
                    finished.append(self.response(uid, sample, "stop"))
                    self.finished.add((uid, sample))
                    del self.open[uid, sample]
            if finished:
                return [finished]
        return [[]]

    def interrupt(self):
        begun = [self.response(uid, sample, INTERRUPTED) for uid, sample in self.open]
        self.open.clear()
        return [begun]

    def response(self, uid, sample, reason):
        _, tokens, versions = self.open[uid, sample]
        log_probs = [-float(version) for version in versions]
        return FinishedResponse(uid, sample, list(tokens), log_probs, reason, versions=list(versions))


class Trainer:
    """Stands in for the processes that train: its weights are empty."""

    def publish_weights(self, version):
        return [[]]


class Cluster:
    """Stands in for a cluster on which engines start.

    Attributes:
        free: Engines that it has devices for.
        started: Numbers of the engines that were started.
        is_stuck: Whether they start stuck.
    """

    def __init__(self):
        self.finished, self.free, self.started, self.is_stuck = set(), 0, [], False

    def start(self, number):
        if self.free == 0:
            raise ClusterError("no devices are free")
        self.free -= 1
        self.started.append(number)
        engine = ScriptedEngine(self.finished, number)
        engine.is_stuck = self.is_stuck
        return engine


def make_engines(number, most=None, max_engine_restarts=3):
    cluster = Cluster()
    groups = [ScriptedEngine(cluster.finished, each) for each in range(number)]
    registry = EngineRegistry(
        groups,
        cluster.start,
        lambda: cluster.free,
        num_slots=most or number,
        max_restarts=max_engine_restarts,
    )
    return OwnEngines(Trainer(), registry), cluster


def start(
    reward_manager,
    kind=Stream,
    *,
    engines=2,
    consumed=0,
    at_once=1000,
    algorithm=None,
    trainer=None,
    **options,
):
    config = make_config(prompts=PROMPTS, n=N, algorithm=algorithm, trainer=trainer)
    config = replace(config, data=replace(config.data, max_response_length=LIMIT))
    scripted = engines if isinstance(engines, OwnEngines) else make_engines(engines)[0]
    prompts = islice(numbered_prompts(PROMPTS), consumed, None)
    collector = make_collector(config, scripted, reward_manager, prompts)
    started.append((kind(scripted, collector, AsyncConfig(**options), LAST, at_once), scripted))
    return started[-1]


@pytest.fixture(autouse=True)
def ended():
    """End what the test started: its engines would keep sampling during all later tests."""
    yield
    while started:
        schedule, engines = started.pop()
        for engine in engines.groups.values():
            engine.error = RuntimeError("the test has ended")
        with suppress(Exception):
            schedule.settle()


def versions_of(batch):
    return batch.batch["rollout_versions"][batch.batch["response_mask"].bool()].tolist()


def described(collected):
    return numbers_of(collected.batch), versions_of(collected.batch), str(collected.scoring.result())


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("staleness", [0, 1, 3])
@BOTH
def test_every_prompt_is_trained_once_and_no_token_is_older_than_the_bound(
    reward_manager, kind, engines, staleness
):
    schedule, _ = start(reward_manager, kind, engines=engines, staleness_threshold=staleness)

    steps = [schedule.collect(step, StageTimer()) for step in range(1, LAST + 1)]

    numbers = [number for one in steps for number in numbers_of(one.batch)]
    assert sorted(numbers) == list(range(LAST * PROMPTS))
    for step, one in enumerate(steps, start=1):
        assert len(one.batch) == PROMPTS * N
        assert all(0 <= step - 1 - version <= staleness for version in versions_of(one.batch))
        assert one.metrics["async/staleness_max"] <= staleness
        log_probs = one.batch.batch["rollout_log_probs"][one.batch.batch["response_mask"].bool()]
        assert log_probs.tolist() == [-float(version) for version in versions_of(one.batch)]
    schedule.settle()


@pytest.mark.parametrize(("at_once", "most"), [(1, N), (5, 5), (1000, 2 * PROMPTS * N)])
@BOTH
def test_no_response_waits_in_an_engine_for_a_place(reward_manager, kind, at_once, most):
    schedule, engines = start(reward_manager, kind, engines=1, at_once=at_once, staleness_threshold=1)

    for step in range(1, LAST + 1):
        schedule.collect(step, StageTimer())

    assert engines.groups[0].most_open == most


def test_responses_to_a_prompt_stay_together_with_their_scores(reward_manager):
    schedule, _ = start(reward_manager)

    for step in range(1, LAST + 1):
        collected = schedule.collect(step, StageTimer())
        columns = collected.batch.non_tensor_batch
        assert all(columns["uid"][row] == columns["uid"][row + 1] for row in range(0, PROMPTS * N, N))
        expected = [(int(truth) % 7 + 1) / 10 for truth in columns["ground_truth"]]
        assert collected.scoring.result()["overall"] == expected


@BOTH
def test_an_interruption_for_validation_loses_nothing(reward_manager, kind):
    schedule, engines = start(reward_manager, kind)
    numbers = []
    for step in range(1, LAST + 1):
        numbers += numbers_of(schedule.collect(step, StageTimer()).batch)
        with schedule.current(step, StageTimer()):
            assert not any(group.open for group in engines.groups.values())
            assert [group.version for group in engines.groups.values()] == [step] * 2

    assert sorted(numbers) == list(range(LAST * PROMPTS))


@pytest.mark.parametrize("is_saved", [False, True])
@BOTH
def test_a_deterministic_run_repeats_and_resumes_exactly(reward_manager, kind, tmp_path, is_saved):
    options = {"deterministic": True, "staleness_threshold": 2}
    first, _ = start(reward_manager, kind, **options)
    steps = [described(first.collect(step, StageTimer())) for step in (1, 2)]
    first.settle()
    first.save(tmp_path)
    unbroken = [described(first.collect(step, StageTimer())) for step in range(3, LAST + 1)]

    if is_saved:
        second, _ = start(reward_manager, kind, consumed=num_batches(tmp_path), **options)
        second.load(tmp_path)
        again = []
    else:
        second, _ = start(reward_manager, kind, **options)
        again = [described(second.collect(step, StageTimer())) for step in (1, 2)]
        second.settle()
    again += [described(second.collect(step, StageTimer())) for step in range(3, LAST + 1)]

    assert again == (unbroken if is_saved else steps + unbroken)
    assert any(len(set(versions)) > 1 for _, versions, _ in unbroken)


def num_batches(folder):
    return DataProto.load_from_disk(folder / PROMPTS_FILE).meta_info["num_batches"]


@BOTH
def test_a_run_that_is_not_deterministic_resumes_without_losing_or_repeating_a_prompt(
    reward_manager, kind, tmp_path
):
    first, _ = start(reward_manager, kind, staleness_threshold=2)
    numbers = [number for step in (1, 2) for number in numbers_of(first.collect(step, StageTimer()).batch)]
    first.settle()
    first.save(tmp_path)

    second, _ = start(reward_manager, kind, consumed=num_batches(tmp_path), engines=1, staleness_threshold=2)
    second.load(tmp_path)
    for step in range(3, LAST + 1):
        numbers += numbers_of(second.collect(step, StageTimer()).batch)

    assert sorted(numbers) == list(range(LAST * PROMPTS))


@BOTH
def test_a_run_resumed_with_a_lower_bound_drops_what_is_too_old_with_a_warning(
    reward_manager, kind, tmp_path, caplog
):
    # Each engine begins 6 groups (its share of 3 steps) with the first weights; step 1 leaves at least 2.
    first, _ = start(reward_manager, kind, staleness_threshold=2)
    first.collect(1, StageTimer())
    first.settle()
    first.save(tmp_path)

    second, _ = start(reward_manager, kind, consumed=num_batches(tmp_path), staleness_threshold=0)
    second.load(tmp_path)
    resumed = [second.collect(step, StageTimer()) for step in range(2, LAST + 1)]

    assert "`trainer.async_training.staleness_threshold` (0) is lower" in caplog.text
    assert [collected.metrics["async/staleness_max"] for collected in resumed] == [0.0] * (LAST - 1)
    assert all(len(set(numbers_of(collected.batch))) == PROMPTS for collected in resumed)


def test_a_step_that_can_never_have_its_groups_ends_the_run_with_the_option(reward_manager):
    stream, _ = start(reward_manager, PartialRollouts, max_inflight_prompts=0)

    with pytest.raises(RuntimeError, match=r"step 1 has 0 of 4 groups.*staleness_threshold` \(1\)"):
        stream.collect(1, StageTimer())


def test_a_stream_and_a_run_in_turn_drop_what_the_other_mode_sampled_with_a_warning(
    reward_manager, tmp_path, caplog
):
    stream, engines = start(reward_manager)
    stream.collect(1, StageTimer())
    stream.settle()
    stream.save(tmp_path)
    (tmp_path / AHEAD_FILE).touch()

    InTurn(engines, stream.collector).load(tmp_path)
    stream.load(tmp_path)

    assert caplog.text.count("what was sampled ahead is dropped") == 2
    assert f"['{AHEAD_FILE}', '{PROMPTS_FILE}']" in caplog.text and f"['{AHEAD_FILE}']" in caplog.text


@BOTH
def test_a_filter_leaves_groups_out_and_every_step_is_full(reward_manager, kind):
    # the scores are those of number % 7 + 1 tenths: 0.1 to 0.7
    algorithm = {"online_filtering": True, "filter_key": "overall", "filter_low": 0.15, "filter_high": 0.65}
    schedule, _ = start(reward_manager, kind, algorithm=algorithm)

    steps = [schedule.collect(step, StageTimer()) for step in range(1, LAST + 1)]

    numbers = [number for one in steps for number in numbers_of(one.batch)]
    assert len(numbers) == len(set(numbers)) == LAST * PROMPTS
    assert not {number for number in numbers if number % 7 in (0, 6)}
    assert sum(one.metrics["filter/sampled"] - one.metrics["filter/kept"] for one in steps) > 0


def test_a_filter_that_leaves_out_everything_ends_the_run(reward_manager):
    algorithm = {"online_filtering": True, "filter_key": "overall", "filter_low": 0.8, "filter_high": 0.9}
    schedule, _ = start(reward_manager, algorithm=algorithm, trainer={"max_try_make_batch": 3})

    with pytest.raises(RuntimeError, match=r"a step needs 4 groups, got 0 of 1[2-9].*too hard"):
        schedule.collect(1, StageTimer())


@BOTH
def test_an_error_of_an_engine_reaches_the_step(reward_manager, kind):
    schedule, engines = start(reward_manager, kind, engines=1)
    schedule.collect(1, StageTimer())
    engines.groups[0].error = RuntimeError("the sampling process is gone")

    with pytest.raises(RuntimeError, match="the sampling process is gone"):
        for step in range(2, LAST + 1):
            schedule.collect(step, StageTimer())


def test_partial_rollouts_stop_sampling_once_the_step_has_its_groups(reward_manager):
    schedule, engines = start(reward_manager, PartialRollouts, deterministic=True, staleness_threshold=2)

    steps = [schedule.collect(step, StageTimer()) for step in range(1, LAST + 1)]

    assert not any(group.open for group in engines.groups.values())
    assert any(one.metrics["async/partial_rate"] > 0 for one in steps)
    assert steps[0].metrics["async/in_flight"] > 0  # they continue in the second step
    assert steps[-1].metrics["async/in_flight"] == 0


def test_a_lost_engine_of_partial_rollouts_ends_the_run(reward_manager):
    schedule, engines = start(reward_manager, PartialRollouts, engines=1)
    schedule.collect(1, StageTimer())

    def sample(*_):
        raise WorkerError("rank 0 died", rank=0, phase="gen", died=True)

    engines.groups[0].sample = sample
    with pytest.raises(WorkerError, match="rank 0 died"):
        for step in range(2, LAST + 1):
            schedule.collect(step, StageTimer())
    assert engines.registry.num_restarts == 0


def lost(engine, hung=False):
    """Have the next call of an engine fail as one does whose process is gone or makes no progress."""
    engine.error = WorkerError("rank 0 is gone", rank=0, phase="gen", died=not hung, hung=hung)


def wait_until(is_true):
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end, "it does not come to be true"
        time.sleep(0.001)


def rest_of(schedule, numbers):
    """Train to the end; every prompt is trained once, and no token is too old."""
    steps = []
    for step in range(LAST + 1 - (LAST * PROMPTS - len(numbers)) // PROMPTS, LAST + 1):
        steps.append(schedule.collect(step, StageTimer()))
        numbers += numbers_of(steps[-1].batch)
        assert steps[-1].metrics["async/staleness_max"] <= 2
    assert sorted(numbers) == list(range(LAST * PROMPTS))
    return steps


@pytest.mark.parametrize("hung", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_prompts_of_a_lost_engine_are_sampled_by_the_one_that_takes_its_place(
    reward_manager, hung, deterministic
):
    engines, cluster = make_engines(2, max_engine_restarts=2)
    options = {"staleness_threshold": 2, "deterministic": deterministic}
    schedule, _ = start(reward_manager, engines=engines, **options)
    numbers = numbers_of(schedule.collect(1, StageTimer()).batch)
    cluster.free = 2
    for group in engines.groups.values():
        lost(group, hung)
    numbers += numbers_of(schedule.collect(2, StageTimer()).batch)  # both should load weights, and fail
    wait_until(lambda: {each.number for each in list(engines.groups.values())} == {2, 3})

    steps = rest_of(schedule, numbers)

    assert sorted(cluster.started) == [2, 3]  # their random numbers are those of no other
    assert steps[-1].metrics["async/engine_restarts"] == engines.registry.num_restarts == 2


@pytest.mark.parametrize("restarts", [0, 3], ids=["no restart is left", "no devices are free"])
def test_a_run_continues_with_the_engines_that_are_left(reward_manager, restarts, caplog):
    engines, cluster = make_engines(2, max_engine_restarts=restarts)
    schedule, _ = start(reward_manager, engines=engines, staleness_threshold=2)
    numbers = numbers_of(schedule.collect(1, StageTimer()).batch)
    lost(engines.groups[1])
    numbers += numbers_of(schedule.collect(2, StageTimer()).batch)
    wait_until(lambda: list(engines.groups) == [0])

    steps = rest_of(schedule, numbers)

    assert not cluster.started
    assert (steps[-1].metrics["async/engine_restarts"], steps[-1].metrics["async/engines"]) == (0.0, 1.0)
    assert "rollout engine 1 is lost" in caplog.text


def test_an_engine_continues_the_tokens_that_a_lost_one_had_when_it_was_interrupted(reward_manager):
    engines, _ = make_engines(2)
    one, other = engines.groups.values()
    schedule, _ = start(reward_manager, engines=engines, staleness_threshold=2)
    other.is_stuck = True
    numbers = numbers_of(schedule.collect(1, StageTimer()).batch)
    wait_until(lambda: other.open)
    schedule.settle()
    begun = {}
    for group in schedule.queues[0].sampled_by(1):
        begun |= {(group.uid, sample): before.token_ids for sample, before in group.begun.items()}
    lost(other)

    rest_of(schedule, numbers)

    assert begun and all(len(token_ids) == 1 for token_ids in begun.values())
    assert {key: one.continued[key] for key in begun} == begun


def test_engines_join_while_the_run_continues_up_to_their_number(reward_manager):
    engines, cluster = make_engines(1, most=3)
    schedule, _ = start(reward_manager, engines=engines, staleness_threshold=2, at_once=N)
    numbers = numbers_of(schedule.collect(1, StageTimer()).batch)
    cluster.free, cluster.is_stuck, engines.groups[0].is_stuck = 5, True, True

    second = in_background(lambda: schedule.collect(2, StageTimer()))
    wait_until(lambda: len(engines.groups) == 3 and all(each.most_open for each in engines.groups.values()))
    for engine in engines.groups.values():
        engine.is_stuck = False
    numbers += numbers_of(second.result().batch)
    steps = rest_of(schedule, numbers)

    assert sorted(cluster.started) == [1, 2] and cluster.free == 3
    assert steps[-1].metrics["async/engines"] == 3.0
    assert steps[-1].metrics["async/engine_restarts"] == 0.0


def test_an_engine_joins_at_a_new_place_when_no_restart_is_left_for_a_lost_one(reward_manager):
    engines, cluster = make_engines(2, most=3, max_engine_restarts=0)
    schedule, _ = start(reward_manager, engines=engines, staleness_threshold=2)
    numbers = numbers_of(schedule.collect(1, StageTimer()).batch)
    lost(engines.groups[0])
    numbers += numbers_of(schedule.collect(2, StageTimer()).batch)
    wait_until(lambda: list(engines.groups) == [1])
    cluster.free = 1

    numbers += numbers_of(schedule.collect(3, StageTimer()).batch)
    wait_until(lambda: list(engines.groups) == [1, 2])
    rest_of(schedule, numbers)

    assert engines.registry.num_restarts == 0


def test_an_engine_joins_at_the_place_of_a_lost_one_once_there_are_devices_again(reward_manager):
    engines, cluster = make_engines(2)
    schedule, _ = start(reward_manager, engines=engines, staleness_threshold=2)
    numbers = numbers_of(schedule.collect(1, StageTimer()).batch)
    lost(engines.groups[0])
    for step in (2, 3):
        numbers += numbers_of(schedule.collect(step, StageTimer()).batch)
    wait_until(lambda: list(engines.groups) == [1])
    cluster.free = 1
    numbers += numbers_of(schedule.collect(4, StageTimer()).batch)
    wait_until(lambda: len(engines.groups) == 2)

    steps = rest_of(schedule, numbers)

    assert steps[-1].metrics["async/engines"] == 2.0
    assert steps[-1].metrics["async/engine_restarts"] == 1.0


@pytest.mark.parametrize(("engines", "deterministic"), [(1, False), (2, True)])
def test_the_run_ends_if_no_engine_is_left_for_its_prompts(reward_manager, engines, deterministic):
    engines, _ = make_engines(engines, max_engine_restarts=0)
    schedule, _ = start(reward_manager, engines=engines, deterministic=deterministic)
    schedule.collect(1, StageTimer())
    lost(engines.groups[0])

    with pytest.raises(WorkerError, match="rank 0 is gone"):
        for step in range(2, LAST + 1):
            schedule.collect(step, StageTimer())


def test_ages_are_those_of_sampled_tokens_and_a_step_without_any_has_none():
    masks = {
        "response_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "observation_mask": torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]]),
    }
    versions = torch.tensor([[3, 0, 0, 5], [4, 4, 0, 0]])

    found = version_metrics(DataProto.from_dict({**masks, "rollout_versions": versions}), step=6)
    observed = {**masks, "observation_mask": masks["response_mask"]}
    none = version_metrics(DataProto.from_dict({**observed, "rollout_versions": versions}), step=6)

    # ages 2, 0 and 1, 1; the first response has tokens of versions 3 and 5
    assert found == {"async/staleness_mean": 1.0, "async/staleness_max": 2.0, "async/partial_rate": 0.5}
    assert none == {}


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "one step ahead"])
def test_other_modes_sample_the_prompts_of_a_lost_engine_again_with_the_others(reward_manager, ahead):
    engines, cluster = make_engines(2)
    collector = start(reward_manager, engines=engines)[0].collector
    engines.registry.on_start = lambda: None  # those are of the stream
    schedule = OneStepAhead(engines, collector, LAST) if ahead else InTurn(engines, collector)
    numbers = numbers_of(schedule.collect(1, StageTimer()).batch)
    schedule.settle()
    cluster.free = 1
    lost(engines.groups[0])

    for step in range(2, LAST + 1):
        numbers += numbers_of(schedule.collect(step, StageTimer()).batch)

    assert numbers == list(range(LAST * PROMPTS))
    assert (cluster.started, engines.registry.num_restarts) == ([2], 1)


@pytest.mark.parametrize(("number", "free"), [(1, 1), (2, 0), (2, 1)])
def test_a_validation_whose_engine_is_lost_has_every_response_once(reward_manager, number, free):
    engines, cluster = make_engines(number)
    schedule, _ = start(reward_manager, engines=engines, staleness_threshold=2)
    numbers = numbers_of(schedule.collect(1, StageTimer()).batch)
    cluster.free = free

    with schedule.current(1, StageTimer()):
        lost(engines.groups[0])
        sampler = schedule.collector.sampler
        prompts = with_uids(next(numbered_prompts(5)), "val")
        sequences, _ = sampler.sample(prompts, sampler.options)

    assert numbers_of(sequences) == [0, 1, 2, 3, 4] and len(sequences) == 5 * N
    assert sequences.batch["rollout_log_probs"][:, 0].tolist() == [-1.0] * 5 * N
    numbers += numbers_of(schedule.collect(2, StageTimer()).batch)
    wait_until(lambda: len(engines.groups) == number - 1 + free)
    steps = rest_of(schedule, numbers)
    assert steps[-1].metrics["async/engines"] == number - 1 + free
