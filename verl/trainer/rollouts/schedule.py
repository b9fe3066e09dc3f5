# SPDX-License-Identifier: Apache-2.0
"""Schedules of sampling and training: in turn, or sampling a step ahead.

`step` counts from 1; the weights of version v are those after v steps, so that step s is on policy with
version s - 1.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from verl.protocol import DataProto
from verl.trainer.metrics import Metrics, StageTimer
from verl.trainer.rollouts.collector import Collected, RolloutCollector
from verl.trainer.rollouts.engines import Engines
from verl.trainer.rollouts.scores import ScoredGroups, Scoring
from verl.trainer.rollouts.stream_groups import PROMPTS_FILE
from verl.utils.background import in_background
from verl.utils.rank_logger import get_logger

AHEAD_FILE = "sampled_ahead.pt"  # only if the next step's sequences are there already
METRICS = "sampling_metrics"  # entry of that file

logger = get_logger(__name__)


class Schedule(ABC):
    """When the sequences of each step are sampled, and by which weights."""

    def __init__(self, engines: Engines, collector: RolloutCollector) -> None:
        self.engines, self.collector = engines, collector

    @abstractmethod
    def collect(self, step: int, timer: StageTimer) -> Collected:
        """Return the sequences of a step, which are sampled now or were before."""

    def current(self, version: int, timer: StageTimer) -> AbstractContextManager[None]:
        """Keep the engines free for other prompts inside the block, at weights `version`."""
        return self.engines.awake(version, timer)

    def settle(self) -> None:  # noqa: B027 - steps in turn sample nothing between calls
        """Wait until nothing is being sampled; raise the error that ended it."""

    def save(self, folder: Path) -> None:
        """Write what the next steps have already; call `settle` before."""
        self.engines.save_states(folder)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.engines.load_states(folder)


class InTurn(Schedule):
    """Each step samples, then trains."""

    def collect(self, step: int, timer: StageTimer) -> Collected:
        with self.engines.awake(step - 1, timer):
            collected = self.collector.collect(step)
        reward = self.collector.sampler.reward
        if not reward.waits:
            return collected
        with timer("reward"), reward.awake():  # between sampling and training, for which its models sleep
            values = collected.scoring.result()
        return collected._replace(scoring=Scoring(lambda: values))

    def load(self, folder: Path) -> None:
        super().load(folder)
        warn_of_dropped(folder, AHEAD_FILE, PROMPTS_FILE)


class OneStepAhead(Schedule):
    """Each step but the last samples for the next one while it trains, with its weights at the beginning."""

    def __init__(self, engines: Engines, collector: RolloutCollector, last_step: int) -> None:
        super().__init__(engines, collector)
        self.last_step = last_step
        self._sampling: Future[Sampled] | None = None  # for the next step
        self._idle_since: float | None = None  # the engines; None while they sample
        self._idle_s = 0.0  # since the step before

    def collect(self, step: int, timer: StageTimer) -> Collected:
        if self._sampling is None:  # the first step
            with self.engines.awake(step - 1, timer):
                self._begin(step, weights_of=step)
        start = time.monotonic()
        self.settle()
        metrics = {"async/idle_s_training": time.monotonic() - start}
        assert self._sampling is not None, "sampling has begun"
        sampled, self._sampling = self._sampling.result(), None
        if step < self.last_step:
            with self.engines.awake(step - 1, timer):
                self._begin(step + 1, weights_of=step)
        metrics["async/idle_s_sampling"], self._idle_s = self._idle_s, 0.0
        groups = sampled.groups
        metrics |= sampled.metrics | staleness_metrics(groups.sequences, step)
        return Collected(groups.sequences, Scoring(lambda: groups.values), metrics)

    @contextmanager
    def current(self, version: int, timer: StageTimer) -> Iterator[None]:
        self.settle()
        with self.engines.awake(version, timer):
            self._end_idle()
            yield
        self._idle_since = time.monotonic()

    def settle(self) -> None:
        if self._sampling is not None:
            ended = self._sampling.result().ended
            self._idle_since = self._idle_since or ended

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self._sampling is not None:
            sampled = self._sampling.result()
            sampled.groups.save(folder / AHEAD_FILE, **{METRICS: sampled.metrics})

    def load(self, folder: Path) -> None:
        super().load(folder)
        warn_of_dropped(folder, PROMPTS_FILE)
        path = folder / AHEAD_FILE
        if not path.exists():
            return
        groups = ScoredGroups.load(path)
        self.collector.check_fits(groups, "or delete the checkpoint's " + AHEAD_FILE + " to drop them")
        self._sampling = Future()
        metrics = groups.sequences.meta_info.pop(METRICS)
        self._sampling.set_result(Sampled(groups, metrics, time.monotonic()))

    def _begin(self, step: int, weights_of: int) -> None:
        self._end_idle()
        self._sampling = in_background(lambda: self._sample(step, weights_of))

    def _sample(self, step: int, weights_of: int) -> "Sampled":
        batch, scoring, metrics = self.collector.collect(step, weights_of)
        # Scored here, because the reward function has one caller at a time.
        groups = ScoredGroups(batch, scoring.result(), self.collector.group_size)
        groups.check_storable()
        return Sampled(groups, metrics, time.monotonic())

    def _end_idle(self) -> None:
        if self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None


class Sampled(NamedTuple):
    """The sequences of a step with their scores, and when the last of them came."""

    groups: ScoredGroups
    metrics: Metrics
    ended: float  # of the monotonic clock


def staleness_metrics(batch: DataProto, step: int) -> Metrics:
    """Number of updates between the weights that sampled and those at the start of the step."""
    staleness = (step - batch.batch["rollout_steps"]).float()  # (B,)
    return {"async/staleness_mean": staleness.mean().item(), "async/staleness_max": staleness.max().item()}


def warn_of_dropped(folder: Path, *names: str) -> None:
    """Warn that a checkpoint holds prompts of another mode, which this run does not continue."""
    found = [name for name in names if (folder / name).exists()]
    if found:
        logger.warning("what was sampled ahead is dropped, `trainer.async_training.mode` differs: %s", found)
