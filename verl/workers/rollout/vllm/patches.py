# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM on every device.

One function for each patch, with what breaks without it. Each asserts that what it replaces or wraps exists,
so that a new version of vLLM fails here and not later in the numbers. Checked with vLLM 0.26.0 and 0.32.0.
Patches for CPUs are in `cpu_patches`, patches for some models in `family_patches`.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

Patch = Callable[[], None]  # safe to apply again


def apply_patches() -> None:
    """Apply the patches of this module, before an engine is built; safe to call again."""
    inspect_models_here()
    keep_buffers_of_empty_models()
    keep_process_group()
    keep_classes_of_transformers()


def replaceable(module: str, *names: str) -> Any:
    """Import a module, or a class as `module:class`, and check that it has what is to be replaced."""
    path, _, class_name = module.partition(":")
    owner: Any = importlib.import_module(path)
    owner = getattr(owner, class_name) if class_name else owner
    missing = [name for name in names if not hasattr(owner, name)]
    assert not missing, f"vLLM's {module} has no {missing}, which must be replaced"
    return owner


def wrap(module: str, name: str, ours: Callable[..., Any]) -> None:
    """Have a function of vLLM go through `ours`, which gets it as a further first argument; only once."""
    owner = replaceable(module, name)
    theirs = getattr(owner, name)
    if hasattr(theirs, "goes_through_verl"):
        return
    wrapped: Any = functools.wraps(theirs)(lambda *args, **kwargs: ours(theirs, *args, **kwargs))
    wrapped.goes_through_verl = True
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)


def replacing(module: str, name: str) -> Callable[[Callable[..., Any]], Patch]:
    """Turn a function into the patch that puts it in the place of one of vLLM."""
    return lambda ours: lambda: setattr(replaceable(module, name), name, ours)


def wrapping(module: str, name: str) -> Callable[[Callable[..., Any]], Patch]:
    """Turn a function into the patch that has one of vLLM go through it, see `wrap`."""
    return lambda ours: lambda: wrap(module, name, ours)


@replacing("vllm.model_executor.models.registry", "_run_in_subprocess")
def inspect_models_here(function: Callable[[], Any]) -> Any:
    """Stop vLLM from inspecting new model classes in a subprocess, which takes 10 s."""
    # it does so to keep CUDA out of the calling process, which uses CUDA here and imports the class anyway
    return function()


def keep_buffers_of_empty_models() -> None:
    """Stop `load_format="dummy"` from overwriting buffers, which weight sync does not restore."""
    # vLLM 0.32 keeps mean and deviation of pixels as buffers of the vision tower: without them log-probs of
    # prompts with images are off by 3
    loader = replaceable(
        "vllm.model_executor.model_loader.dummy_loader:DummyModelLoader",
        "load_weights", "_process_online_quant_layer",
    )  # fmt: skip
    fill: Any = importlib.import_module("vllm.model_executor.model_loader.weight_utils")
    layerwise: Any = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")

    def fill_parameters(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():  # to be quantized
                self._process_online_quant_layer(layer, info)
                continue
            for parameter in layer.parameters(recurse=False):
                fill.initialize_single_dummy_weight(parameter)

    loader.load_weights = fill_parameters


@replacing("vllm.v1.engine.core", "cleanup_dist_env_and_memory")
def keep_process_group() -> None:
    """Stop vLLM from destroying torch.distributed's default group when an engine or the process ends."""
    # training owns that group: it could not continue after `close`, and a process that has destroyed its
    # group itself would exit with a traceback
    if torch.distributed.is_initialized():
        importlib.import_module("vllm.distributed.parallel_state").destroy_model_parallel()


@replacing("vllm.model_executor.models.transformers.base:Base", "_decorate_cls_for_torch_compile")
def keep_classes_of_transformers(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stop vLLM from compiling models that it takes from transformers, for which it changes their classes."""
    # training uses the same classes: none of their models could be built, or would run, without vLLM's config
