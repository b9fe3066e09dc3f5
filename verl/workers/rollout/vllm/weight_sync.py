# SPDX-License-Identifier: Apache-2.0
"""Load trained weights into vLLM, one parameter at a time.

Names come as on the hub (`verl.models.hub_names.HubNames.convert`), which every loader of vLLM reads, except
for joint experts, which `expert_sync` loads; vLLM shards full tensors over its tensor-parallel ranks itself.
"""

import importlib
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.families.registry import family_of, transposed_experts
from verl.workers.rollout.vllm.expert_sync import EXPERTS, JointExperts

TIED_HEAD = "lm_head.weight"


def engine_weights(
    named_tensors: Iterable[tuple[str, Tensor]],
    hf_config: Any,
    dtype: torch.dtype,
    wide: Set[str] = frozenset(),  # ends of the names of weights that the engine holds in float32
) -> Iterator[tuple[str, Tensor]]:
    """Convert what `HubNames.convert` yields to what vLLM's `load_weights` reads, in the engine's dtype."""
    transposed, family = transposed_experts(hf_config), family_of(hf_config)
    for hub_name, tensor in named_tensors:
        name = family.engine_name(hub_name)
        # skipped, but consumed: producing it may be a collective operation
        if name is None or (hf_config.tie_word_embeddings and name.endswith(TIED_HEAD)):
            continue
        # transformers tells layouts apart by shape, so `HubNames` leaves square experts as they are in memory
        if name.endswith(transposed) and tensor.shape[-1] == tensor.shape[-2]:
            tensor = tensor.transpose(-1, -2)
        cast = tensor.is_floating_point() and _end(name) not in wide
        yield name, tensor.detach().to(dtype) if cast else tensor.detach()


def _end(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def load_into(
    model: Any,
    named_tensors: Iterable[tuple[str, Tensor]],
    hf_config: Any,
    dtype: torch.dtype,
    *,
    frozen: Set[str] = frozenset(),
    experts: JointExperts | None = None,
) -> set[str]:
    """Load trained weights into vLLM's module and return the parameters that got a value.

    These must be all, or all but `frozen`, which an earlier sync loaded. `experts` loads the slices of joint
    experts that the stream has.
    """
    # rounded to bfloat16, the biases by which experts are chosen would choose others
    names = {name for name, _ in model.named_parameters()}  # before quantization adds scales
    wide = {_end(name) for name, param in model.named_parameters() if param.dtype == torch.float32}
    others = named_tensors if experts is None else experts.load(named_tensors)
    weights = engine_weights(others, hf_config, dtype, wide)
    reported = set(model.load_weights(weights))
    for _ in weights:  # a loader may stop early, but gathering is collective
        pass
    reported |= set() if experts is None else experts.complete()
    # vLLM 0.26 reports a layer's experts by the name of the layer: `experts.w2_weight`
    loaded = {name for name in names if name in reported or name.replace(f"{EXPERTS}.", ".") in reported}
    missing = names - loaded
    if missing and missing != frozen:
        raise RuntimeError(f"weight sync did not reach parameters of the rollout engine: {sorted(missing)}")
    return loaded


def quantized_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of vLLM's module whose weights it quantizes while it loads them."""
    methods = ((layer, getattr(layer, "quant_method", None)) for layer in model.modules())
    return [layer for layer, method in methods if getattr(method, "uses_meta_device", False)]


@contextmanager
def reloading(model: nn.Module) -> Iterator[None]:
    """Let `load_weights` read weights in the engine's dtype, as before they were quantized.

    Inside, `named_parameters` are what is loaded, without scales. vLLM quantizes a layer as soon as all of it
    was loaded, into the memory of its old values, which captured graphs read; a layer that nothing was loaded
    into keeps what it had. Other layers stay as they are: vLLM's `reload_weights` would replace them as well.
    """
    layers = nn.ModuleList(quantized_layers(model))
    if not len(layers):
        yield
        return
    layerwise: Any = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    layerwise.initialize_layerwise_reload(layers)
    yield
    for layer in layers.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and not info.load_numel:  # vLLM would do the same, with a warning
            layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.finalize_layerwise_reload(layers, None)  # a config that only layers of attention read


def clear_caches(engine: Any) -> None:
    # attention states and media embeddings were computed with older weights; without the second an image seen
    # before keeps its old embeddings (log-probs off by more than 1)
    if not engine.reset_prefix_cache():
        raise RuntimeError("vLLM did not clear its prefix cache: requests are still running")
    engine.reset_encoder_cache()
