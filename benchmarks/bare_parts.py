# SPDX-License-Identifier: Apache-2.0
"""The parts of a GRPO step without the trainer: generation, forward, forward and backward.

`BareWorker` is the trainer's worker with methods for the bare parts. They run in the same processes, with the
same threads and on the same sequences as the step they are compared with, but without FSDP, packing, Ray
transfers and the fused head: vLLM's `LLM.generate`, and a plain transformers model with its own attention.
Because the processes are the same, two bare parts share the cores and the memory as two parts of a step do;
the trainer's own state is idle meanwhile.
"""

import time
from contextlib import AbstractContextManager

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.workers.fsdp_worker import FSDPWorker


class BareWorker(FSDPWorker):
    """A worker that can also run the bare parts of a step; each method returns the seconds on its rank."""

    @register(Dispatch.ALL, phase="bare_model")
    def load_bare_model(self, micro_batch_size: int, dtype: str) -> None:
        """Load a second copy of the model, unchanged from transformers.

        Args:
            micro_batch_size: Sequences per forward pass.
            dtype: "bfloat16" for the weights too; "autocast" for float32 weights and bfloat16 compute.
        """
        self.micro_batch_size = micro_batch_size
        self.uses_autocast = dtype == "autocast"
        path = self.config.actor.model.model_path
        held = torch.float32 if self.uses_autocast else torch.bfloat16
        self.bare_model = AutoModelForCausalLM.from_pretrained(path, dtype=held)

    @register(Dispatch.SHARD, phase="bare_gen", axis="rollout")
    def bare_generate(self, prompts: DataProto, num_tokens: int) -> float:
        """Generate as many tokens as the step did, with the same engine and options but no log-probs."""
        from vllm import SamplingParams  # noqa: PLC0415 - after its environment is set

        sampling = SamplingParams(
            n=self.config.rollout.n,
            temperature=self.config.rollout.temperature,
            top_p=self.config.rollout.top_p,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        requests = [{"prompt_token_ids": ids} for ids in prompts.non_tensor_batch["raw_prompt_ids"]]
        self.engine.llm.llm_engine.reset_prefix_cache()
        with self.engine.rng.active():
            start = self._start()
            outputs = self.engine.llm.generate(requests, sampling, use_tqdm=False)
            seconds = time.perf_counter() - start
        lengths = {len(one.token_ids) for output in outputs for one in output.outputs}
        assert lengths == {num_tokens}, f"every response must have {num_tokens} tokens, got {lengths}"
        return seconds

    @register(Dispatch.SHARD, phase="bare_forward")
    def bare_forward(self, batch: DataProto) -> float:
        """Compute the log-probs of the responses."""
        self.bare_model.eval()
        start = self._start()
        with torch.no_grad(), self._precision():
            for micro_batch in batch.split(self.micro_batch_size):
                bare_log_probs(self.bare_model, micro_batch)
        return time.perf_counter() - start

    @register(Dispatch.SHARD, phase="bare_update")
    def bare_update(self, batch: DataProto) -> float:
        """Compute the gradients of a policy loss, without a reduction over ranks or an optimizer step."""
        self.bare_model.train()
        start = self._start()
        for micro_batch in batch.split(self.micro_batch_size):
            with self._precision():
                log_probs = bare_log_probs(self.bare_model, micro_batch)
            ratio = torch.exp(log_probs - log_probs.detach())
            (-(ratio * micro_batch.batch["advantages"]).sum() / len(batch)).backward()
        seconds = time.perf_counter() - start
        self.bare_model.zero_grad(set_to_none=True)
        return seconds

    @register(Dispatch.ALL, phase="cpu_seconds")
    def cpu_seconds(self) -> float:
        """CPU time of this process, which excludes waiting and is independent of other load."""
        return time.process_time()

    def _start(self) -> float:
        """Wait for all ranks and return the time."""
        dist.barrier()
        return time.perf_counter()

    def _precision(self) -> AbstractContextManager:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.uses_autocast)


def bare_log_probs(model: nn.Module, batch: DataProto) -> Tensor:
    """Compute log-probs from the full logits of the response tokens, (B, R) float32."""
    tensors, length = batch.batch, batch.batch["responses"].shape[1]
    logits = model(
        input_ids=tensors["input_ids"],
        attention_mask=tensors["attention_mask"],
        position_ids=tensors["position_ids"],
        use_cache=False,
        logits_to_keep=length + 1,
    ).logits[:, :-1]  # (B, R, V)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tensors["responses"].flatten(), reduction="none")
    return -loss.view(-1, length)
