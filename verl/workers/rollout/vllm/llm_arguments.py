# SPDX-License-Identifier: Apache-2.0
"""Convert the options of `worker.rollout` to the arguments of `vllm.LLM`."""

import dataclasses
import importlib
from functools import partial
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl.config.parsing import merged
from verl.config.rollout import CPU_BLOCK, FP8, SpeculativeConfig
from verl.distributed.device import is_gpu
from verl.distributed.fsdp import torch_dtype
from verl.models.families.registry import family_of, trained_part
from verl.models.fp8_weights import drop_quantization, stored_block
from verl.models.layer_configs import experts_per_token, layer_heads
from verl.workers.model_builder import apply_overrides
from verl.workers.rollout.interface import EngineSetup
from verl.workers.rollout.vllm.lora_sync import adapter_arguments

# vLLM's names. Each row of a weight has a scale of its own, and each token's activations have one.
QUANTIZATIONS = {FP8: "fp8_per_channel"}


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
        mm_processor_cache_gb=0,  # `ProcessedMedia` keeps images, for the trainer as well
    )
    # the processor normalizes pixels, as in training: vLLM 0.32 normalizes videos with the mean and deviation
    # of images, and log-probs are off by 0.4 where the two differ; vLLM 0.26 has no such argument
    arguments |= known_arguments(mm_device_do_normalize=False)
    if setup.adapter is not None:
        arguments |= adapter_arguments(setup.adapter)
    if setup.records_routes and is_gpu(setup.device):
        arguments["enable_return_routed_experts"] = True  # on CPU `SlotRoutes` records them
    family = family_of(hf_config)
    if family.embeds_prompts:
        arguments["enable_prompt_embeds"] = True
    elif setup.takes_embeddings:
        arguments["enable_mm_embeds"] = True
    arguments |= _override_arguments(setup, hf_config)
    if config.quantization is not None:
        arguments["quantization"] = QUANTIZATIONS[config.quantization]
    if config.speculative.is_used:
        arguments["speculative_config"] = speculative_arguments(config.speculative)
    if config.limit_images and "image" in family.kinds and not family.embeds_prompts:
        arguments["limit_mm_per_prompt"] = {"image": config.limit_images}
    if setup.device == "cpu":
        arguments |= _cpu_arguments(config, hf_config, arguments["max_model_len"])
    else:
        arguments |= _cuda_arguments(config, hf_config)
    return merged(arguments, config.engine_arguments)


def _override_arguments(setup: EngineSetup, hf_config: Any) -> dict[str, Any]:
    # From our config, once: vLLM may call the function again for a config that it has changed.
    ours = family_of(hf_config).engine_overrides(hf_config)
    changes: dict[str, Any] = dict(overrides=dict(setup.override_config), ours=ours)
    changes |= dict(head_dtype=_head_dtype(setup.device), was_fp8=stored_block(setup.model_path) is not None)
    if any(changes.values()) or family_of(hf_config).embeds_prompts:
        return {"hf_overrides": partial(_overridden, **changes)}
    return {}


def speculative_arguments(options: SpeculativeConfig) -> dict[str, Any]:
    """Return vLLM's `speculative_config`."""
    arguments: dict[str, Any] = {"method": options.method, "num_speculative_tokens": options.num_tokens}
    if options.method == "ngram":
        return arguments | {
            "prompt_lookup_min": options.prompt_lookup_min,
            "prompt_lookup_max": options.prompt_lookup_max,
        }
    return arguments | {
        "suffix_decoding_max_tree_depth": options.suffix_max_tree_depth,
        "suffix_decoding_max_cached_requests": options.suffix_max_cached_requests,
    }


def _cpu_arguments(config: Any, hf_config: Any, max_model_len: int) -> dict[str, Any]:
    text = hf_config.get_text_config()
    values = sum(2 * heads.keys * heads.dim for heads in layer_heads(text))  # keys and values of a token
    cache_bytes = config.cpu_cache_bytes(values * torch_dtype(config.dtype).itemsize, max_model_len)
    # compiling on CPU takes 22 s and gains nothing
    arguments: dict[str, Any] = dict(enforce_eager=True, kv_cache_memory_bytes=cache_bytes)
    if config.multi_turn.enable:
        # turns are seeded, and vLLM cannot rewind a CPU's generator after a part of a prompt
        tokens = max(config.max_num_batched_tokens, max_model_len)
        arguments |= dict(enable_chunked_prefill=False, max_num_batched_tokens=tokens)
    if not hasattr(text, "kv_lora_rank"):  # latent attention has blocks of 16
        arguments["block_size"] = CPU_BLOCK
    return arguments


def _cuda_arguments(config: Any, hf_config: Any) -> dict[str, Any]:
    arguments = dict(
        gpu_memory_utilization=config.gpu_memory_utilization,
        disable_custom_all_reduce=True,  # shares memory between processes, which sleep mode frees
        enable_sleep_mode=True,
        # captured graphs take 1 to 2 GiB, which vLLM 0.26 cannot free
        **known_arguments(sleep_mode_offload_cudagraph=True),
    )
    if config.tensor_parallel_size > 1:
        # the fused all-reduce of FlashInfer shares memory between processes as well
        arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if experts_per_token(hf_config.get_text_config()):
        # other backends reorder the experts' weights, which `load_weights` overwrites
        arguments["moe_backend"] = "triton"
    return arguments


def known_arguments(**arguments: Any) -> dict[str, Any]:
    """Leave out the arguments of `vllm.LLM` that the installed version does not have."""
    known = dataclasses.fields(importlib.import_module("vllm.engine.arg_utils").EngineArgs)
    names = {entry.name for entry in known}
    return {name: value for name, value in arguments.items() if name in names}


def _head_dtype(device: str) -> str | None:
    # None is the dtype of the weights: on CPU the trainer rounds its logits too, and vLLM would convert the
    # whole head at each step, which makes sampling 2.6 times slower (35 M parameters, vocabulary 32,000)
    return "float32" if is_gpu(device) else None


def _overridden(
    hf_config: Any, overrides: dict[str, Any], ours: dict[str, Any], head_dtype: str | None, was_fp8: bool
) -> Any:
    if type(hf_config) is PreTrainedConfig:  # an empty one, by which vLLM asks for another `model_type`
        return hf_config
    if was_fp8:  # in the files; synced weights are not
        drop_quantization(hf_config)
    apply_overrides(trained_part(hf_config), overrides)
    for name, value in ours.items():
        for part in (hf_config, hf_config.get_text_config()):
            setattr(part, name, value)
    if head_dtype is not None:
        # else vLLM rounds logits to the weights' dtype, which the trainer does not; models with a vision
        # tower build their head from the nested config
        hf_config.head_dtype = hf_config.get_text_config().head_dtype = head_dtype
    if not family_of(hf_config).embeds_prompts:
        return hf_config
    # vLLM finds the class of a language model by the name of transformers' class
    text = hf_config.get_text_config()
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type]]
    return text
