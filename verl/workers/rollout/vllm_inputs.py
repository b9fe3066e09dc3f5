# SPDX-License-Identifier: Apache-2.0
"""Convert options, prompts and media of this project to vLLM's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl.config.rollout import FP8
from verl.distributed.device import is_gpu
from verl.distributed.fsdp import torch_dtype
from verl.models.families.interface import KINDS, EncodedMedium, Family, Kind, MediaFamily
from verl.models.families.registry import family_of, kinds_of, media_family_of, trained_part
from verl.models.layer_configs import experts_per_token, layer_heads
from verl.utils.rank_logger import get_logger
from verl.workers.model_builder import apply_overrides
from verl.workers.rollout import vllm_patches
from verl.workers.rollout.base import (
    EmbeddedMedia,
    EngineSetup,
    RolloutRequest,
    SamplingOptions,
)
from verl.workers.rollout.lora_sync import adapter_arguments
from verl.workers.rollout.vllm_sleep import sleep_arguments

logger = get_logger(__name__)

# vLLM's names. Each row of a weight has a scale of its own, and each token's activations have one.
QUANTIZATIONS = {FP8: "fp8_per_channel"}
MAX_CPU_CACHE_BYTES = 1 << 30  # vLLM fills it with zeros at start, 2 seconds for each GiB
READS_EMBEDDINGS = (0, 32)  # the first vLLM that was checked for it


def engine_arguments(config: Any, setup: EngineSetup, hf_config: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for the section `worker.rollout`."""
    arguments: dict[str, Any] = dict(
        model=setup.model_path,
        tokenizer=setup.tokenizer_path,
        trust_remote_code=setup.trust_remote_code,
        load_format="dummy",  # weights are synced
        dtype=str(torch_dtype(config.dtype)).removeprefix("torch."),
        seed=config.seed,
        tensor_parallel_size=config.tensor_parallel_size,
        distributed_executor_backend="external_launcher",
        max_model_len=config.max_model_len or setup.max_length,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.sequences_at_once(is_gpu(setup.device)),
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_prefix_caching=True,
        enforce_eager=config.enforce_eager,
        disable_log_stats=config.disable_log_stats,
        mm_processor_cache_gb=0,  # no prompt comes twice in a step; it would hold 4 GiB in each process
    )
    arguments |= vllm_patches.media_arguments()
    if setup.adapter is not None:
        arguments |= adapter_arguments(setup.adapter)
    if setup.records_routes and is_gpu(setup.device):
        arguments["enable_return_routed_experts"] = True  # on CPU `engine_routes` records them
    family = family_of(hf_config)
    if embeds_prompts(family):
        arguments["enable_prompt_embeds"] = True
    elif setup.takes_embeddings:
        arguments["enable_mm_embeds"] = True
    head_dtype = _head_dtype(setup.device)
    # From our config, once: vLLM may call the function again for a config that it has changed.
    ours = family.engine_overrides(hf_config)
    if setup.override_config or head_dtype or ours or embeds_prompts(family):
        arguments["hf_overrides"] = partial(
            _overridden, overrides=dict(setup.override_config), ours=ours, head_dtype=head_dtype
        )
    if config.quantization is not None:
        arguments["quantization"] = QUANTIZATIONS[config.quantization]
    if config.speculative.is_used:
        arguments["speculative_config"] = config.speculative.engine_arguments()
    if config.limit_images and "image" in kinds_of(hf_config) and not embeds_prompts(family):
        arguments["limit_mm_per_prompt"] = {"image": config.limit_images}
    if setup.device == "cpu":
        cache_bytes = cpu_cache_bytes(hf_config, config, arguments["max_model_len"])
        if config.multi_turn.enable:
            # turns are seeded, and vLLM cannot rewind a CPU's generator after a part of a prompt
            tokens = max(config.max_num_batched_tokens, arguments["max_model_len"])
            arguments |= dict(enable_chunked_prefill=False, max_num_batched_tokens=tokens)
        # compiling on CPU takes 22 s and gains nothing
        return arguments | dict(enforce_eager=True, kv_cache_memory_bytes=cache_bytes)
    return arguments | _cuda_arguments(config, hf_config)


def _cuda_arguments(config: Any, hf_config: Any) -> dict[str, Any]:
    arguments = dict(
        gpu_memory_utilization=config.gpu_memory_utilization,
        disable_custom_all_reduce=True,  # shares memory between processes, which sleep mode frees
        **sleep_arguments(),
    )
    if config.tensor_parallel_size > 1:
        # the fused all-reduce of FlashInfer shares memory between processes as well
        arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if experts_per_token(hf_config.get_text_config()):
        # other backends reorder the experts' weights, which `load_weights` overwrites
        arguments["moe_backend"] = "triton"
    return arguments


def _head_dtype(device: str) -> str | None:
    # None is the dtype of the weights: on CPU the trainer rounds its logits too, and vLLM would convert the
    # whole head at each step, which makes sampling 2.6 times slower (35 M parameters, vocabulary 32,000)
    return "float32" if is_gpu(device) else None


def _overridden(
    hf_config: Any, overrides: dict[str, Any], ours: dict[str, Any], head_dtype: str | None
) -> Any:
    if type(hf_config) is PreTrainedConfig:  # an empty one, by which vLLM asks for another `model_type`
        return hf_config
    apply_overrides(trained_part(hf_config), overrides)
    for name, value in ours.items():
        for part in (hf_config, hf_config.get_text_config()):
            setattr(part, name, value)
    if head_dtype is not None:
        # else vLLM rounds logits to the weights' dtype, which the trainer does not; models with a vision
        # tower build their head from the nested config
        hf_config.head_dtype = hf_config.get_text_config().head_dtype = head_dtype
    return _language_model(hf_config) if embeds_prompts(family_of(hf_config)) else hf_config


def _language_model(hf_config: Any) -> Any:
    # vLLM finds its class by the name of transformers' class
    text = hf_config.get_text_config()
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type]]
    return text


def embeds_prompts(family: Family) -> bool:
    """Return whether vLLM runs the language model alone and reads prompts with media as embeddings."""
    return isinstance(family, MediaFamily) and family.embeds_prompts


def cpu_cache_bytes(hf_config: Any, config: Any, max_model_len: int) -> int:
    """Size of a cache for the sequences at once, at most 1 GiB, but always enough for four."""
    text = hf_config.get_text_config()
    values = sum(2 * heads.keys * heads.dim for heads in layer_heads(text))  # keys and values of a token
    token_bytes = values * torch_dtype(config.dtype).itemsize
    blocks_of_sequence = -(-max_model_len // 128) + 1  # vLLM's CPU cache has blocks of 128 tokens
    sequence_bytes = blocks_of_sequence * 128 * token_bytes
    sequences = config.sequences_at_once(on_gpu=False)
    return max(4 * sequence_bytes, min(sequences * sequence_bytes, MAX_CPU_CACHE_BYTES))


def reads_embeddings(version: str, hf_config: Any) -> bool:
    """True if vLLM reads features instead of pixels for a model's images at least."""
    can = tuple(int(part) for part in version.split(".")[:2]) >= READS_EMBEDDINGS
    family = family_of(hf_config)
    if embeds_prompts(family):
        return True
    can = can and isinstance(family, MediaFamily) and family.takes_features
    if not can:
        logger.warning(
            "the rollout engine encodes media again: model=%s vllm=%s take no features",
            hf_config.model_type,
            version,
        )
    return can


def vllm_prompt(request: RolloutRequest, hf_config: Any) -> dict[str, Any]:
    """Convert a prompt to vLLM's."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_token_ids)}
    if request.media is None:
        return prompt
    family = media_family_of(hf_config)
    if isinstance(request.media, EmbeddedMedia):
        return prompt | {"multi_modal_data": embedded_data(request.media, family)}
    data = {kind: list(getattr(request.media, f"{kind}s")) for kind in KINDS}
    data["audio"] += request.media.sounds
    data = {modality: items for modality, items in data.items() if items}
    if data:
        prompt["multi_modal_data"] = data
    options = family.engine_options(data.keys(), [meta for _, meta in request.media.videos])
    if request.media.sounds:
        options = {**options, "use_audio_in_video": True}
    return prompt | {"mm_processor_kwargs": options} if options else prompt


@torch.no_grad()
def prompt_embeddings(request: RolloutRequest, hf_config: Any, embed: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the embeddings (L, hidden size) of an expanded prompt with features in the places of its media.

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


def embedded_data(media: EmbeddedMedia, family: MediaFamily) -> dict[str, Any]:
    """Convert features to vLLM's multimodal data."""
    kinds: dict[Kind, list[EncodedMedium]] = {kind: getattr(media, f"{kind}s") for kind in KINDS}
    return {kind: family.engine_features(kind, items) for kind, items in kinds.items() if items}


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

    # vLLM gets temperature 1, because the logits are divided already (`vllm_patches.scale_logits`); so
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
