# SPDX-License-Identifier: Apache-2.0
"""The memory of a rollout engine beside the models that are trained."""

from dataclasses import dataclass

from verl.config.rollout import RolloutConfig
from verl.planning import memory_model
from verl.planning.machine import GIB, Machine
from verl.planning.memory_model import ModelShape
from verl.planning.phases import Item

VLLM_BYTES = GIB // 4  # of its process beside that of a worker; an estimate
CPU_SEQUENCES = 256  # that vLLM's cache on CPU is made for, see `rollout/vllm_inputs.py`
MAX_CPU_CACHE = GIB


@dataclass(frozen=True)
class PlannedEngine:
    """An engine, as far as its memory depends on the options.

    Attributes:
        options: Its section.
        prompts: That one engine gets in a call.
        max_prompt_length: Tokens.
        max_sequence_length: Tokens of prompt and response.
        max_model_len: Tokens of a sequence that it is built for.
    """

    options: RolloutConfig
    prompts: int
    max_prompt_length: int
    max_sequence_length: int
    max_model_len: int

    @property
    def number(self) -> int:
        """Bytes of a weight, and of an attention state."""
        return {"fp32": 4}.get(self.options.dtype, 2)

    @property
    def process_bytes(self) -> int:
        """What its code takes of a worker's process."""
        return VLLM_BYTES if self.options.name == "vllm" else 0

    def weights(self, policy: ModelShape) -> int:
        """Its copy of the policy, on one rank."""
        return self.number * policy.params // self.options.tensor_parallel_size

    def cpu_cache(self, policy: ModelShape) -> int:
        """Keys and values on CPU: vLLM's cache, or those of the prompts that `hf` runs together."""
        token = memory_model.cache_bytes_per_token(policy.text, self.number)
        if self.options.name == "hf":
            prompts = max(1, self.options.max_num_batched_tokens // self.max_prompt_length)
            return min(prompts, self.prompts) * self.options.n * self.max_sequence_length * token
        sequence = (-(-self.max_model_len // 128) + 1) * 128 * token
        return max(4 * sequence, min(CPU_SEQUENCES * sequence, MAX_CPU_CACHE))

    def sampling(self, policy: ModelShape, machine: Machine) -> list[Item]:
        """What is there beside the models while it samples, and while it gets their weights."""
        whole = max(policy.head, policy.text.params) * policy.stored // policy.params
        items = [Item("a gathered weight", whole)]
        if machine.device == "cuda":
            items.append(Item("engine", int(self.options.gpu_memory_utilization * machine.device_bytes)))
        elif self.options.name == "hf":
            items.append(Item("weights in exchange", self.weights(policy)))
        return items
