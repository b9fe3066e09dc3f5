# SPDX-License-Identifier: Apache-2.0
"""The work of a step for one rank, from expected lengths of prompts and responses."""

import math
from dataclasses import dataclass, replace

from verl.config.model import as_number
from verl.planning.memory_model import ModelShape
from verl.planning.planned_model import PlannedModel, PlannedPass
from verl.planning.planned_run import PlannedRun

PROMPT_SHARE, RESPONSE_SHARE = 0.25, 0.4  # of the maximum, where no mean is given
MEDIA_SHARE = 0.75  # of the prompt of a model with a vision tower
MEDIA_TOKENS = 256  # of an image
FILL = 0.95  # of a micro batch's token budget, since rows are whole


@dataclass(frozen=True)
class Responses:
    """Lengths of responses: each token may be the last with the same chance, up to the maximum."""

    mean: float
    maximum: int

    @property
    def scale(self) -> float:
        """Mean that the lengths would have without a maximum."""
        low, high = self.mean, 1e4 * self.maximum
        if self._cut_mean(high) <= self.mean:
            return high
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._cut_mean(middle) < self.mean else (low, middle)
        return high

    def _cut_mean(self, scale: float) -> float:
        return -scale * math.expm1(-self.maximum / scale)

    @property
    def mean_square(self) -> float:
        end = self.maximum / self.scale
        # 1 - exp(-end) (1 + end), without the difference of nearly equal numbers
        rest = end**2 / 2 - end**3 / 3 if end < 1e-3 else 1 - math.exp(-end) * (1 + end)
        return 2 * self.scale**2 * rest

    def running(self, step: float) -> float:
        """Share of responses that are longer than this."""
        return math.exp(-step / self.scale) if step < self.maximum else 0.0

    def longest(self, number: int) -> float:
        """Expected length of the longest of several."""
        return min(self.maximum, self.scale * (math.log(max(number, 1)) + 0.577))


@dataclass(frozen=True)
class ExpectedLengths:
    """Mean lengths in tokens."""

    prompt: float
    responses: Responses

    @property
    def text(self) -> str:
        prompt = f"prompts of {self.prompt:.0f} and " if self.prompt else ""
        return f"{prompt}responses of {self.responses.mean:.0f} tokens on average"


def expected_lengths(
    run: PlannedRun, mean_prompt: float | None = None, mean_response: float | None = None
) -> ExpectedLengths:
    lengths = run.lengths
    prompt = PROMPT_SHARE * lengths.prompt if mean_prompt is None else min(mean_prompt, lengths.prompt)
    response = RESPONSE_SHARE * lengths.response if mean_response is None else mean_response
    return ExpectedLengths(prompt, Responses(min(response, lengths.response), lengths.response))


@dataclass(frozen=True)
class PassWork:
    """Work of one rank in a pass over its rows, all micro batches together."""

    tokens: float
    responses: float  # tokens that reach the head
    pairs: float  # of a token and one that it attends to
    patches: float  # of images
    images: float
    micro_batches: int
    repeats: int  # optimizer steps of an update, else 1


def pass_work(
    run: PlannedRun, model: PlannedModel, each: PlannedPass, lengths: ExpectedLengths, shape: ModelShape
) -> PassWork:
    """Return the work of a pass in a whole step."""
    if model.prompt is not None and run.lengths.prompt:  # its prompts are other ones
        lengths = replace(lengths, prompt=lengths.prompt * model.prompt / run.lengths.prompt)
    ranks, prompt, responses = run.lengths.ranks, lengths.prompt, lengths.responses
    rows = run.rows * _epochs(run, model, each)
    repeats = max(1, rows // each.rows)
    rows *= model.share
    group = min(run.lengths.group, each.rows) if each.shares_prompt else 1
    groups = rows / group
    tokens = (groups * prompt + rows * responses.mean) / ranks
    to_head = rows * responses.mean / ranks
    pairs = (groups * prompt**2 / 2 + rows * (prompt * responses.mean + responses.mean_square / 2)) / ranks
    media = 0.0 if model.model.freeze_vision_tower else _media_tokens(run, groups, lengths, shape)
    size = min(as_number(each.size), each.rows)
    if each.dynamic:
        budget = FILL * size * (run.lengths.prompt + run.lengths.response)
        each_repeat = math.ceil(tokens / repeats / budget)
    else:
        each_repeat = each.rows // size
    images = media / MEDIA_TOKENS
    patches = media * shape.patches_per_token
    return PassWork(tokens, to_head, pairs, patches, images, repeats * max(1, each_repeat), repeats)


def _epochs(run: PlannedRun, model: PlannedModel, each: PlannedPass) -> int:
    if model.is_teacher:
        return run.epochs.get("actor", 1) if run.compares_teachers else 1
    return run.epochs.get(model.role, 1) if each.is_update else 1


def encoding_work(
    run: PlannedRun, policy: PlannedModel, lengths: ExpectedLengths, shape: ModelShape
) -> PassWork | None:
    """Return the work of a frozen vision tower, which encodes the media of new prompts once; None without."""
    media = _media_tokens(run, run.rows / run.lengths.group, lengths, shape)
    if not media or not policy.model.freeze_vision_tower:
        return None
    return PassWork(0.0, 0.0, 0.0, media * shape.patches_per_token, media / MEDIA_TOKENS, 1, 1)


def _media_tokens(run: PlannedRun, groups: float, lengths: ExpectedLengths, shape: ModelShape) -> float:
    """Return the media tokens of `groups` groups that one of the ranks sharing them encodes."""
    if shape.tower is None or not run.lengths.media:
        return 0.0
    return groups * MEDIA_SHARE * (lengths.prompt or lengths.responses.mean) / run.lengths.ranks
