# SPDX-License-Identifier: Apache-2.0
"""Keys of conversations, and conversion of rows and responses for their drivers."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from verl.agents.contexts import FinishedConversation
from verl.agents.row import SampledTurn
from verl.agents.rules import ConversationRules
from verl.workers.rollout.interface import Drafts, FinishedResponse, SamplingOptions

MAX_SEED = 1 << 31  # environments hand it to generators of random numbers

Columns = Mapping[str, Any]  # of a row of the data set, with its prompt
Begun = Mapping[Any, Mapping[int, FinishedResponse]]  # unfinished responses, by uid and sample


class Key(NamedTuple):
    """A conversation: one of the samples of a prompt."""

    uid: Any
    sample: int


def samples_of(row: Columns, sampling: SamplingOptions, begun: Begun | None) -> list[Key]:
    """Return the conversations of a row: all of `sampling`, or the unfinished ones."""
    uid, first = row["uid"], sampling.first_sample
    return [Key(uid, sample) for sample in (begun or {}).get(uid) or range(first, first + sampling.n)]


def placed(response: FinishedResponse, sampling: SamplingOptions) -> FinishedResponse:
    """Return a response of a batch with its place among those of the call; one set of weights sampled it."""
    return replace(response, sample=response.sample - sampling.first_sample, versions=[])


def sampled_turn(response: FinishedResponse) -> SampledTurn:
    sampled = response.token_ids, response.log_probs, response.finish_reason
    return SampledTurn(*sampled, response.versions, response.routes)


def finished_response(key: Key, done: FinishedConversation, drafts: Drafts | None) -> FinishedResponse:
    sampled = done.token_ids, done.log_probs, done.finish_reason
    return FinishedResponse(*key, *sampled, done.trajectory, done.versions, done.routes, drafts)


def stop_problem(what: str, reason: str) -> str:
    """Say why a run ends whose tool, environment or agent failed."""
    return f"{what} failed, and `worker.rollout.multi_turn.on_tool_error=stop` ends the run then: {reason}"


def columns_of(rules: ConversationRules, key: Key, row: Columns, seed: int | None) -> dict[str, Any]:
    """Return a row as tools, environments and agents get it, with its prompt's media on disk."""
    columns, media = {**row, "sample": key.sample}, row["multi_modal_data"]
    if rules.media is not None and media:
        on_disk = rules.media.loader.on_disk
        names = ("images", "videos", *(("audios",) if "audios" in media else ()))
        columns |= {name: list(map(on_disk, media.get(name) or ())) for name in names}
    if columns.get("seed") is None:
        columns["seed"] = _int_of(("seed", seed, key.uid)) % MAX_SEED
    return columns


def seed_offset(key: Key, turn: int) -> int:
    """Return what a turn adds to the seed of the run, whatever other conversations do and when."""
    return _int_of((key.uid, key.sample, turn))


def _int_of(value: tuple[Any, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=6).digest())
