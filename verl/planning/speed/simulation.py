# SPDX-License-Identifier: Apache-2.0
"""Discrete-event simulation of sampling and training: seconds of a run in each mode of `trainer.async`.

The `StreamPlan` of real runs decides who begins what and which groups a step has; engines, trainer and clock
are simulated, from one completed response, or step, to the next.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from verl.planning.stream_plan import GroupId, StreamPlan, fitting_groups

UNLIMITED = 1 << 30
DONE = 1e-6  # tokens that a finished response may lack by rounding


@dataclass(frozen=True)
class Order:
    """When a mode samples."""

    in_turn: bool = False  # engines stop while the model trains
    in_batches: bool = False  # an engine begins a step's prompts at once, and takes new weights between them
    staleness: int | None = None  # of groups, in updates; None is that of `trainer.async_training`


ORDERS: Mapping[str, Order] = {
    "off": Order(in_turn=True, staleness=0),
    "partial": Order(in_turn=True),
    "one_step_off": Order(in_batches=True, staleness=1),
    "stream": Order(),
}


@dataclass(frozen=True)
class Costs:
    """Costs of the parts of a run in seconds, measured or predicted."""

    decoding: Callable[[int], float]  # a step of an engine, by the number of responses that it samples
    prompt_token: float  # reading a token of a prompt, or again of a response that continues
    training: float  # a step, from its scores to its new weights
    loading: float  # taking new weights, in which an engine samples nothing
    at_once: int = UNLIMITED  # responses that an engine samples; others wait


@dataclass(frozen=True)
class SimulatedWork:
    """The samples of a run; `length` draws the tokens of a response."""

    groups_per_step: int
    group_size: int
    prompt_tokens: float
    length: Callable[[], float]
    steps: int


@dataclass(frozen=True)
class SimulatedRun:
    """The course of a simulated run; shares are those of its seconds, the engines' in the mean."""

    seconds: float
    tokens: float  # of responses
    idle_sampling: float
    idle_training: float

    @property
    def rate(self) -> float:
        """Tokens of responses per second."""
        return self.tokens / self.seconds


@dataclass
class _Engine:
    costs: Costs
    prompt_tokens: float
    position: float = 0.0  # tokens that a response would have that it had sampled from the start
    # a heap: where each response ends and where it began
    running: list[tuple[float, float, GroupId]] = field(default_factory=list)
    waiting: deque[tuple[float, GroupId]] = field(default_factory=deque)  # length of each response
    delay: float = 0.0  # seconds until it samples: it loads weights or reads prompts
    idle: float = 0.0  # seconds so far
    is_full: bool = False  # it may begin another group once enough of its responses are complete

    def begin(self, group: GroupId, lengths: list[float]) -> None:
        self.delay += self.costs.prompt_token * self.prompt_tokens
        self.waiting.extend((length, group) for length in lengths)
        self._fill()

    def load(self, groups: int) -> None:
        """Take new weights, and read again the groups that continue with them."""
        tokens = sum(self.position - begun for _, begun, _ in self.running)
        self.delay += self.costs.loading + self.costs.prompt_token * (self.prompt_tokens * groups + tokens)

    @property
    def num_open(self) -> int:
        """Responses that are not complete."""
        return len(self.running) + len(self.waiting)

    def next_end(self) -> float:
        """Seconds until its next response is complete."""
        if not self.running:
            return math.inf
        return self.delay + (self.running[0][0] - self.position) * self.costs.decoding(len(self.running))

    def advance(self, seconds: float) -> list[GroupId]:
        """Sample so long; return the group of each completed response."""
        waited = min(seconds, self.delay)
        self.delay -= waited
        seconds -= waited
        if not self.running:
            self.idle += seconds
            return []
        self.position += seconds / self.costs.decoding(len(self.running))
        complete: list[GroupId] = []
        while self.running and self.running[0][0] <= self.position + DONE:
            complete.append(heappop(self.running)[2])
        self._fill()
        return complete

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.costs.at_once:
            length, group = self.waiting.popleft()
            heappush(self.running, (self.position + length, self.position, group))


def simulate(
    mode: str,
    work: SimulatedWork,
    costs: Costs,
    *,
    engines: int,
    staleness: int = 1,
    max_in_flight: int | None = None,
    at_once: int = UNLIMITED,
    warm_up: int = 0,
) -> SimulatedRun:
    """Simulate a whole run, or the middle of a longer one.

    Args:
        mode: A name in `ORDERS`.
        staleness: `trainer.async_training.staleness_threshold`.
        max_in_flight: `trainer.async_training.max_inflight_prompts`.
        at_once: `worker.rollout.max_num_seqs`.
        warm_up: Steps before those of the figures; as many would follow.
    """
    order = ORDERS[mode]
    bound = staleness if order.staleness is None else order.staleness
    last = warm_up + work.steps
    plan = StreamPlan(work.groups_per_step, bound, last + warm_up, engines, max_in_flight)
    # in batches, a step's prompts wait in the engine
    run = _Run(order, work, costs, plan, UNLIMITED if order.in_batches else at_once)
    before: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    while plan.version < last:
        if run.advance() and plan.version == warm_up:
            before = run.totals()
    seconds, tokens, *idle = (now - then for now, then in zip(run.totals(), before, strict=True))
    return SimulatedRun(seconds, tokens, *(each / seconds for each in idle))


class _Run:
    def __init__(
        self, order: Order, work: SimulatedWork, costs: Costs, plan: StreamPlan, at_once: int
    ) -> None:
        self.order, self.work, self.costs, self.plan, self.at_once = order, work, costs, plan, at_once
        self.engines = [_Engine(costs, work.prompt_tokens) for _ in range(plan.num_engines)]
        self.unfinished: Counter[GroupId] = Counter()
        self.tokens_of: dict[GroupId, float] = {}
        self.now = self.idle_training = self.tokens = 0.0
        self.trained_at = math.inf  # when the running step ends
        self.may_begin = set(range(plan.num_engines))  # whose room may have grown
        self.may_be_ready = False

    @property
    def is_training(self) -> bool:
        return self.trained_at < math.inf

    @property
    def is_sampling(self) -> bool:
        return not (self.order.in_turn and self.is_training)

    def totals(self) -> tuple[float, ...]:
        """Return seconds, tokens and the idle seconds of both sides so far."""
        idle = sum(engine.idle for engine in self.engines) / len(self.engines)
        return (self.now, self.tokens, idle, self.idle_training)

    def advance(self) -> bool:
        """Go to the next completed response, or step; return whether new weights were published."""
        self._begin_groups()
        self._begin_step()
        ends = [engine.next_end() for engine in self.engines] if self.is_sampling else []
        seconds = min([self.trained_at - self.now, *ends])
        assert seconds < math.inf, "sampling waits for training, which waits for sampling"
        self.now += seconds
        self.idle_training += 0.0 if self.is_training else seconds
        for at, engine in enumerate(self.engines):
            if self.is_sampling:
                self._finish(at, engine, engine.advance(seconds))
            else:
                engine.idle += seconds
        if self.now < self.trained_at:
            return False
        self.trained_at, self.may_be_ready = math.inf, True
        self.plan.publish(self.plan.steps)
        self.may_begin.update(range(len(self.engines)))
        return True

    def _begin_groups(self) -> None:
        if not self.is_sampling:
            return
        for at in sorted(self.may_begin):
            engine = self.engines[at]
            if self.plan.is_outdated(at) and not (self.order.in_batches and engine.running):
                self.plan.load(at)
                engine.load(self.plan.num_sampling(at))
            fitting = fitting_groups(engine.num_open, self.work.group_size, self.at_once)
            engine.is_full = fitting == 0
            for _ in range(0 if engine.is_full else min(fitting, _room(self.plan, at, self.order))):
                group = self.plan.begin(at)
                lengths = [self.work.length() for _ in range(self.work.group_size)]
                self.tokens_of[group], self.unfinished[group] = sum(lengths), self.work.group_size
                engine.begin(group, lengths)
        self.may_begin.clear()

    def _begin_step(self) -> None:
        if not self.is_training and self.may_be_ready and self.plan.is_ready:
            self.tokens += sum(self.tokens_of.pop(group) for group in self.plan.next_groups())
            self.trained_at = self.now + self.costs.training
            self.may_begin.update(range(len(self.engines)))
            self._begin_groups()
        self.may_be_ready = False

    def _finish(self, at: int, engine: _Engine, responses: list[GroupId]) -> None:
        for group in responses:
            self.unfinished[group] -= 1
            if engine.is_full or self.unfinished[group] == 0:
                self.may_begin.add(at)
            if self.unfinished[group] == 0:
                self.plan.finish(group)
                self.may_be_ready = True


def _room(plan: StreamPlan, at: int, order: Order) -> int:
    room = plan.room(at)
    if not order.in_batches:
        return room
    # its share of the next step, once it has finished that of the one before and the step has begun
    first, stop = (plan.groups_per_step * engine // plan.num_engines for engine in (at, at + 1))
    is_due = plan.num_begun < (plan.steps + 1) * plan.groups_per_step and plan.num_sampling(at) == 0
    return min(room, stop - first) if is_due else 0
