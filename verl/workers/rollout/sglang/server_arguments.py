# SPDX-License-Identifier: Apache-2.0
"""Convert the options of `worker.rollout` to the arguments of SGLang's engine."""

import os
from typing import Any

from verl.config.files.fp8_files import KEY
from verl.config.parsing import merged
from verl.distributed.device import is_gpu
from verl.distributed.fsdp import torch_dtype
from verl.models.fp8_weights import stored_block
from verl.models.layer_configs import layer_heads
from verl.workers.rollout.interface import EngineSetup

CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCH_COMPILE_DISABLE": "1",  # compiles small helpers for seconds otherwise
    # engines share the cores as OMP_NUM_THREADS says
    "SGLANG_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
}
ENVIRONMENT = {
    "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",
    "PYTHONWARNINGS": "ignore::UserWarning",  # of quantizations that the device lacks, at every import
}


def engine_environment(device: str) -> dict[str, str]:
    return ENVIRONMENT if is_gpu(device) else ENVIRONMENT | CPU_ENVIRONMENT


def engine_arguments(config: Any, setup: EngineSetup, hf_config: Any, max_length: int) -> dict[str, Any]:
    """Arguments of SGLang's `ServerArgs` for the section `worker.rollout`."""
    arguments: dict[str, Any] = dict(
        model_path=setup.model_path,
        tokenizer_path=setup.tokenizer_path,
        trust_remote_code=setup.trust_remote_code,
        skip_tokenizer_init=True,
        load_format="dummy",  # weights are synced
        dtype=str(torch_dtype(config.dtype)).removeprefix("torch."),
        device=setup.device,
        random_seed=config.seed,
        tp_size=config.tensor_parallel_size,
        context_length=max_length,
        chunked_prefill_size=config.max_num_batched_tokens if config.enable_chunked_prefill else -1,
        max_prefill_tokens=config.max_num_batched_tokens,
        max_running_requests=config.sequences_at_once(is_gpu(setup.device)),
        sampling_backend="pytorch",  # `scheduler.py` draws tokens
        sleep_on_idle=True,  # waits for requests instead of asking for them all the time, while others train
        enable_return_routed_experts=setup.records_routes,
        log_level="error",
    )
    overrides = dict(setup.override_config)
    if stored_block(setup.model_path) is not None:  # in the files; synced weights are not
        overrides[KEY] = None
    if overrides:
        arguments["json_model_override_args"] = overrides
    arguments |= (
        _gpu_arguments(config) if is_gpu(setup.device) else _cpu_arguments(config, hf_config, max_length)
    )
    return merged(arguments, config.engine_arguments)


def _gpu_arguments(config: Any) -> dict[str, Any]:
    return dict(
        mem_fraction_static=config.gpu_memory_utilization,
        enable_memory_saver=True,
        disable_cuda_graph=config.enforce_eager,
        enable_fp32_lm_head=True,
    )


def _cpu_arguments(config: Any, hf_config: Any, max_length: int) -> dict[str, Any]:
    text = hf_config.get_text_config()
    token_bytes = torch_dtype(config.dtype).itemsize * sum(
        2 * heads.keys * heads.dim for heads in layer_heads(text)
    )
    return dict(
        attention_backend="torch_native",
        mm_attention_backend="sdpa",
        disable_cuda_graph=True,
        max_total_tokens=config.cpu_cache_bytes(token_bytes, max_length) // token_bytes,
        disable_overlap_schedule=True,
    )
