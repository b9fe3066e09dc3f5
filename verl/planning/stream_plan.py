# SPDX-License-Identifier: Apache-2.0
"""Decides which engine begins how many prompts, and which groups a step trains on.

There is no engine, thread or clock here.

The weights of version v are those after v steps, so that step s begins with version s - 1. A group that began
with version v and is trained in step s has the staleness s - 1 - v, which is at most a given bound: engines
wait rather than begin a group that could not be trained in time, and a step waits rather than leave one
behind. Nothing is dropped. Engines may join and leave at any time, and others continue the groups of one
that left.

Worked example, with 2 groups per step, `max_staleness=1` and one engine: it begins a, b, c and d with version
0, two groups for each of steps 1 and 2 (staleness 2 - 1 - 0 = 1). Step 1 waits for two of them to finish, say
a and c, trains, and publishes version 1. This leaves room for e and f, for step 3 (3 - 1 - 1 = 1). Step 2
takes b and d even if e finished first: the oldest groups must be trained in time.

Source of the bound: staleness-aware training in AReaL (https://arxiv.org/abs/2505.24298), here for every
version instead of the newest only, so that it holds for groups that finish late as well.

Only a run that resumes with a lower bound than it was saved with drops groups (`drop_late`). Saved after step
3 with a and b of version 2, and c of version 3, step 4 would train on a and b (staleness 3 - 2 = 1). Resumed
with `max_staleness=0`, it takes version 3 only: a and b are dropped, and c leaves room for one more group.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

NO_WEIGHTS = -1  # version of an engine that has just joined


class GroupId(NamedTuple):
    """A prompt with its responses; the order is that of age."""

    version: int  # of the weights that began it
    number: int  # in the order of beginning


def fitting_groups(num_open: int, group_size: int, at_once: int) -> int:
    """Return the number of groups that an engine may begin without having any response wait.

    A response that waits in an engine ages, and the ones before it take longer for nothing.

    Args:
        num_open: Responses that the engine has not finished.
        at_once: Responses that it samples at once.
    """
    return max((at_once - num_open) // group_size, 0 if num_open else 1)


@dataclass
class StreamPlan:
    """The state of a stream of groups from engines to steps.

    Example::

        plan = StreamPlan(groups_per_step=8, max_staleness=1, last_step=100, num_engines=2)
        for _ in range(plan.room(engine=0)):
            group = plan.begin(engine=0)
        ...
        plan.finish(group)
        if plan.is_ready:
            groups = plan.next_groups()
            ...  # the step trains
            plan.publish(plan.steps)
            plan.load(engine=0)
    """

    groups_per_step: int
    max_staleness: int  # in versions; 0 samples each step with the weights that it begins with
    last_step: int  # no group is begun that no step needs
    num_engines: int  # at the start: 0, 1 and so on
    max_in_flight: int | None = None  # groups of an engine; None shares the groups of the bound evenly
    steps: int = 0  # that have their groups
    version: int = 0  # of the newest weights
    num_begun: int = 0  # groups so far
    loaded: dict[int, int] = field(default_factory=dict)  # the version of each engine's weights
    # that are being sampled, with their engine, or scored, with None
    in_flight: dict[GroupId, int | None] = field(default_factory=dict)
    orphans: set[GroupId] = field(default_factory=set)  # unfinished ones of engines that left
    finished: set[GroupId] = field(default_factory=set)  # that no step has taken

    def __post_init__(self) -> None:
        self.loaded = self.loaded or dict.fromkeys(range(self.num_engines), self.version)

    @property
    def limit(self) -> int:
        """Groups that an engine may have in flight."""
        if self.max_in_flight is not None:
            return self.max_in_flight
        return -(-self.groups_per_step * (self.max_staleness + 1) // len(self.loaded))

    def join(self, engine: int) -> None:
        """Add an engine; it begins nothing before it has loaded weights."""
        assert engine not in self.loaded, f"engine {engine} has joined before"
        self.loaded[engine] = NO_WEIGHTS

    def leave(self, engine: int) -> None:
        """Remove an engine; the groups that it was sampling wait for others, which `adopt` them."""
        del self.loaded[engine]
        left = [group for group, owner in self.in_flight.items() if owner == engine]
        self.orphans.update(left)
        for group in left:
            del self.in_flight[group]

    def adopt(self, engine: int, at_most: int) -> int:
        """Have an engine continue groups of others that left, oldest first; return their number."""
        adopted = sorted(self.orphans)[: max(0, min(at_most, self._share_left(engine)))]
        self.orphans.difference_update(adopted)
        self.in_flight.update(dict.fromkeys(adopted, engine))
        return len(adopted)

    def room(self, engine: int) -> int:
        """Return the number of groups that an engine may begin now, with the weights that it has."""
        counts = Counter(group.version for group in self._waiting())
        version = self.loaded[engine]
        room = self._share_left(engine)
        older = sum(count for its, count in counts.items() if its < version)
        for newer in range(version, self.version + 1):
            older += counts[newer]
            room = min(room, self._slots(newer) - older)
        rest = (self.last_step - self.steps) * self.groups_per_step
        return max(0, min(room, rest - older))

    def begin(self, engine: int) -> GroupId:
        """Begin a group; `room` must be positive."""
        group = GroupId(self.loaded[engine], self.num_begun)
        self.num_begun += 1
        self.in_flight[group] = engine
        return group

    def num_sampling(self, engine: int) -> int:
        return sum(owner == engine for owner in self.in_flight.values())

    def score(self, group: GroupId) -> None:
        """Record that all responses of a group are there and that it waits for its scores."""
        self.in_flight[group] = None

    def finish(self, group: GroupId, *, is_kept: bool = True) -> None:
        """Take a group with its scores; a filter may leave it out."""
        del self.in_flight[group]
        if is_kept:
            self.finished.add(group)

    def drop_late(self) -> list[GroupId]:
        """Drop the groups that no step can train in time, which a lower bound than before leaves behind."""
        num_kept, late = 0, []
        for group in sorted(self._waiting()):
            if num_kept < self._slots(group.version):
                num_kept += 1
            else:
                late.append(group)
        for group in late:
            self.in_flight.pop(group, None)
        self.orphans.difference_update(late)
        self.finished.difference_update(late)
        return late

    @property
    def is_stuck(self) -> bool:
        """True if the next step lacks groups and no engine samples any or may begin one."""
        if not self.loaded or self.in_flight or self.orphans or self.is_ready:
            return False
        return not any(self.is_outdated(engine) or self.room(engine) for engine in self.loaded)

    @property
    def is_ready(self) -> bool:
        """True if the next step has its groups."""
        oldest = self._oldest()
        return len(oldest) == self.groups_per_step and self._is_in_time(oldest)

    def next_groups(self) -> list[GroupId]:
        """Take the groups of the next step, which is ready, oldest first."""
        assert self.is_ready, "a step has to wait for its groups"
        taken = self._oldest()
        self.finished.difference_update(taken)
        self.steps += 1
        return taken

    def publish(self, version: int) -> None:
        """Announce newer weights, which each engine loads when it can."""
        assert version >= self.version, f"versions increase, got {version} after {self.version}"
        self.version = version

    def load(self, engine: int) -> None:
        """Record that an engine has the newest weights; its groups continue with them."""
        self.loaded[engine] = self.version

    def is_outdated(self, engine: int) -> bool:
        return self.loaded[engine] < self.version

    def _share_left(self, engine: int) -> int:
        if self.loaded[engine] == NO_WEIGHTS:
            return 0
        return self.limit - self.num_sampling(engine)

    def _oldest(self) -> list[GroupId]:
        return sorted(self.finished)[: self.groups_per_step]

    def _waiting(self) -> Iterator[GroupId]:
        yield from self.in_flight
        yield from self.orphans
        yield from self.finished

    def _slots(self, version: int) -> int:
        """Groups that can still be trained until those of a version are too old."""
        return (version + self.max_staleness + 1 - self.steps) * self.groups_per_step

    def _is_in_time(self, taken: Iterable[GroupId]) -> bool:
        """Return whether all groups that the step would leave behind fit in the steps left for them."""
        left = Counter(group.version for group in self._waiting())
        left.subtract(group.version for group in taken)
        older = 0
        for version in sorted(left):
            older += left[version]
            if older > self._slots(version) - self.groups_per_step:
                return False
        return True
