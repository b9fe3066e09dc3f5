# SPDX-License-Identifier: Apache-2.0
"""Rules of `fsdp.tensor_parallel_size`, which divides the layers of a model over ranks.

What was not shown to compute the same as one process is refused. Rules of the model itself, such as its
heads, are in `models/divided_layers.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verl.config.model import FSDPConfig, TrainedModelConfig
from verl.config.schema import value_at

ACTOR = "worker.actor"
NODE = "`trainer.n_gpus_per_node`"
WORLD = f"`trainer.nnodes` x {NODE}"
OPTIMIZERS = ("adamw", "adamw_bf16", "adamw_bf16_sr")  # that update every number of a weight by itself


def tensor_parallel_problems(
    run: Any, sharding: Mapping[str, FSDPConfig], divisible: Callable[..., Iterator[str]]
) -> Iterator[str]:
    """Yield what is wrong with the models whose layers are divided.

    Args:
        run: The config of a run, a `RunTree`.
        sharding: The section `fsdp` of each loaded model, by the section that it is in.
        divisible: The function of `trainer.py`, which imports this file.
    """
    ranks = run.worker.actor.fsdp.tensor_parallel_size
    for section, fsdp in sharding.items():
        key, size = f"`{section}.fsdp.tensor_parallel_size`", fsdp.tensor_parallel_size
        if size == 1:
            continue
        if size != ranks:
            yield (
                f"{key} ({size}) must be 1 or `{ACTOR}.fsdp.tensor_parallel_size` ({ranks}), by which the"
                " ranks share rows"
            )
            continue
        yield from divisible(NODE, run.trainer.n_gpus_per_node, key, size)
        shared = f"{key} x `{ACTOR}.ulysses_size` x `{ACTOR}.ring_size`"
        if section == ACTOR and run.world_size % size == 0:  # otherwise the node has the cause
            yield from divisible(WORLD, run.world_size, shared, size * run.worker.actor.sp_size)
        if 0 < fsdp.fsdp_size < run.world_size:
            yield from divisible(f"`{section}.fsdp.fsdp_size`", fsdp.fsdp_size, key, size)
        for option, wanted, value in _required(run, section, fsdp):
            if value != wanted:
                yield f"{key} ({size}) must be 1 with `{option}={_text(value)}`: it needs {_text(wanted)}"
        optim = getattr(value_at(run, section) if section.startswith("worker.") else None, "optim", None)
        if optim is not None and optim.strategy not in OPTIMIZERS:
            yield (
                f"{key} ({size}) must be 1 with `{section}.optim.strategy={optim.strategy}`, which computes"
                f" with several numbers of a weight together: use one of {', '.join(OPTIMIZERS)}"
            )


def _required(run: Any, section: str, fsdp: FSDPConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield options with the value that dividing layers needs, and the one they have."""
    yield f"{section}.fsdp.expert_parallel_size", 1, fsdp.expert_parallel_size
    yield f"{section}.fsdp.enable_cpu_offload", False, fsdp.enable_cpu_offload
    actor: Any = run.worker.actor
    yield f"{ACTOR}.observers", (), getattr(actor, "observers", ())
    distillation = run.distillation
    if distillation.enabled and not distillation.distillation_loss.reads_sampled_tokens:
        yield "distillation.enabled", False, True  # it compares distributions
    yield "trainer.diffusion", False, getattr(run.trainer, "diffusion", False)
    owner = value_at(run, section) if section.startswith("worker.") else None
    model = getattr(owner, "model", actor.model)
    if isinstance(owner, TrainedModelConfig):
        yield f"{section}.model.lora.use_dora", False, model.lora.use_dora
        yield f"{section}.model.lora.target_parameters", [], model.lora.target_parameters
    if model.compile_blocks is True:
        yield f"{section}.model.compile_blocks", False, True


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
