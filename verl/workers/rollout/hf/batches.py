# SPDX-License-Identifier: Apache-2.0
"""Batches of prompts that transformers generates responses to, one token at a time."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from verl.models.families.interface import Medium
from verl.workers.rollout.interface import INTERRUPTED, FinishedResponse, SamplingOptions

# (input_ids, mask, position_ids, cache, media) -> logits of the last position, (B, V) float32, and of all T
# tokens the routes (B, T, L, k), if they are recorded
Forward = Callable[[Tensor, Tensor, Tensor, Any, list[Medium]], tuple[Tensor, Tensor | None]]
Draw = Callable[[Tensor], Tensor]  # probabilities (B, V) -> tokens (B,)


class PreparedPrompt(NamedTuple):
    """One prompt as the model reads it, and how its responses are sampled."""

    uid: Any
    input_ids: Tensor  # (L,), media tokens expanded
    position_ids: Tensor  # (L,), or (4, L) for M-RoPE
    media: list[Medium]  # in the order of their tokens
    sampling: SamplingOptions
    limit: int  # of tokens in a response
    generator: torch.Generator

    def joins(self, other: "PreparedPrompt") -> bool:
        """Return True if both may be in one batch."""
        ours, theirs = self.sampling, other.sampling
        return replace(ours, max_tokens=theirs.max_tokens, seed=theirs.seed) == theirs


@dataclass
class Row:
    """One response that grows."""

    response: FinishedResponse
    limit: int
    finished: bool = False
    routes: list[Tensor] = field(default_factory=list)  # (tokens, L, k) of consecutive passes

    def with_routes(self, finish_reason: str) -> FinishedResponse:
        """Return a copy of the response so far."""
        return replace(
            self.response,
            token_ids=list(self.response.token_ids),
            log_probs=list(self.response.log_probs),
            finish_reason=finish_reason,
            routes=torch.cat(self.routes) if self.routes else None,
        )


class RandomStream:
    """Random numbers of those rows of a batch that share a generator.

    Each step draws for all rows that the batch began with, so that leaving out finished ones changes nothing.
    """

    def __init__(self, generator: torch.Generator, rows: list[Row]) -> None:
        self.generator = generator
        self.rows = rows
        self.size = len(rows)
        self.kept = list(range(self.size))  # places of `rows` among the first ones

    def keep_running(self) -> None:
        self.kept = [place for place, row in zip(self.kept, self.rows, strict=True) if not row.finished]
        self.rows = [row for row in self.rows if not row.finished]

    def draw(self, probabilities: Tensor) -> Tensor:
        if len(self.kept) < self.size:
            kept, every = self.kept, probabilities.new_ones(self.size, probabilities.shape[-1])
            every[kept] = probabilities
            return torch.multinomial(every, 1, generator=self.generator)[kept, 0]
        return torch.multinomial(probabilities, 1, generator=self.generator).squeeze(-1)


class RunningBatch:
    """Prompts that were prefilled together, and their unfinished responses.

    Prompts are padded on the left, run once, and their cache is repeated for their `n` responses.
    """

    def __init__(
        self,
        prompts: list[PreparedPrompt],
        cache: Any,
        forward: Forward,
        ends: frozenset[int],
        banned: list[int],
        device: str,
    ) -> None:
        self.sampling, n = prompts[0].sampling, prompts[0].sampling.n
        self.cache, self.forward, self.ends, self.banned = cache, forward, ends, banned
        input_ids, mask, position_ids = (tensor.to(device) for tensor in pad_left(prompts))
        self.prompt_length = input_ids.shape[1]
        logits, routes = forward(
            input_ids, mask, position_ids, cache, [medium for prompt in prompts for medium in prompt.media]
        )
        self.mask, self.position_ids = mask, position_ids[..., -1:]  # (B, L); (B, 1) or (4, B, 1)
        self.tokens = input_ids[:, -1]  # the last of each row
        self.rows: list[Row] = []
        by_generator: dict[torch.Generator, list[Row]] = {}
        for place, prompt in enumerate(prompts):
            responses = [FinishedResponse(prompt.uid, sample, [], [], "") for sample in range(n)]
            own = [] if routes is None else [routes[place][mask[place].bool()].cpu()]
            rows = [Row(response, prompt.limit, routes=list(own)) for response in responses]
            self.rows += rows
            by_generator.setdefault(prompt.generator, []).extend(rows)
        self.streams = [RandomStream(*each) for each in by_generator.items()]
        places = [place for place in range(len(prompts)) for _ in range(n)]
        self._select(places)
        self.logits: Tensor | None = logits[places]  # of the next token; None: not computed yet

    @property
    def is_done(self) -> bool:
        return all(row.finished for row in self.rows)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts that it holds, with padding."""
        return self.prompt_length * len({row.response.uid for row in self.rows})

    def drop(self, uids: set[Any]) -> None:
        """Give up the responses to some prompts."""
        for row in self.rows:
            row.finished = row.finished or row.response.uid in uids
        self._leave_out_finished()

    def begun(self) -> list[FinishedResponse]:
        """Return a copy of what each unfinished response has."""
        return [row.with_routes(INTERRUPTED) for row in self.rows if not row.finished]

    def advance(self) -> list[FinishedResponse]:
        """Add a token to each response, and return the finished ones."""
        if self.logits is None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
            self.position_ids = self.position_ids + 1
            self.logits, routes = self.forward(
                self.tokens[:, None], self.mask, self.position_ids, self.cache, []
            )
            for row, own in zip(self.rows, () if routes is None else routes.cpu(), strict=False):
                row.routes.append(own)
        self.tokens, log_probs = self._sample(self.logits)
        self.logits = None
        finished = []
        for row, token, log_prob in zip(self.rows, self.tokens.tolist(), log_probs.tolist(), strict=True):
            if row.finished:
                continue
            row.response.token_ids.append(token)
            row.response.log_probs.append(log_prob)
            is_end = token in self.ends and not self.sampling.ignore_eos
            if is_end or len(row.response.token_ids) == row.limit:
                row.finished = True
                finished.append(row.with_routes("stop" if is_end else "length"))
        self._leave_out_finished()
        return finished

    def _sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.streams) == 1:
            return sample_tokens(logits, self.sampling, self.banned, self.streams[0].draw)
        tokens = torch.zeros_like(self.tokens)
        log_probs = logits.new_zeros(len(logits))
        place_of = {id(row): place for place, row in enumerate(self.rows)}
        for stream in self.streams:
            places = [place_of[id(row)] for row in stream.rows]
            tokens[places], log_probs[places] = sample_tokens(
                logits[places], self.sampling, self.banned, stream.draw
            )
        return tokens, log_probs

    def _leave_out_finished(self) -> None:
        # Selecting copies the whole cache, so it waits until half of it is of no use.
        running = [place for place, row in enumerate(self.rows) if not row.finished]
        if not running or 2 * len(running) > len(self.rows):
            return
        self._select(running)
        if self.logits is not None:
            self.logits = self.logits[running]
        self.rows = [self.rows[place] for place in running]
        for stream in self.streams:
            stream.keep_running()
        self.streams = [stream for stream in self.streams if stream.rows]

    def _select(self, places: list[int]) -> None:
        # Layers with a state have neither `batch_repeat_interleave` nor `batch_select_indices`.
        self.cache.reorder_cache(torch.tensor(places, device=self.mask.device))
        self.mask, self.tokens = self.mask[places], self.tokens[places]
        self.position_ids = self.position_ids[..., places, :]


def pad_left(prompts: list[PreparedPrompt]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad prompts to one length P: `input_ids`, mask (B, P), position ids (B, P) or (4, B, P)."""
    longest = max(len(prompt.input_ids) for prompt in prompts)
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    position_ids = torch.zeros(*prompts[0].position_ids.shape[:-1], *input_ids.shape, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt.input_ids)
        input_ids[row, start:] = prompt.input_ids
        mask[row, start:] = 1
        position_ids[..., row, start:] = prompt.position_ids
    return input_ids, mask, position_ids


def sample_tokens(
    logits: Tensor, sampling: SamplingOptions, banned: list[int], draw: Draw
) -> tuple[Tensor, Tensor]:
    """Sample the next token of each row of `logits` (B, V) float32, never one of `banned`.

    Returns:
        Tokens (B,), and their log-probs (B,) before top-p, top-k and banned tokens.
    """
    scaled = logits / sampling.logit_temperature
    all_log_probs = scaled.log_softmax(-1)  # (B, V)
    scores: Any = scaled.clone()
    scores[:, banned] = -torch.inf
    if sampling.is_greedy:
        tokens = scores.argmax(-1)
    else:
        previous: Any = None  # the warpers do not read the previous tokens
        if sampling.top_k > 0:
            scores = TopKLogitsWarper(sampling.top_k)(previous, scores)
        if sampling.top_p < 1:
            scores = TopPLogitsWarper(sampling.top_p)(previous, scores)
        tokens = draw(scores.softmax(-1))
    return tokens, all_log_probs.gather(-1, tokens[:, None]).squeeze(-1)
