# SPDX-License-Identifier: Apache-2.0
"""What to do when a GPU's memory runs out, said with torch's own error."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SIZES = {  # by phase: the micro batch size that it depends on
    "old": "worker.actor.micro_batch_size_per_device_for_experience",
    "ref": "worker.actor.micro_batch_size_per_device_for_experience",
    "validation": "worker.actor.micro_batch_size_per_device_for_experience",
    "update_actor": "worker.actor.micro_batch_size_per_device_for_update",
    "values": "worker.critic.micro_batch_size_per_device_for_experience",
    "update_critic": "worker.critic.micro_batch_size_per_device_for_update",
    "process_rewards": "worker.prime.micro_batch_size_per_device_for_experience",
    "prime_ref": "worker.prime.micro_batch_size_per_device_for_experience",
    "update_prime": "worker.prime.micro_batch_size_per_device_for_update",
    "reward_model": "worker.reward_model.micro_batch_size_per_device",
}


@contextmanager
def explained_out_of_memory(phase: str) -> Iterator[None]:
    """Add the option that lowers a phase to the error of memory that ran out in it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        option = SIZES.get(phase)
        advice = f"set `{option}` to a smaller number" if option else "leave more of the GPU free"
        error.add_note(f"{phase}: {advice}; `--dry-run` prints what each phase takes")
        raise
