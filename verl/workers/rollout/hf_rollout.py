# SPDX-License-Identifier: Apache-2.0
"""Plain transformers generation as a rollout engine: the reference, and the fallback without vLLM.

Each process holds a whole copy of the model. It does not sample with the policy's own FSDP2 module, whose
attention takes packed rows and no cache, and whose collectives would tie every rank to the longest response
of all. Prompts are padded on the left, run once, and their cache is repeated for their `n` responses.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer, DynamicCache, TopKLogitsWarper, TopPLogitsWarper

from verl.data.media.loader import media_in_order, shape_of
from verl.distributed.device import to_device
from verl.distributed.fsdp import torch_dtype
from verl.models.families.interface import MediaShape, Medium, VisionFamily
from verl.models.families.registry import family_of, vision_family_of
from verl.models.hub_names import auto_class
from verl.workers.model_builder import read_config
from verl.workers.rollout.base import (
    EngineSetup,
    FinishedResponse,
    RolloutRequest,
    SamplingOptions,
    media_token_ids,
)


class PreparedPrompt(NamedTuple):
    """One prompt as the model reads it."""

    uid: Any
    input_ids: Tensor  # (L,), media tokens expanded
    position_ids: Tensor  # (L,), or (4, L) for M-RoPE
    media: list[Medium]  # in the order of their tokens


class HFRollout:
    """The rollout engine `worker.rollout.name=hf`.

    Not supported: tensor parallelism, and fields of vLLM's `SamplingParams` beyond those of
    `SamplingOptions`.
    """

    def __init__(self, config: Any, setup: EngineSetup) -> None:
        if config.tensor_parallel_size != 1:
            raise NotImplementedError(
                "`worker.rollout.name` hf holds the whole model in each process:"
                f" `worker.rollout.tensor_parallel_size` must be 1, got {config.tensor_parallel_size}"
            )
        self.device, self.dtype = setup.device, torch_dtype(config.dtype)
        self.takes_embeddings = self.takes_adapter = False
        self.keeps_weights = False  # a sync builds the model again
        self.max_length = config.max_model_len or setup.max_length
        self.max_prompt_tokens = config.max_num_batched_tokens
        trust: Any = {"trust_remote_code": setup.trust_remote_code}
        self.hf_config = read_config(setup.model_path, overrides=setup.override_config, **trust)
        self.family = family_of(self.hf_config)
        self.banned = media_token_ids(self.hf_config)
        tokenizer_path = setup.tokenizer_path or setup.model_path
        self.processor = AutoProcessor.from_pretrained(tokenizer_path, **trust) if self.banned else None
        model = auto_class(self.hf_config).from_pretrained(
            setup.model_path, config=self.hf_config, dtype=self.dtype, **trust
        )
        self.model: Any = self._to_device(model)
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, **trust)
        self.end_ids = end_token_ids(tokenizer, self.model.generation_config)
        self.generator = torch.Generator(self.device).manual_seed(config.seed + setup.dp_rank)

    @torch.inference_mode()
    def generate(
        self, requests: list[RolloutRequest], sampling: SamplingOptions
    ) -> Iterator[list[FinishedResponse]]:
        """Sample responses and yield them as they finish; with `sampling.seed` a call has its own stream."""
        if sampling.extra:
            raise ValueError(
                f"`worker.rollout.name` hf cannot sample with {sorted(sampling.extra)}: vllm can"
            )
        self.wake()
        generator = self.generator
        if sampling.seed is not None:
            generator = torch.Generator(self.device).manual_seed(sampling.seed)
        prompts = [self._prepare(request) for request in requests]
        for batch in self._batches(prompts):
            yield from self._generate_batch(batch, sampling, generator)

    @torch.inference_mode()
    def stream(self, request: RolloutRequest, sampling: SamplingOptions) -> Iterator[int]:
        """Sample one response and yield each token at once, the one that ends it included."""
        self.wake()
        generator = self.generator
        if sampling.seed is not None:
            generator = torch.Generator(self.device).manual_seed(sampling.seed)
        prompt, cache = self._prepare(request), DynamicCache(config=self.hf_config)
        input_ids, mask, position_ids = (tensor.to(self.device) for tensor in pad_left([prompt]))
        logits = self._forward(input_ids, mask, position_ids, cache, prompt.media)
        for step in range(1, min(sampling.max_tokens, self.max_length - len(prompt.input_ids)) + 1):
            tokens, _ = sample_tokens(logits, sampling, self.banned, generator)
            token = int(tokens)
            yield token
            if token in self.end_ids and not sampling.ignore_eos:
                return
            mask = torch.cat([mask, mask.new_ones(1, 1)], dim=1)
            logits = self._forward(tokens[:, None], mask, position_ids[..., -1:] + step, cache)

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
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
        self.model.to("cpu")

    def rng_state(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def set_rng_state(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])

    def close(self) -> None:
        self.model = None

    def _to_device(self, model: Any) -> Any:
        self.family.repair(model)
        return model.to(self.device).eval().requires_grad_(False)

    def _prepare(self, request: RolloutRequest) -> PreparedPrompt:
        media, shape, ids = [], MediaShape(), list(request.prompt_token_ids)
        if request.media:
            family = vision_family_of(self.hf_config)
            shape = shape_of(family, self.processor, request.media)
            expanded = family.expand(self.processor, ids, shape)
            media = media_in_order(family, self.processor, ids, request.media, shape)
            ids = expanded
        if len(ids) >= self.max_length:
            raise ValueError(
                f"the prompt {request.uid} has {len(ids)} tokens and no room for a response:"
                f" `worker.rollout.max_model_len` is {self.max_length}"
            )
        input_ids, position_ids = torch.tensor(ids), None
        if isinstance(self.family, VisionFamily):
            position_ids = self.family.positions(self.hf_config, input_ids, shape)
        if position_ids is None:
            position_ids = torch.arange(len(ids))
        return PreparedPrompt(request.uid, input_ids, position_ids, media)

    def _batches(self, prompts: list[PreparedPrompt]) -> Iterator[list[PreparedPrompt]]:
        # at most `max_num_batched_tokens` tokens with padding, but always one prompt
        batch: list[PreparedPrompt] = []
        for prompt in prompts:
            longest = max(len(one.input_ids) for one in [*batch, prompt])
            if batch and longest * (len(batch) + 1) > self.max_prompt_tokens:
                yield batch
                batch = []
            batch.append(prompt)
        if batch:
            yield batch

    def _generate_batch(
        self, prompts: list[PreparedPrompt], sampling: SamplingOptions, generator: torch.Generator
    ) -> Iterator[list[FinishedResponse]]:
        n, cache = sampling.n, DynamicCache(config=self.hf_config)
        input_ids, mask, position_ids = (tensor.to(self.device) for tensor in pad_left(prompts))
        media = [medium for prompt in prompts for medium in prompt.media]
        logits = self._forward(input_ids, mask, position_ids, cache, media)  # (B, V)
        # Layers with a state have no `batch_repeat_interleave`.
        rows: Any = torch.arange(len(prompts), device=self.device).repeat_interleave(n)
        cache.reorder_cache(rows)
        logits = logits.repeat_interleave(n, 0)  # (B * n, V)
        mask = mask.repeat_interleave(n, 0)
        last_positions = position_ids[..., -1:].repeat_interleave(n, -2)  # (B * n, 1) or (4, B * n, 1)
        limits, responses = [], []
        for prompt in prompts:
            limits += [min(sampling.max_tokens, self.max_length - len(prompt.input_ids))] * n
            responses += [FinishedResponse(prompt.uid, sample, [], [], "") for sample in range(n)]
        running = set(range(len(responses)))
        for step in range(1, max(limits) + 1):
            tokens, log_probs = sample_tokens(logits, sampling, self.banned, generator)
            token_ids, log_prob_values = tokens.tolist(), log_probs.tolist()
            finished = []
            for row in sorted(running):
                response, token = responses[row], token_ids[row]
                response.token_ids.append(token)
                response.log_probs.append(log_prob_values[row])
                is_end = token in self.end_ids and not sampling.ignore_eos
                if is_end or step == limits[row]:
                    running.remove(row)
                    finished.append(replace(response, finish_reason="stop" if is_end else "length"))
            if finished:
                yield finished
            if not running:
                return
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits = self._forward(tokens[:, None], mask, last_positions + step, cache)

    def _forward(
        self,
        input_ids: Tensor,
        mask: Tensor,
        position_ids: Tensor,
        cache: Any,
        media: list[Medium] | None = None,  # with a prompt
    ) -> Tensor:
        """Logits of the last position, (B, V) float32."""
        inputs = {"input_ids": input_ids, "attention_mask": mask, "position_ids": position_ids}
        inputs |= self.family.own_arguments(self.hf_config, input_ids)
        if media and isinstance(self.family, VisionFamily):
            inputs |= self.family.own_inputs(to_device(media, self.device))
        output = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].float()


def end_token_ids(tokenizer: Any, generation_config: Any) -> frozenset[int]:
    """Tokens that end a response: the tokenizer's and the generation config's, as in vLLM."""
    ends = generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return frozenset(end for end in [tokenizer.eos_token_id, *ends] if end is not None)


def pad_left(prompts: list[PreparedPrompt]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad prompts to one length P: `input_ids`, mask (B, P), position ids (B, P) or (4, B, P)."""
    longest = max(len(prompt.input_ids) for prompt in prompts)
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    position_ids = torch.zeros(*prompts[0].position_ids.shape[:-1], *input_ids.shape, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt.input_ids)
        input_ids[row, start:] = prompt.input_ids
        mask[row, start:] = 1
        position_ids[..., row, start:] = prompt.position_ids
    return input_ids, mask, position_ids


def sample_tokens(
    logits: Tensor, sampling: SamplingOptions, banned: list[int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Sample the next token of each row of `logits` (B, V) float32, never one of `banned`.

    Returns:
        Tokens (B,), and their log-probs (B,) before top-p, top-k and banned tokens.
    """
    scaled = logits if sampling.is_greedy else logits / sampling.temperature
    all_log_probs = scaled.log_softmax(-1)  # (B, V)
    scores: Any = scaled.clone()
    scores[:, banned] = -torch.inf
    if sampling.is_greedy:
        tokens = scores.argmax(-1)
    else:
        previous: Any = None  # the warpers do not read the previous tokens
        if sampling.top_k > 0:
            scores = TopKLogitsWarper(sampling.top_k)(previous, scores)
        if sampling.top_p < 1:
            scores = TopPLogitsWarper(sampling.top_p)(previous, scores)
        tokens = torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(-1)
    return tokens, all_log_probs.gather(-1, tokens[:, None]).squeeze(-1)
