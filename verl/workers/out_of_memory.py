# SPDX-License-Identifier: Apache-2.0
"""Advice in out-of-memory errors: the phase, the option to change, its value and one to try."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl.config.schema import value_at

ENGINE_SHARE = "worker.rollout.gpu_memory_utilization"
MICRO_BATCH_OPTIONS = {  # by phase: the option that its peak memory depends on
    "old": "worker.actor.micro_batch_size_per_device_for_experience",
    "ref": "worker.actor.micro_batch_size_per_device_for_experience",
    "teacher": "worker.actor.micro_batch_size_per_device_for_experience",
    "validation": "worker.actor.micro_batch_size_per_device_for_experience",
    "update_actor": "worker.actor.micro_batch_size_per_device_for_update",
    "values": "worker.critic.micro_batch_size_per_device_for_experience",
    "update_critic": "worker.critic.micro_batch_size_per_device_for_update",
    "process_rewards": "worker.prime.micro_batch_size_per_device_for_experience",
    "prime_ref": "worker.prime.micro_batch_size_per_device_for_experience",
    "update_prime": "worker.prime.micro_batch_size_per_device_for_update",
    "reward_model": "worker.reward_model.micro_batch_size_per_device",
}
TRAINED = ("actor", "critic", "prime")
TEXTS = (  # of errors that are no `torch.OutOfMemoryError`
    "out of memory",  # CUDA, NCCL, and vLLM's allocator of memory that sleeps
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",  # torch on CPU
    "Free memory on device",  # vLLM at its start
)
CACHE_TEXT = "No available memory for the cache blocks"  # vLLM at its start: its share is too small
MAX_ADVICE = 3


@contextmanager
def explained_out_of_memory(phase: str, worker: Any) -> Iterator[None]:
    """Add advice to an out-of-memory error; `worker` is the section of the config with that name."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        needs_cache = CACHE_TEXT in str(error)
        if (
            needs_cache
            or isinstance(error, torch.OutOfMemoryError)
            or any(one in str(error) for one in TEXTS)
        ):
            found = _raised_share(worker) if needs_cache else _advice(phase, worker)
            advice = ", or ".join(list(found)[:MAX_ADVICE]) or "use more devices or a smaller model"
            error.add_note(f"{phase}: {advice}; `--dry-run` prints the memory of each phase")
        raise


def _advice(phase: str, worker: Any) -> Iterator[str]:
    """Yield what lowers the memory of a phase, first what costs least."""
    option = MICRO_BATCH_OPTIONS.get(phase)
    if option is not None:
        size = _value(option, worker)
        if isinstance(size, int) and size > 1:
            yield f"set `{option}` to {size // 2} (now {size})"
        role = option.split(".")[1]
        if phase.startswith("update") or phase == "validation":
            yield from _switched_on(f"worker.{role}.model.enable_gradient_checkpointing", worker)
    elif hasattr(worker, "rollout") and phase not in ("save_checkpoint", "load_checkpoint"):
        share = _value(ENGINE_SHARE, worker)
        if share > 0.15:  # the engine's part is what it shares with everything else
            yield f"set `{ENGINE_SHARE}` to {share - 0.1:.2g} (now {share:g})"
    for role in TRAINED:
        if hasattr(worker, role):
            yield from _switched_on(f"worker.{role}.offload.offload_optimizer", worker)
            yield from _switched_on(f"worker.{role}.offload.offload_params", worker)


def _raised_share(worker: Any) -> Iterator[str]:
    share = _value(ENGINE_SHARE, worker)
    yield f"set `{ENGINE_SHARE}` to {min(1.0, share + 0.1):.2g} (now {share:g})"
    size = _value("worker.rollout.tensor_parallel_size", worker)
    yield f"set `worker.rollout.tensor_parallel_size` to {2 * size} (now {size})"


def _switched_on(option: str, worker: Any) -> Iterator[str]:
    value = _value(option, worker)
    if value is not True:
        yield f"set `{option}` to true (now {str(value).lower()})"


def _value(option: str, worker: Any) -> Any:
    return value_at(worker, option.removeprefix("worker."))
