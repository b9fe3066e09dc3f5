# SPDX-License-Identifier: Apache-2.0
"""Convert prompts and their media to vLLM's format."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.models.families.interface import KINDS, Kind, MediaFamily
from verl.models.families.registry import family_of, media_family_of
from verl.utils.rank_logger import get_logger
from verl.workers.rollout.interface import EmbeddedMedia, RolloutRequest

logger = get_logger(__name__)

READS_EMBEDDINGS = (0, 32)  # the first vLLM that was checked for it


def vllm_prompt(request: RolloutRequest, hf_config: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_token_ids)}
    if request.media is None:
        return prompt
    family, media = media_family_of(hf_config), request.media
    given: dict[Kind, list[Any]] = {kind: list(getattr(media, f"{kind}s")) for kind in KINDS}
    if isinstance(media, EmbeddedMedia):
        data = {kind: family.engine_features(kind, items) for kind, items in given.items() if items}
        return prompt | {"multi_modal_data": data}
    given["audio"] += media.sounds
    data = {kind: items for kind, items in given.items() if items}
    if data:
        prompt["multi_modal_data"] = data
    options = family.engine_options(data.keys(), [meta for _, meta in media.videos])
    if media.sounds:
        options = {**options, "use_audio_in_video": True}
    return prompt | {"mm_processor_kwargs": options} if options else prompt


@torch.no_grad()
def prompt_embeddings(request: RolloutRequest, hf_config: Any, embed: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the embeddings (L, hidden size) of an expanded prompt, with features where its media are.

    Args:
        embed: Returns the embeddings of tokens; a collective call with tensor parallelism.
    """
    assert isinstance(request.media, EmbeddedMedia), "the trainer encodes media for this engine"
    family, media = media_family_of(hf_config), request.media
    ids = torch.tensor(request.prompt_token_ids)
    embeddings = embed(ids)
    places = family.media_tokens(hf_config, ids)
    for kind in KINDS:
        parts = [medium.features for medium in getattr(media, f"{kind}s")]
        if parts:
            features = torch.cat(parts).to(embeddings)
            embeddings = embeddings.index_copy(0, places[kind].to(embeddings.device), features)
    return embeddings


def reads_embeddings(version: str, hf_config: Any) -> bool:
    """True if vLLM reads features instead of pixels for a model's images at least."""
    can = tuple(int(part) for part in version.split(".")[:2]) >= READS_EMBEDDINGS
    family = family_of(hf_config)
    if family.embeds_prompts:
        return True
    can = can and isinstance(family, MediaFamily) and family.takes_features
    if not can:
        logger.warning(
            "the rollout engine encodes media again: model=%s vllm=%s take no features",
            hf_config.model_type,
            version,
        )
    return can
