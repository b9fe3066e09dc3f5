# SPDX-License-Identifier: Apache-2.0
"""Defaults by device, such as number types and compilation on CPU, and for sampling ahead of training.

They rank below every value that a file or an argument gives, and a loaded config holds them like any other
value: `--dry-run` prints them. On GPUs the declared defaults apply. Needs no torch.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from verl.config.distillation import TEACHERS
from verl.config.model import AUTO
from verl.config.parsing import resolve_references
from verl.config.schema import ConfigError, list_options, load_config, value_at
from verl.config.trainer import RunConfig, RunTree, WorldProblem
from verl.distributed.backends import shown_backend

C = TypeVar("C", bound=RunTree)


def load_run_config(cls: type[C], arguments: Sequence[str] = ()) -> C:
    """Return the config that `arguments` describe, over the defaults of its device; see `load_config`."""
    problem = None

    def defaults_for(values: dict[str, Any]) -> dict[str, Any]:
        nonlocal problem
        if "${" in str(values):  # a reference may lead anywhere
            values = resolve_references(values)
        device = _option_of(values, "trainer.device")
        processes = _option_of(values, "trainer.n_gpus_per_node")
        if isinstance(processes, int) and not runs_on_gpu(device) and "RAY_ADDRESS" not in os.environ:
            problem = RunConfig(n_gpus_per_node=processes).core_problem()
        further = correction_defaults(values) | teacher_defaults(values, device)
        return device_defaults(cls, device) | further

    try:
        return load_config(cls, arguments, defaults_for=defaults_for)
    except ConfigError as error:
        # Batch sizes are for processes that the machine has.
        if problem is None or not any(isinstance(each, WorldProblem) for each in error.problems):
            raise
        raise ConfigError([problem, *error.problems]) from None


def correction_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Correct by default for weights older than the trained ones."""
    correction = "algorithm.rollout_correction"
    if _option_of(values, "trainer.async_training.mode") in (None, "off"):
        return {}
    if _option_of(values, f"{correction}.bypass_mode"):
        return {}  # the ratio in the loss is that of trainer to engine
    return {f"{correction}.rollout_is": "token"}


def device_defaults(cls: type, device: Any) -> dict[str, Any]:
    """Return the defaults that differ with `trainer.device=device`, by option; none with GPUs."""
    if runs_on_gpu(device):
        return {}
    defaults = cpu_defaults(len(os.sched_getaffinity(0)))
    keys = [entry.key for entry in list_options(cls)]
    return {key: value for name, value in defaults.items() for key in keys if f".{key}".endswith(f".{name}")}


def teacher_defaults(values: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """Compute with teachers in float32 on CPU, as with the policy."""
    teachers = _option_of(values, TEACHERS)
    if runs_on_gpu(device) or not isinstance(teachers, dict):
        return {}
    types = ("mp_param_dtype", "torch_dtype")
    return {f"{TEACHERS}.{name}.fsdp.{one}": "fp32" for name in teachers for one in types}


def cpu_defaults(cores: int) -> dict[str, Any]:
    """Return the defaults on CPU by the ends of the options' names."""
    return {
        "fsdp.mp_param_dtype": "fp32",  # many CPUs emulate bf16
        "ref.fsdp.torch_dtype": "fp32",  # so that the KL to the reference is 0 at the start
        "rollout.dtype": "fp32",
        "rollout.enforce_eager": True,  # compiling takes longer than what it saves
        "rollout.tensor_parallel_size": 1,
        "micro_batch_size_per_device_for_update": AUTO,
        "micro_batch_size_per_device_for_experience": AUTO,
        "micro_batch_size_per_device": AUTO,
        "data.num_workers": min(8, max(1, cores - 1)),
        "data.filter_overlong_prompts_workers": min(16, cores),
        "trainer.n_gpus_per_node": 1,
    }


def chosen_for_device(config: RunTree) -> dict[str, Any]:
    """Return the options of a loaded config that have the default of its device and not the declared one."""
    declared = {entry.key: entry.default for entry in list_options(type(config))}
    defaults: Mapping[str, Any] = device_defaults(type(config), config.trainer.device)
    return {
        key: value
        for key, value in defaults.items()
        if value_at(config, key) == value and value != declared[key]
    }


def runs_on_gpu(device: str) -> bool:
    return device != "cpu" and (device != "auto" or shown_backend() is not None)


def _option_of(values: Any, key: str) -> Any:
    """Return a value that is not checked yet; None if its section is none, or lacks it."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values
