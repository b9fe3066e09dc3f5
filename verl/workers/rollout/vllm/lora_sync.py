# SPDX-License-Identifier: Apache-2.0
"""Load trained adapters into vLLM as adapters: megabytes instead of the whole model, and no rounding.

The engine reads the base from its files and applies the adapter itself. Adapters that it cannot serve
(`why_merged`) are folded into the weights of each sync.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from verl.config.rollout import RolloutConfig
from verl.models.families.interface import is_part
from verl.models.families.registry import family_of
from verl.models.fp8_weights import stored_block
from verl.models.lora import adapted_layers, adapted_parameters, joint_experts
from verl.models.lora_weights import AdapterConfig, is_adapter, peft_config, peft_name
from verl.utils.rank_logger import get_logger
from verl.workers.rollout.interface import EngineAdapter

logger = get_logger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's `max_lora_rank`
ADAPTER_ID = 1


def engine_adapter(
    model: PreTrainedModel, config: AdapterConfig, rollout: RolloutConfig, device: str
) -> EngineAdapter | None:
    """Return the adapter that an engine serves; None if adapters are folded in, and the log says why."""
    modules = tuple(adapted_layers(model))
    reason = why_merged(model, config, modules, rollout.name, device)
    if reason is None and rollout.lora_sync == "merged":
        reason = "`worker.rollout.lora_sync=merged`"
    # a sync takes 45 ms less, sampling 64 x 64 tokens 8 s more (35 M parameters)
    if reason is None and rollout.lora_sync == "auto" and device == "cpu":
        reason = "on CPU vLLM samples three times slower with adapters"
    if reason is None and rollout.quantization is not None:
        reason = f"`worker.rollout.quantization={rollout.quantization}` quantizes whole weights"
    if reason is None and config.base is not None and stored_block(config.base) is not None:
        reason = "the base's files have weights in FP8, which vLLM would not expand"
    if reason is None:
        return EngineAdapter(config, modules)
    if rollout.lora_sync == "adapter":
        raise ValueError(
            f"`worker.rollout.lora_sync=adapter` is not possible: {reason}: use `auto` or `merged`"
        )
    logger.info("adapters are folded into the engine's weights: %s", reason)
    return None


def why_merged(
    model: PreTrainedModel, config: AdapterConfig, modules: Sequence[str], engine: str, device: str
) -> str | None:
    """The reason that an engine cannot serve an adapter; None if it can."""
    if engine != "vllm":
        return f"`worker.rollout.name={engine}` takes whole weights"
    trained = [
        name for name, param in model.named_parameters() if param.requires_grad and not is_adapter(name)
    ]
    if trained:
        return f"{len(trained)} weights are trained in addition to the adapters, for example {trained[0]}"
    if device == "cpu" and joint_experts(model):  # with adapters they run in Triton, adapted or not
        return "on CPU vLLM serves no adapters of a model with joint experts"
    experts = adapted_parameters(model)
    if experts:
        return f"{len(experts)} tensors of `target_parameters` have adapters, for example {experts[0].name}"
    if config.use_dora:
        return "vLLM does not serve DoRA"
    if config.rank > RANKS[-1]:
        return f"vLLM serves ranks up to {RANKS[-1]}, the adapter has {config.rank}"
    encoder = family_of(model.config).encoder
    in_tower = [name for name in modules if is_part(name, encoder)]
    if in_tower:
        return f"{len(in_tower)} adapted modules are in the vision tower, for example {in_tower[0]}"
    return None


def adapter_arguments(adapter: EngineAdapter) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for an engine that serves one adapter on a base read from its files."""
    max_rank = next(rank for rank in RANKS if rank >= adapter.config.rank)
    # by default the engine keeps buffers for every linear layer, and for the head
    layers = sorted({name.rpartition(".")[2] for name in adapter.modules})
    return dict(
        enable_lora=True, max_loras=1, max_lora_rank=max_rank, lora_target_modules=layers, load_format="auto"
    )


def adapter_request() -> Any:
    """The adapter of a request; the path is never read, since the adapter is loaded already."""
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - after vLLM's environment

    return LoRARequest(lora_name="policy", lora_int_id=ADAPTER_ID, lora_path="memory")


def load_adapter(engine: Any, adapter: EngineAdapter, tensors: Mapping[str, Tensor]) -> None:
    """Replace the adapter that vLLM's `LLMEngine` serves; no request may be running."""
    from vllm.lora.lora_model import LoRAModel  # noqa: PLC0415 - after vLLM's environment
    from vllm.lora.peft_helper import PEFTHelper  # noqa: PLC0415

    manager = engine.model_executor.driver_worker.worker.model_runner.lora_manager
    adapters = manager._adapter_manager
    mapper: Any = getattr(adapters.model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        # cloned, because vLLM multiplies the scale into them
        {peft_name(name): tensor.clone() for name, tensor in tensors.items()},
        PEFTHelper.from_dict(peft_config(adapter.config, adapter.modules)),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_without_joining(mapper),
    )
    _check_all_applied(adapters, lora)
    manager.remove_adapter(ADAPTER_ID)
    adapters.add_adapter(lora)
    adapters.activate_adapter(ADAPTER_ID)


def _without_joining(mapper: Any) -> Any:
    # the manager joins the adapters of q, k and v itself, and finds them by their own names
    methods = ("get_rename_mapper", "get_unstacked_mapper")  # of vLLM 0.32 and 0.26
    rename = next((getattr(mapper, name) for name in methods if hasattr(mapper, name)), None)
    if mapper is not None and rename is None:
        raise RuntimeError(f"this vLLM's {type(mapper).__name__} has none of {', '.join(methods)}")
    return rename() if rename else None


def _check_all_applied(adapters: Any, lora: Any) -> None:
    # the engine silently drops adapters that it has no layer for
    known = set(adapters.modules)
    for module, parts in adapters.packed_modules.items():
        known |= {*parts, module}
    lost = sorted(name for name in lora.loras if name not in known)
    if lost:
        raise RuntimeError(f"the rollout engine has no layer for {len(lost)} adapters, for example {lost[0]}")
