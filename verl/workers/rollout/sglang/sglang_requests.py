# SPDX-License-Identifier: Apache-2.0
"""Requests to SGLang: prompts with their media, and parameters of sampling."""

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.config.rollout import SGLANG_SAMPLING
from verl.data.media.decoded import DecodedMedia, media_in_order, shape_of
from verl.models.families.registry import media_family_of
from verl.models.layer_configs import experts_per_layer, experts_per_token
from verl.models.mixture.routes import route_dtype
from verl.workers.rollout.interface import SamplingOptions


def text_prompt(ids: list[int]) -> dict[str, Any]:
    return {"input_ids": list(ids)}


def media_prompt(ids: list[int], media: DecodedMedia, processor: Any, hf_config: Any) -> dict[str, Any]:
    """Return SGLang's arguments for a prompt with media: expanded tokens, what encoders read, and positions.

    SGLang waits forever for expanded tokens with pixels, and would compute the positions of videos itself.
    """
    family = media_family_of(hf_config)
    shape = shape_of(family, processor, media)
    given = media_in_order(family, processor, ids, media, shape)
    expanded = torch.tensor(family.expand(processor, ids, shape))
    output: dict[str, Any] = {"format": "processor_output"}
    positions = family.positions(hf_config, expanded, shape)
    if positions is not None:
        output["mrope_positions"] = positions[-3:]  # after those of the text: times, rows, columns
        output["mrope_position_delta"] = (positions[-3:].max() + 1 - len(expanded)).view(1, 1)
    prompt = text_prompt(expanded.tolist())
    for kind in ("image", "video", "audio"):
        its = [medium for medium in given if medium.kind == kind]
        if its:
            prompt[f"{kind}_data"] = [output | family.own_inputs(its)]
    return prompt


def routes_of(returned: str, layers: Sequence[int], text: Any) -> Tensor:
    """Return the experts (tokens, L, k) of a sequence's tokens but the last.

    Args:
        returned: SGLang's `routed_experts`: int32 of all layers, in base64.
        layers: Numbers of the L layers with experts.
        text: The language model's config.
    """
    experts = np.frombuffer(base64.b64decode(returned), dtype=np.int32)
    by_layer = experts.reshape(-1, text.num_hidden_layers, experts_per_token(text))
    return torch.from_numpy(by_layer[:, layers].astype(np.int64)).to(route_dtype(experts_per_layer(text)))


def sampling_params(
    sampling: SamplingOptions, banned: Iterable[int], ends: Iterable[int], max_tokens: int, seed: int
) -> dict[str, Any]:
    """Convert options to SGLang's `SamplingParams` for one response.

    Args:
        banned: Tokens that are not sampled.
        ends: Tokens that end a response.
        max_tokens: Longest response, instead of that of the options.
        seed: Seed of the response's random numbers.
    """
    extra = dict(sampling.extra)
    if unknown := sorted(extra.keys() - set(SGLANG_SAMPLING)):
        raise ValueError(
            f"`worker.rollout.name=sglang` cannot sample with {unknown}: it takes {SGLANG_SAMPLING} only"
        )
    bias = {str(token): value for token, value in (extra.pop("logit_bias", None) or {}).items()}
    bias |= dict.fromkeys(map(str, banned), float("-inf"))
    stops = [*(extra.pop("stop_token_ids", None) or ()), *(() if sampling.ignore_eos else ends)]
    return extra | dict(
        temperature=0.0 if sampling.is_greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k if sampling.top_k > 0 else -1,
        max_new_tokens=max_tokens,
        ignore_eos=sampling.ignore_eos,
        sampling_seed=seed,
        stop_token_ids=stops or None,
        logit_bias=bias or None,
    )
