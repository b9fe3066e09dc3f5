# SPDX-License-Identifier: Apache-2.0
"""Plain transformers generation as a rollout engine: the reference, and the fallback without vLLM.

Each process holds a whole copy of the model. It does not sample with the policy's own FSDP2 module, whose
attention takes packed rows and no cache, and whose collectives would tie every rank to the longest response
of all. `batches.py` generates.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from verl.data.media.decoded import media_in_order, shape_of
from verl.distributed.device import to_device
from verl.distributed.fsdp import torch_dtype
from verl.models.auto import AutoProcessor, AutoTokenizer
from verl.models.families.interface import MediaFamily, MediaShape, Medium
from verl.models.families.registry import family_of, media_family_of
from verl.models.fp8_weights import weights_in_fp8
from verl.models.hub_names import auto_class
from verl.models.mixture.routing import ChoicePass, ExpertChoices
from verl.workers.model_builder import end_token_ids, read_config
from verl.workers.rollout.hf.batches import PreparedPrompt, RunningBatch
from verl.workers.rollout.interface import (
    INTERRUPTED,
    EngineSetup,
    FinishedResponse,
    RolloutEngine,
    RolloutRequest,
    SamplingOptions,
    media_token_ids,
)
from verl.workers.rollout.processed_media import with_media


class HFRollout(RolloutEngine):
    """The rollout engine `worker.rollout.name=hf`.

    Waiting prompts are prefilled together, and each such batch advances by itself.

    Not supported: tensor parallelism, and fields of vLLM's `SamplingParams` beyond those of
    `SamplingOptions`.
    """

    def __init__(self, config: Any, setup: EngineSetup) -> None:
        super().__init__()
        if config.tensor_parallel_size != 1:
            raise NotImplementedError(
                "`worker.rollout.name` hf holds the whole model in each process:"
                f" `worker.rollout.tensor_parallel_size` must be 1, got {config.tensor_parallel_size}"
            )
        self.device, self.dtype = setup.device, torch_dtype(config.dtype)
        self.takes_embeddings = self.embeds_prompts = self.takes_adapter = False
        self.keeps_weights = False  # a sync builds the model again
        self.records_routes = setup.records_routes
        self.max_length = config.max_model_len or setup.max_length
        self.max_prompt_tokens = config.max_num_batched_tokens
        trust: Any = {"trust_remote_code": setup.trust_remote_code}
        self.hf_config = read_config(setup.model_path, overrides=setup.override_config, **trust)
        self.family = family_of(self.hf_config)
        self.banned = media_token_ids(self.hf_config)
        tokenizer_path = setup.tokenizer_path or setup.model_path
        self.processor = AutoProcessor.from_pretrained(tokenizer_path, **trust) if self.banned else None
        if setup.media is not None and self.processor is not None:
            setup.media.outputs.remember_calls(self.processor)
        with weights_in_fp8(setup.model_path):
            model = auto_class(self.hf_config).from_pretrained(
                setup.model_path, config=self.hf_config, dtype=self.dtype, **trust
            )
        self.model: Any = self._to_device(model)
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, **trust)
        self.end_ids = end_token_ids(tokenizer, self.model.generation_config)
        self.generator = torch.Generator(self.device).manual_seed(config.seed + setup.dp_rank)
        self.waiting: deque[PreparedPrompt] = deque()
        self.batches: list[RunningBatch] = []

    @torch.inference_mode()
    def stream(self, request: RolloutRequest, sampling: SamplingOptions) -> Iterator[int]:
        """Sample one response and yield each token at once, the one that ends it included."""
        self.wake()
        [prompt] = self._prepare_all([request], replace(sampling, n=1))
        batch = self._prefill([prompt])
        [row] = batch.rows
        while not row.finished:
            batch.advance()
            yield row.response.token_ids[-1]

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._check_idle()
        weights = {
            name: tensor.detach().to(self.device, self.dtype, copy=True) for name, tensor in named_tensors
        }
        model_class, generation_config = type(self.model), self.model.generation_config
        self.model = None  # frees the old weights before the new ones are loaded
        model, report = model_class.from_pretrained(
            None, config=self.hf_config, state_dict=weights, dtype=self.dtype, output_loading_info=True
        )
        missing = sorted(report["missing_keys"])
        if missing:
            raise RuntimeError(f"weight sync did not reach parameters of the rollout engine: {missing}")
        model.generation_config = generation_config
        self.model = self._to_device(model)

    def sync_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        raise NotImplementedError("`worker.rollout.name=hf` takes whole weights, adapters folded into them")

    def wake(self) -> None:
        self.model.to(self.device)

    def sleep(self) -> None:
        self._abort_all()
        self.model.to("cpu")

    def rng_state(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def set_rng_state(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])

    def close(self) -> None:
        self.model = None

    def _to_device(self, model: Any) -> Any:
        self.family.repair(model)
        self.choices = ExpertChoices(model) if self.records_routes else None
        return model.to(self.device).eval().requires_grad_(False)

    def _sampling(self) -> AbstractContextManager[Any]:
        return torch.inference_mode()

    @torch.inference_mode()
    def _accept(self, requests: Sequence[RolloutRequest], sampling: SamplingOptions) -> None:
        self.wake()
        self.waiting += self._prepare_all(requests, sampling)

    def _advance(self) -> list[FinishedResponse]:
        prompts = self._next_prompts()
        if prompts:
            self.batches.append(self._prefill(prompts))
        assert self.batches, "requests were lost"
        finished = [response for batch in self.batches for response in batch.advance()]
        self._forget_done()
        return finished

    def _begun(self) -> list[FinishedResponse]:
        begun = [response for batch in self.batches for response in batch.begun()]
        for prompt in self.waiting:
            begun += [
                FinishedResponse(prompt.uid, sample, [], [], INTERRUPTED)
                for sample in range(prompt.sampling.n)
            ]
        return begun

    def _drop(self, uids: set[Any]) -> None:
        self.waiting = deque(prompt for prompt in self.waiting if prompt.uid not in uids)
        with torch.inference_mode():
            for batch in self.batches:
                batch.drop(uids)
        self._forget_done()

    def _forget_done(self) -> None:
        self.batches = [batch for batch in self.batches if not batch.is_done]

    def _next_prompts(self) -> list[PreparedPrompt]:
        # at most `max_num_batched_tokens` tokens of prompts at once with padding, but always one prompt
        room = self.max_prompt_tokens - sum(batch.num_prompt_tokens for batch in self.batches)
        prompts: list[PreparedPrompt] = []
        while self.waiting and self.waiting[0].joins((prompts or self.waiting)[0]):
            more = [*prompts, self.waiting[0]]
            padded = len(more) * max(len(prompt.input_ids) for prompt in more)
            if padded > room and (self.batches or prompts):
                break
            prompts.append(self.waiting.popleft())
        return prompts

    def _prefill(self, prompts: list[PreparedPrompt]) -> RunningBatch:
        cache = DynamicCache(config=self.hf_config)
        return RunningBatch(prompts, cache, self._forward, self.end_ids, self.banned, self.device)

    def _prepare_all(
        self, requests: Sequence[RolloutRequest], sampling: SamplingOptions
    ) -> list[PreparedPrompt]:
        if sampling.extra:
            raise ValueError(
                f"`worker.rollout.name` hf cannot sample with {sorted(sampling.extra)}: vllm can"
            )
        generators = dict.fromkeys((request.seed_offset for request in requests), self.generator)
        if sampling.seed is not None:
            for offset in generators:
                generators[offset] = torch.Generator(self.device).manual_seed(sampling.seed + offset)
        return [self._prepare(request, sampling, generators[request.seed_offset]) for request in requests]

    def _prepare(
        self, request: RolloutRequest, sampling: SamplingOptions, generator: torch.Generator
    ) -> PreparedPrompt:
        request = with_media(request)
        media, shape, ids = [], MediaShape(), list(request.prompt_token_ids)
        if request.media:
            family = media_family_of(self.hf_config)
            shape = shape_of(family, self.processor, request.media)
            expanded = family.expand(self.processor, ids, shape)
            media = media_in_order(family, self.processor, ids, request.media, shape)
            ids = expanded
        if len(ids) >= self.max_length:
            raise ValueError(
                f"the prompt {request.uid} has {len(ids)} tokens and no room for a response:"
                f" `worker.rollout.max_model_len` is {self.max_length}"
            )
        input_ids = torch.tensor(ids)
        position_ids = self.family.positions(self.hf_config, input_ids, shape)
        if position_ids is None:
            position_ids = torch.arange(len(ids))
        limit = min(request.response_limit(sampling), self.max_length - len(ids))
        return PreparedPrompt(request.uid, input_ids, position_ids, media, sampling, limit, generator)

    def _forward(
        self,
        input_ids: Tensor,
        mask: Tensor,
        position_ids: Tensor,
        cache: Any,
        media: list[Medium],  # of prompts
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the last position, (B, V) float32, and routes (B, T, L, k) of all tokens."""
        inputs = {"input_ids": input_ids, "attention_mask": mask, "position_ids": position_ids}
        inputs |= self.family.own_arguments(self.hf_config, input_ids)
        if media and isinstance(self.family, MediaFamily):
            inputs |= self.family.own_inputs(to_device(media, self.device))
        inputs |= {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        if self.choices is None:
            return self.model(**inputs).logits[:, -1].float(), None
        with self.choices.running(ChoicePass(records=True)) as found:
            output = self.model(**inputs)
        return output.logits[:, -1].float(), found.routes().unflatten(0, input_ids.shape)
