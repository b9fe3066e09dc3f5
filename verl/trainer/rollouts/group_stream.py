# SPDX-License-Identifier: Apache-2.0
"""Sampling without waiting for the slowest response: steps train on the groups that are finished.

Each engine has a thread that gives it prompts, takes finished responses and has it load new weights between
two of its steps; unfinished responses continue with these. `StreamPlan` decides who begins what, and which
groups a step has.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from verl.config.trainer import AsyncConfig
from verl.planning.stream_plan import NO_WEIGHTS, StreamPlan, fitting_groups
from verl.protocol import DataProto
from verl.single_controller.ray.published_weights import PublishedWeights
from verl.trainer.metrics import Metrics, StageTimer, sampled_mask
from verl.trainer.rollouts.collector import Collected, RolloutCollector
from verl.trainer.rollouts.engines import Engines
from verl.trainer.rollouts.schedule import AHEAD_FILE, Schedule, warn_of_dropped
from verl.trainer.rollouts.scores import ScoredGroups, Scoring
from verl.trainer.rollouts.stream_groups import (
    GROUPS_FILE,
    PROMPTS_FILE,
    GroupQueue,
    OpenGroup,
    PromptSource,
    load_queues,
    save_queues,
)
from verl.utils.background import in_background
from verl.utils.rank_logger import get_logger
from verl.workers.rollout.interface import FinishedResponse

STEPS = 16  # of an engine at once, unless a response is finished before

logger = get_logger(__name__)


class GroupStream(Schedule):
    """Steps train on the oldest finished groups, whose age has a bound; unfinished ones continue.

    `Stream` and `PartialRollouts` say what the engines do while the model trains. Each samples `at_once`
    responses at once, and none for a step after `last_step`.
    """

    def __init__(
        self, engines: Engines, collector: RolloutCollector, config: AsyncConfig, last_step: int, at_once: int
    ) -> None:
        super().__init__(engines, collector)
        self.at_once, self.is_deterministic = at_once, config.deterministic
        numbers = list(range(len(engines.groups)))
        parts = [[number] for number in numbers] if config.deterministic else [numbers]
        self.queues = [
            GroupQueue(
                StreamPlan(
                    groups_per_step=collector.quota.target // len(parts),
                    max_staleness=config.staleness_threshold,
                    last_step=last_step,
                    num_engines=len(part),
                    max_in_flight=config.max_inflight_prompts,
                ),
                part,
            )
            for part in parts
        ]
        self.source = PromptSource(collector.prompts, self.queues)
        self._changed = threading.Condition()  # guards everything below, the queues and the source
        self._weights: PublishedWeights | None = None  # the newest
        self._is_resting = True  # the threads have ended, or are about to
        self._threads: list[Future[None]] = []
        self._num_scoring = 0  # groups
        self._error: BaseException | None = None
        self._sampled: list[tuple[Tensor, bool]] = []  # since the last step: scores (1, n), whether kept
        self._idle_s = 0.0  # since the last step, mean of all engines

    @contextmanager
    def current(self, version: int, timer: StageTimer) -> Iterator[None]:
        self.settle()
        with self.engines.awake(version, timer):
            self._note_loaded(version)
            yield

    def settle(self) -> None:
        self._rest()
        with self._changed:
            self._wait_for(lambda: self._num_scoring == 0)

    def save(self, folder: Path) -> None:
        if self.is_deterministic and self.collector.sampler.converses:
            for engine in self.engines.groups.values():
                engine.forget()  # as a resumed run does
        super().save(folder)
        for groups in self._finished():
            groups.check_storable()
        save_queues(self.queues, self.source.num_batches, folder)

    def load(self, folder: Path) -> None:
        super().load(folder)
        warn_of_dropped(folder, AHEAD_FILE)
        if not (folder / PROMPTS_FILE).exists():
            return
        self.source.num_batches = load_queues(self.queues, folder)
        for groups in self._finished():
            self.collector.check_fits(groups, f"or delete the checkpoint's {PROMPTS_FILE} and {GROUPS_FILE}")

    def _finished(self) -> Iterator[ScoredGroups]:
        return chain.from_iterable(queue.finished.values() for queue in self.queues)

    def _note_loaded(self, version: int) -> None:
        """Record that all engines have the weights of a version."""
        with self._changed:
            for queue in self.queues:
                queue.plan.publish(version)
                for slot in queue.plan.loaded:
                    queue.plan.load(slot)

    def _start(self, step: int) -> None:
        with self._changed:
            if not self._is_resting:
                return
            self._is_resting = False
            for queue in self.queues:
                queue.plan.steps = step - 1  # a resumed run begins with a later step
                if num_late := queue.drop_late():
                    logger.warning(
                        "groups sampled ahead are dropped, `trainer.async_training.staleness_threshold` (%d)"
                        " is lower than when they were begun: groups=%d",
                        queue.plan.max_staleness,
                        num_late,
                    )
                for slot in queue.plan.loaded:
                    self._threads.append(in_background(partial(self._drive, queue, slot)))

    def _rest(self) -> None:
        """Interrupt all responses; they continue in the next step."""
        with self._changed:
            self._is_resting = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.result()
        self._threads = []

    def _drive(self, queue: GroupQueue, slot: int) -> None:
        """Keep the engine at this slot of its queue at work until the stream rests."""
        with self._keeping_error():
            self._keep_at_work(queue, slot)

    def _keep_at_work(self, queue: GroupQueue, slot: int) -> None:
        engine, options = self.engines.groups[queue.engines[slot]], self.collector.sampler.options
        while (work := self._next_work(queue, slot)) is not None:
            weights, groups = work
            if weights is not None:
                engine.load_weights(weights)
            columns = self.collector.sampler.columns
            requests = [group.request(self.collector.group_size, columns) for group in groups]
            prompts = DataProto.concat(requests) if requests else None
            self._take(queue, engine.sample(prompts, options, STEPS)[0])
        self._keep_begun(queue, slot, engine.interrupt()[0])

    def _next_work(
        self, queue: GroupQueue, slot: int
    ) -> tuple[PublishedWeights | None, list[OpenGroup]] | None:
        """Wait for weights to load and groups to begin or continue; None if the stream is to rest."""
        plan = queue.plan
        with self._changed:
            while True:
                if self._error is not None or (self._is_resting and not self.is_deterministic):
                    return None
                weights = self._weights if self._may_load(queue, slot) else None
                if weights is not None:
                    plan.load(slot)
                    self._changed.notify_all()
                groups = self._groups(queue, slot) if self._may_sample(queue) else []
                if weights is not None or groups or (self._may_sample(queue) and plan.num_sampling(slot)):
                    return weights, groups
                if self._is_resting:  # at a point that does not depend on time
                    return None
                start = time.monotonic()
                self._changed.wait()
                self._idle_s += (time.monotonic() - start) / len(self.engines.groups)

    def _may_load(self, queue: GroupQueue, slot: int) -> bool:
        plan = queue.plan
        if not plan.is_outdated(slot) or not self.is_deterministic:
            return plan.is_outdated(slot)
        has_work = plan.num_sampling(slot) > 0 or plan.room(slot) > 0
        return is_due(queue) or not (plan.is_ready or has_work)

    def _may_sample(self, queue: GroupQueue) -> bool:
        return not self.is_deterministic or not (queue.plan.is_ready or is_due(queue))

    def _groups(self, queue: GroupQueue, slot: int) -> list[OpenGroup]:
        """Return groups of lost engines and new ones, as many as the engine has room for."""
        size = self.collector.group_size
        num_open = sum(size - len(group.finished) for group in queue.sampled_by(slot))
        fitting = fitting_groups(num_open, size, self.at_once)
        fitting -= queue.plan.adopt(slot, fitting)
        for _ in range(min(queue.plan.room(slot), fitting)):
            opened = OpenGroup(queue.plan.begin(slot), self.source.next_row(queue))
            queue.open[opened.uid] = opened
        groups = [group for group in queue.sampled_by(slot) if not group.is_with_engine]
        for group in groups:
            group.is_with_engine = True
        return groups

    def _take(self, queue: GroupQueue, responses: Sequence[FinishedResponse]) -> None:
        """Take finished responses, and have those groups scored that are whole now."""
        whole: list[OpenGroup] = []
        with self._changed:
            for response in responses:
                group = queue.open[response.uid]
                group.finished[response.sample] = response
                group.begun.pop(response.sample, None)
                if len(group.finished) == self.collector.group_size:
                    whole.append(group)
                    queue.plan.score(group.id)
            self._num_scoring += len(whole)
            if self.is_deterministic:  # a step sees all of them or none
                for group in whole:
                    self._score(queue, group, *self._joined(group))
                return
        for group in whole:
            in_background(partial(self._score, queue, group, *self._joined(group)))

    def _joined(self, group: OpenGroup) -> tuple[DataProto, Scoring]:
        in_order = [group.finished[sample] for sample in range(self.collector.group_size)]
        prompt = group.prompt.merge({"rollout_steps": torch.tensor([group.id.version + 1])})
        return self.collector.sampler.join_group(prompt, in_order)

    def _score(self, queue: GroupQueue, group: OpenGroup, sequences: DataProto, scoring: Scoring) -> None:
        """Wait for the scores of a group, and keep it unless the filter leaves it out."""
        with self._keeping_error():
            groups = ScoredGroups(sequences, scoring.result(), self.collector.group_size)
            scores, is_kept = self.collector.judge(groups)
            with self._changed:
                del queue.open[group.uid]
                queue.plan.finish(group.id, is_kept=is_kept)
                if is_kept:
                    queue.finished[group.id] = groups
                self._sampled.append((scores, is_kept))
                self._num_scoring -= 1
                self._changed.notify_all()

    def _keep_begun(self, queue: GroupQueue, slot: int, responses: Sequence[FinishedResponse]) -> None:
        with self._changed:
            for response in responses:
                queue.open[response.uid].begun[response.sample] = response
            for group in queue.sampled_by(slot):
                group.is_with_engine = False

    def _next_step(self, step: int) -> Collected:
        taken = list(chain.from_iterable(queue.take() for queue in self.queues))
        self._changed.notify_all()
        sampled, self._sampled = self._sampled, []
        groups = ScoredGroups.concat(taken)
        metrics = {
            "async/buffer": float(self._num_finished),
            "async/in_flight": float(sum(len(queue.open) for queue in self.queues)),
        }
        metrics |= version_metrics(groups.sequences, step) | self._filter_metrics(sampled, groups)
        batch = groups.sequences.merge({"row_ids": torch.arange(len(groups.sequences))})
        return Collected(batch, Scoring(lambda: groups.values), metrics)

    def _is_ready(self) -> bool:
        if all(queue.plan.is_ready for queue in self.queues):
            return True
        self.collector.check_shortage([scores for scores, _ in self._sampled], self._num_finished)
        for queue in self.queues:
            if queue.plan.is_stuck:
                raise RuntimeError(
                    f"step {queue.plan.steps + 1} has {len(queue.finished)} of {queue.plan.groups_per_step}"
                    " groups, and no engine samples any or may begin one: raise"
                    f" `trainer.async_training.staleness_threshold` ({queue.plan.max_staleness})"
                )
        return False

    def _wait_for(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            if self._error is not None:
                raise self._error
            self._changed.wait()

    @property
    def _num_finished(self) -> int:
        return sum(len(queue.finished) for queue in self.queues)

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        """Leave an error of a thread to the one that collects."""
        try:
            yield
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            raise

    def _filter_metrics(self, sampled: Sequence[tuple[Tensor, bool]], trained: ScoredGroups) -> Metrics:
        if self.collector.filter is None:
            return {}
        counts = {
            "filter/sampled": float(len(sampled)),
            "filter/kept": float(sum(is_kept for _, is_kept in sampled)),
            "filter/trained": float(len(trained)),
        }
        return counts | self.collector.filter_metrics([scores for scores, _ in sampled], trained)


def is_due(queue: GroupQueue) -> bool:
    """Return whether the engine of a deterministic queue still has to load the weights of the last step."""
    version = min(queue.plan.loaded.values(), default=NO_WEIGHTS)  # there is none while another is started
    return version < queue.plan.steps - 1


def version_metrics(batch: DataProto, step: int) -> Metrics:
    """Age of the weights that sampled each token, in updates, and the share of responses with several."""
    mask, versions = sampled_mask(batch), batch.batch["rollout_versions"]  # (B, R)
    if not mask.any():  # every agent failed before its first turn
        return {}
    staleness = (step - 1 - versions[mask]).float()
    newest = versions.masked_fill(~mask, -1).amax(-1)  # (B,)
    oldest = torch.where(mask, versions, newest.unsqueeze(-1)).amin(-1)  # (B,)
    return {
        "async/staleness_mean": staleness.mean().item(),
        "async/staleness_max": staleness.max().item(),
        "async/partial_rate": (newest > oldest).float().mean().item(),
    }


class PartialRollouts(GroupStream):
    """Engines sleep while the model trains.

    A step ends sampling as soon as it has its groups; unfinished responses continue in the next one, with
    its weights.
    """

    def collect(self, step: int, timer: StageTimer) -> Collected:
        version = step - 1
        with self.engines.awake(version, timer):
            self._note_loaded(version)
            self._start(step)
            with self._changed:
                self._wait_for(self._is_ready)
            self._rest()
        with self._changed:
            return self._next_step(step)

    def _is_ready(self) -> bool:
        target = self.collector.quota.target
        self.collector.sampler.report(min(self._num_finished, target), target, "prompts")
        return super()._is_ready()
