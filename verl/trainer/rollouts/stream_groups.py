# SPDX-License-Identifier: Apache-2.0
"""Groups of a stream by state: waiting prompts, responses being sampled, finished groups."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from verl.agents.interface import from_plain, to_plain
from verl.batch_keys import BEGUN
from verl.planning.stream_plan import GroupId, StreamPlan
from verl.protocol import DataProto, objects
from verl.single_controller.dispatch import shard
from verl.trainer.rollouts.sampler import with_uids
from verl.trainer.rollouts.scores import ScoredGroups
from verl.workers.rollout.interface import INTERRUPTED, FinishedResponse

PROMPTS_FILE = "stream_prompts.pt"  # that wait, or are being sampled
GROUPS_FILE = "stream_groups.pt"  # that are finished
STATE = "stream_state"  # column of the first
PLACES = "stream_places"  # entry of the second: queue, version and number of each group


@dataclass
class OpenGroup:
    """A prompt whose responses are being sampled."""

    id: GroupId
    prompt: DataProto  # one row
    finished: dict[int, FinishedResponse] = field(default_factory=dict)  # by sample
    begun: dict[int, FinishedResponse] = field(default_factory=dict)  # interrupted, by sample
    is_with_engine: bool = False  # which has been given the prompt

    @property
    def uid(self) -> str:
        return self.prompt.non_tensor_batch["uid"][0]

    def request(self, group_size: int, columns: Sequence[str] | None) -> DataProto:
        """Return what an engine needs to sample the responses that are not finished, or to continue them.

        It reads these columns; None: all.
        """
        row = self.prompt.select([], columns)
        begun = {
            sample: self.begun.get(sample) or FinishedResponse(self.uid, sample, [], [], INTERRUPTED)
            for sample in range(group_size)
            if sample not in self.finished
        }
        return row.merge({BEGUN: objects([begun])})


@dataclass
class GroupQueue:
    """Engines that share a plan, with its groups."""

    plan: StreamPlan
    engines: list[int]  # numbers by slot; the plan knows the slots whose engines live
    prompts: deque[DataProto] = field(default_factory=deque)  # rows that have not begun
    open: dict[str, OpenGroup] = field(default_factory=dict)  # by uid
    finished: dict[GroupId, ScoredGroups] = field(default_factory=dict)

    def sampled_by(self, slot: int) -> list[OpenGroup]:
        """Return the groups that the engine at this slot is sampling, oldest first."""
        return [group for group in self.open.values() if self.plan.in_flight.get(group.id) == slot]

    def take(self) -> list[ScoredGroups]:
        """Take the groups of the next step, which is ready."""
        return [self.finished.pop(group) for group in self.plan.next_groups()]

    def drop_late(self) -> int:
        """Drop the groups that no step can train in time; return their number."""
        late = set(self.plan.drop_late())
        self.open = {uid: group for uid, group in self.open.items() if group.id not in late}
        self.finished = {id: groups for id, groups in self.finished.items() if id not in late}
        return len(late)


class PromptSource:
    """Gives each queue its part of every batch of the loader."""

    def __init__(self, batches: Iterator[DataProto], queues: Sequence[GroupQueue]) -> None:
        self.batches, self.queues = batches, queues
        self.num_batches = 0

    def next_row(self, queue: GroupQueue) -> DataProto:
        while not queue.prompts:
            self.num_batches += 1
            batch = with_uids(next(self.batches), f"batch{self.num_batches}")
            for other, part in zip(self.queues, shard(batch, len(self.queues), even=False), strict=True):
                other.prompts += part.split(1)
        return queue.prompts.popleft()


def save_queues(queues: Sequence[GroupQueue], num_batches: int, folder: Path) -> None:
    """Write all groups and prompts of a stream that rests."""
    rows: list[DataProto] = []
    finished: list[ScoredGroups] = []
    slots: list[list[int]] = []
    for number, queue in enumerate(queues):
        for group in queue.open.values():
            engine = queue.plan.in_flight.get(group.id)  # None if it was lost
            state = {"lane": number, "group": list(group.id), "engine": engine}
            state |= {"finished": as_plain(group.finished), "begun": as_plain(group.begun)}
            rows.append(group.prompt.merge({STATE: objects([state])}))
        rows += [row.merge({STATE: objects([{"lane": number}])}) for row in queue.prompts]
        finished += queue.finished.values()
        slots += [[number, *group] for group in queue.finished]
    about = {"num_batches": num_batches, "num_begun": [queue.plan.num_begun for queue in queues]}
    stored = DataProto.concat(rows) if rows else DataProto()
    DataProto(stored.batch, stored.non_tensor_batch, about).save_to_disk(folder / PROMPTS_FILE)
    if finished:
        ScoredGroups.concat(finished).save(folder / GROUPS_FILE, **{PLACES: slots})


def load_queues(queues: Sequence[GroupQueue], folder: Path) -> int:
    """Restore what `save_queues` wrote and return the number of batches that the loader has given.

    Groups of engines that no longer exist continue in others.
    """
    stored = DataProto.load_from_disk(folder / PROMPTS_FILE)
    num_begun = stored.meta_info["num_begun"]
    if len(num_begun) != len(queues):
        raise ValueError(
            f"the checkpoint divides its prompts into {len(num_begun)} parts and this run into {len(queues)}:"
            " resume with the same `trainer.async_training.deterministic` and number of rollout engines, or"
            f" delete the checkpoint's {PROMPTS_FILE} and {GROUPS_FILE} to drop what was sampled ahead"
        )
    for queue, number in zip(queues, num_begun, strict=True):
        queue.plan.num_begun = number
    for row in stored.split(1) if len(stored) else []:
        state = row.non_tensor_batch[STATE][0]
        prompt = row.select(None, [key for key in row.non_tensor_batch if key != STATE])
        queue = queues[state["lane"]]
        if "group" not in state:
            queue.prompts.append(prompt)
            continue
        group = OpenGroup(
            GroupId(*state["group"]), prompt, responses_of(state["finished"]), responses_of(state["begun"])
        )
        queue.open[group.uid] = group
        if state["engine"] in queue.plan.loaded:
            queue.plan.in_flight[group.id] = state["engine"]
        else:
            queue.plan.orphans.add(group.id)
    path = folder / GROUPS_FILE
    if path.exists():
        groups = ScoredGroups.load(path)
        for slot, (number, *key) in enumerate(groups.sequences.meta_info.pop(PLACES)):
            group = GroupId(*key)
            queues[number].finished[group] = groups.select(torch.tensor([slot]))
            queues[number].plan.finished.add(group)
    return stored.meta_info["num_batches"]


def as_plain(responses: Mapping[int, FinishedResponse]) -> dict[int, dict[str, Any]]:
    return {
        sample: {**vars(response), "trajectory": response.trajectory and to_plain(response.trajectory)}
        for sample, response in responses.items()
    }


def responses_of(plain: Mapping[int, Mapping[str, Any]]) -> dict[int, FinishedResponse]:
    return {
        sample: FinishedResponse(
            **{**values, "trajectory": values["trajectory"] and from_plain(values["trajectory"])}
        )
        for sample, values in plain.items()
    }
