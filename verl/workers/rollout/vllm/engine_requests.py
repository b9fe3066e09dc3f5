# SPDX-License-Identifier: Apache-2.0
"""Requests to vLLM: prompts with their media, parameters of sampling, and the log-probs of its tokens.

The engine samples at temperature 1, from logits that are divided by the temperature (`scale_logits`).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.models.families.interface import KINDS, Kind, MediaFamily
from verl.models.families.registry import family_of, media_family_of
from verl.utils.rank_logger import get_logger
from verl.workers.rollout.interface import EmbeddedMedia, RolloutRequest, SamplingOptions
from verl.workers.rollout.processed_media import content_of

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
    digests = [content_of(image) for image in given["image"]]
    if any(digests):  # where there is none, vLLM takes one of all pixels
        prompt["multi_modal_uuids"] = {"image": digests}
    options = family.engine_options(data.keys(), [meta for _, meta in media.videos])
    if media.sounds:
        options = {**options, "use_audio_in_video": True}
    return prompt | {"mm_processor_kwargs": options} if options else prompt


def unshared_tokens(prompt: Any) -> int:
    """Count the tokens of a rendered prompt from its first medium on: other prompts rarely share these."""
    ranges = [each for places in prompt.get("mm_placeholders", {}).values() for each in places]
    return len(prompt["prompt_token_ids"]) - min(each.offset for each in ranges) if ranges else 0


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


def sampling_params(
    sampling: SamplingOptions, banned: list[int], max_tokens: int, seed_offset: int, *, drafts: bool = False
) -> Any:
    """Convert options to vLLM's `SamplingParams` for one response.

    Args:
        max_tokens: Longest response, instead of that of the options.
        seed_offset: Added to the seed of the options, if they have one.
        drafts: The engine checks drafts, to which vLLM applies banned words but no biases.
    """
    from vllm import SamplingParams  # noqa: PLC0415 - after its environment
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    # vLLM gets temperature 1, because the logits are divided already (`scale_logits`); so
    # penalties and biases, which it adds to logits before its temperature, are divided here
    temperature = sampling.logit_temperature
    extra = dict(sampling.extra)
    for added in ("presence_penalty", "frequency_penalty"):
        if added in extra:
            extra[added] = extra[added] / temperature
    bias = {int(token): value / temperature for token, value in (extra.pop("logit_bias", None) or {}).items()}
    if not drafts:
        bias |= dict.fromkeys(banned, float("-inf"))
    known = SamplingParams.__struct_fields__
    unknown = sorted(set(extra) - set(known))
    if unknown:
        raise ValueError(f"vLLM's SamplingParams has no field {unknown}; it has {sorted(known)}")
    fields: dict[str, Any] = dict(
        n=1,
        temperature=0.0 if sampling.is_greedy else 1.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=max_tokens,
        ignore_eos=sampling.ignore_eos,
        seed=None if sampling.seed is None else sampling.seed + seed_offset,
        logit_bias=bias or None,
        logprobs=0,  # only the sampled token's
        flat_logprobs=True,
        detokenize=bool(extra.get("stop")),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # prompts share it; vLLM adds the same to it for all
    )
    fields |= extra
    params = SamplingParams(**fields)
    if drafts and banned:
        params._bad_words_token_ids = [[token] for token in banned]
    return params


def scale_logits(model: Any, temperature: Callable[[], float]) -> None:
    """Divide the logits of an engine's module by the temperature of the running requests.

    vLLM reports log-probs either of the unscaled logits or after top-p, top-k and banned tokens, but training
    needs softmax(logits / temperature) over the whole vocabulary. So the engine samples at temperature 1 from
    scaled logits. Sampling is the same: top-p, top-k and min-p follow the temperature in vLLM as well.
    """
    if getattr(model, "_suppress_token_ids", None):  # of the generation config; `banned` has them
        model._suppress_token_ids = None
    compute_logits: Callable[..., Tensor | None] = model.compute_logits

    @functools.wraps(compute_logits)
    def compute_scaled_logits(*args: Any, **kwargs: Any) -> Tensor | None:
        logits = compute_logits(*args, **kwargs)
        if logits is None:  # a rank that does not sample
            return None
        logits = logits.float()  # else the sampler does it, after a slower softmax in bfloat16
        return logits if temperature() == 1.0 else logits.div_(temperature())

    model.compute_logits = compute_scaled_logits


def check_sampling(vllm_config: Any) -> None:
    """Raise `RuntimeError` if vLLM would sample from other logits than those of `scale_logits`."""
    # vLLM 0.32 can give each tensor-parallel rank a part of the batch, by another method of the module
    if getattr(vllm_config.parallel_config, "enable_batch_sharded_sampling", False):
        raise RuntimeError(
            "vLLM's `enable_batch_sharded_sampling` is on: its log-probs would be those of unscaled logits"
        )


def sampled_log_probs(values: Any) -> list[float]:
    """Return the log-probs of the sampled tokens, which come first at every position."""
    return [values.logprobs[start] for start in values.start_indices]
