# SPDX-License-Identifier: Apache-2.0
"""The order of sampling and training: in turn, and a step ahead; log-probs show the weights that sampled."""

from contextlib import contextmanager
from itertools import islice

import pytest

from tests.trainer.rollouts.sampling import Engine, make_collector, make_config, numbered_prompts, numbers_of
from verl.trainer.metrics import StageTimer
from verl.trainer.rollouts.engines import ENGINES_FILE
from verl.trainer.rollouts.schedule import AHEAD_FILE, InTurn, OneStepAhead

PROMPTS, LAST = 4, 4


class Engines:
    """Engines of their own whose log-probs are minus the version of their weights."""

    def __init__(self):
        self.engine = Engine(lambda number: [0.0, 1.0])
        self.is_broken = False

    @contextmanager
    def awake(self, version, timer):
        self.engine.weights = version
        yield

    def generate(self, prompts, options):
        if self.is_broken:
            raise RuntimeError("the sampling process is gone")
        return self.engine.generate(prompts, options)

    def save_states(self, folder):
        (folder / ENGINES_FILE).write_text(str(len(self.engine.calls)))

    def load_states(self, folder):
        self.restored = int((folder / ENGINES_FILE).read_text())


def start(kind, reward_manager, *, consumed=0, **options):
    config, engines = make_config(prompts=PROMPTS), Engines()
    prompts = islice(numbered_prompts(PROMPTS), consumed, None)
    collector = make_collector(config, engines, reward_manager, prompts)
    return kind(engines, collector, **options), engines


def versions_of(batch):
    """The versions of weights that sampled a batch."""
    log_probs = batch.batch["rollout_log_probs"][batch.batch["response_mask"].bool()]
    return sorted({round(-one) for one in log_probs.tolist()})


def test_in_turn_each_step_is_sampled_by_the_weights_it_begins_with(reward_manager):
    schedule, _ = start(InTurn, reward_manager)

    batches = [schedule.collect(step, StageTimer()).batch for step in (1, 2, 3)]

    assert [versions_of(batch) for batch in batches] == [[0], [1], [2]]
    assert [set(batch.batch["rollout_steps"].tolist()) for batch in batches] == [{1}, {2}, {3}]


def test_a_step_ahead_each_step_is_sampled_by_the_weights_of_the_step_before(reward_manager):
    schedule, engines = start(OneStepAhead, reward_manager, last_step=LAST)

    steps = [schedule.collect(step, StageTimer()) for step in range(1, LAST + 1)]

    assert [versions_of(one.batch) for one in steps] == [[0], [0], [1], [2]]
    assert [one.metrics["async/staleness_mean"] for one in steps] == [0.0, 1.0, 1.0, 1.0]
    assert all(one.metrics[f"async/idle_s_{side}"] >= 0 for one in steps for side in ("sampling", "training"))
    assert [numbers_of(one.batch) for one in steps] == [
        list(range(first, first + PROMPTS)) for first in range(0, LAST * PROMPTS, PROMPTS)
    ]
    assert len(engines.engine.calls) == LAST  # nothing is sampled for a step that never comes


def test_other_prompts_get_the_weights_of_now_and_leave_the_step_ahead_alone(reward_manager):
    schedule, engines = start(OneStepAhead, reward_manager, last_step=LAST)
    schedule.collect(1, StageTimer())

    with schedule.current(1, StageTimer()):
        weights = engines.engine.weights
    ahead = schedule.collect(2, StageTimer())

    assert weights == 1
    assert versions_of(ahead.batch) == [0]


def test_a_resumed_run_trains_on_what_was_sampled_ahead(reward_manager, tmp_path):
    schedule, _ = start(OneStepAhead, reward_manager, last_step=LAST)
    for step in (1, 2):
        schedule.collect(step, StageTimer())
    schedule.settle()
    schedule.save(tmp_path)
    unbroken = [schedule.collect(step, StageTimer()) for step in (3, 4)]

    resumed, engines = start(OneStepAhead, reward_manager, consumed=3, last_step=LAST)
    resumed.load(tmp_path)
    after = [resumed.collect(step, StageTimer()) for step in (3, 4)]

    assert engines.restored == 3
    for one, other in zip(unbroken, after, strict=True):
        assert versions_of(one.batch) == versions_of(other.batch)
        assert numbers_of(one.batch) == numbers_of(other.batch)
        assert str(one.scoring.result()) == str(other.scoring.result())  # with nan
        assert one.batch.batch["responses"].equal(other.batch.batch["responses"])


def test_a_run_in_turn_drops_a_step_that_was_sampled_ahead_with_a_warning(reward_manager, tmp_path, caplog):
    ahead, _ = start(OneStepAhead, reward_manager, last_step=LAST)
    ahead.collect(1, StageTimer())
    ahead.settle()
    ahead.save(tmp_path)
    assert (tmp_path / AHEAD_FILE).exists()

    schedule, _ = start(InTurn, reward_manager)
    schedule.load(tmp_path)

    assert "sampled ahead is dropped" in caplog.text


def test_an_error_of_sampling_is_raised_before_a_checkpoint_is_begun(reward_manager):
    schedule, engines = start(OneStepAhead, reward_manager, last_step=LAST)
    schedule.collect(1, StageTimer())
    schedule.settle()
    engines.is_broken = True
    schedule.collect(2, StageTimer())

    with pytest.raises(RuntimeError, match="the sampling process is gone"):
        schedule.settle()
