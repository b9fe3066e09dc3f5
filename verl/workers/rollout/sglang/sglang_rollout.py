# SPDX-License-Identifier: Apache-2.0
"""SGLang in a process of its own, which samples while this one does something else."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from torch import Tensor

from verl.distributed.device import is_gpu
from verl.distributed.fsdp import torch_dtype
from verl.distributed.weights.buckets import own_buckets
from verl.models.auto import AutoProcessor, AutoTokenizer
from verl.models.families.registry import trained_part
from verl.workers.model_builder import end_token_ids, load_generation_config, read_config
from verl.workers.rollout.interface import (
    INTERRUPTED,
    EngineSetup,
    FinishedResponse,
    RolloutEngine,
    RolloutRequest,
    SamplingOptions,
    media_token_ids,
)
from verl.workers.rollout.processed_media import PendingMedia, with_media
from verl.workers.rollout.sglang.loaded_weights import flatten
from verl.workers.rollout.sglang.server_arguments import engine_arguments, engine_environment
from verl.workers.rollout.sglang.sglang_process import EngineGroup, EngineProcess
from verl.workers.rollout.sglang.sglang_requests import media_prompt, routes_of, sampling_params, text_prompt
from verl.workers.rollout.sglang.sglang_server import Refused, Sampled

STEP_S = 0.02  # that a step waits for a response, about the time of a token
BUCKET_BYTES = 512 << 20
MEMORY = ("weights", "kv_cache", "cuda_graph")  # parts of device memory, by SGLang's names


class RunningRequest(NamedTuple):
    """A response that is being sampled."""

    uid: Any
    sample: int


class SGLangRollout(RolloutEngine):
    """The rollout engine `worker.rollout.name=sglang`.

    Not supported: adapters without their base, features of media, and speculative decoding.
    """

    def __init__(self, config: Any, setup: EngineSetup) -> None:
        super().__init__()
        self.device, self.dtype = setup.device, torch_dtype(config.dtype)
        self.takes_embeddings = self.embeds_prompts = self.takes_adapter = False
        self.keeps_weights = False
        self.max_length = config.max_model_len or setup.max_length
        trust: Any = {"trust_remote_code": setup.trust_remote_code}
        self.hf_config = read_config(setup.model_path, overrides=setup.override_config, **trust)
        self.limit_images, self.records_routes = config.limit_images, setup.records_routes
        self.banned = media_token_ids(self.hf_config)
        tokenizer_path = setup.tokenizer_path or setup.model_path
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, **trust)
        self.processor = AutoProcessor.from_pretrained(tokenizer_path, **trust) if self.banned else None
        if setup.media is not None and self.processor is not None:
            setup.media.outputs.remember_calls(self.processor)
        generation = load_generation_config(setup.model_path, self.hf_config)
        self.ends = end_token_ids(tokenizer, generation)
        self.generator = torch.Generator().manual_seed(config.seed + setup.dp_rank)
        self.numbers = count()  # of requests
        self.running: dict[str, RunningRequest] = {}  # by name of the request
        self.ranks = EngineGroup(config.tensor_parallel_size)
        arguments = engine_arguments(config, setup, self.hf_config, self.max_length)
        if self.ranks.size > 1:
            arguments |= dict(nnodes=self.ranks.size, node_rank=self.ranks.index)
            arguments["dist_init_addr"] = self.ranks.address()
        self.process = EngineProcess(arguments, engine_environment(setup.device))
        self.wide = {_end(name) for name in self.process.wide}
        self.asleep: tuple[str, ...] = ()  # parts of device memory that are released
        self.synced = False

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._check_idle()
        self._wake(["weights"])
        self._lead("begin_sync")
        for _, bucket in own_buckets(self._cast(named_tensors), rank=0, world_size=1, size=BUCKET_BYTES):
            flat = flatten(bucket)  # lives until SGLang has copied it
            self._lead("load", self.ranks.gather(bytes(ForkingPickler.dumps(flat))))
        self._lead("end_sync")
        self.synced = True

    def sync_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        raise NotImplementedError(
            "`worker.rollout.name=sglang` takes whole weights, adapters folded into them"
        )

    def wake(self) -> None:
        self._wake(MEMORY)

    def sleep(self) -> None:
        self._abort_all()
        if not is_gpu(self.device) or self.asleep:
            return
        self._lead("release", MEMORY)
        self.asleep, self.synced = MEMORY, False

    def rng_state(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def set_rng_state(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])

    def close(self) -> None:
        self.process.close()

    def agree(self, value: Any) -> Any:
        return self.ranks.agree(value)

    def _lead(self, name: str, *arguments: Any) -> None:
        """Have the first rank run a command, for which the others wait."""
        if self.ranks.leads:
            self.process.do(name, *arguments)
        else:
            self.process.check()
        self.agree(None)

    def _wake(self, tags: Sequence[str]) -> None:
        tags = [tag for tag in tags if tag in self.asleep]
        if tags:
            self._lead("resume", tags)
            self.asleep = tuple(tag for tag in self.asleep if tag not in tags)

    def _cast(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_tensors:
            is_cast = tensor.is_floating_point() and _end(name) not in self.wide
            yield name, tensor.detach().to(self.dtype) if is_cast else tensor.detach()

    def _sampling(self) -> AbstractContextManager[Any]:
        return nullcontext()  # draws nothing in this process

    def _accept(self, requests: Sequence[RolloutRequest], sampling: SamplingOptions) -> None:
        assert self.synced, "weights must be synced before a rollout: the engine has random or discarded ones"
        self.wake()
        for request in requests:
            if isinstance(request.media, PendingMedia):
                request.media.start()
        try:
            for request in requests:  # SGLang samples while threads process the media of later ones
                self._start(request, sampling)
        except BaseException:
            self._drop({request.uid for request in requests})
            raise

    def _start(self, request: RolloutRequest, sampling: SamplingOptions) -> None:
        prompt = self._prompt(request)
        length = len(prompt["input_ids"])
        room = self.max_length - length
        if room < 1:
            raise ValueError(
                f"the prompt {request.uid} has {length} tokens and no room for a response:"
                f" `worker.rollout.max_model_len` is {self.max_length}"
            )
        limit, number = min(room, request.response_limit(sampling)), next(self.numbers)
        started: list[tuple[str, dict[str, Any]]] = []
        for sample in range(sampling.n):
            name = f"{number}.{sample}."  # is not the beginning of another: SGLang aborts by beginnings
            seed = self._seed(sampling, request.seed_offset + sample)
            params = sampling_params(sampling, self.banned, self.ends, limit, seed)
            started.append(
                (name, prompt | {"sampling_params": params, "return_routed_experts": self.records_routes})
            )
            self.running[name] = RunningRequest(request.uid, sample)
        if self.ranks.leads:
            self.process.start_sampling(started)

    def _seed(self, sampling: SamplingOptions, offset: int) -> int:
        if sampling.seed is not None:
            return sampling.seed + offset
        return int(torch.randint(1 << 62, (), generator=self.generator))

    def _prompt(self, request: RolloutRequest) -> dict[str, Any]:
        request = with_media(request)
        if not request.media:
            return text_prompt(request.prompt_token_ids)
        if self.limit_images and len(request.media.images) > self.limit_images:
            raise ValueError(
                f"`worker.rollout.limit_images` ({self.limit_images}) must be at least the images of a"
                f" prompt, {request.uid} has {len(request.media.images)}"
            )
        return media_prompt(request.prompt_token_ids, request.media, self.processor, self.hf_config)

    def _advance(self) -> list[FinishedResponse]:
        taken = self.agree(self.process.take(STEP_S) if self.ranks.leads else self.process.check())
        return [self._response(each) for each in taken]

    def _begun(self) -> list[FinishedResponse]:
        if self.ranks.leads:
            self.process.abort(list(self.running))
        return self._advance()

    def _drop(self, uids: set[Any]) -> None:
        names = [name for name, request in self.running.items() if request.uid in uids]
        if self.ranks.leads:
            self.process.abort(names)
            self.process.forget(names)
        for name in names:
            del self.running[name]

    def _response(self, sampled: Sampled | Refused) -> FinishedResponse:
        uid, sample = self.running.pop(sampled.name)
        if isinstance(sampled, Refused):
            raise RuntimeError(f"SGLang refused the prompt {uid}: {sampled.why}")
        assert len(sampled.token_ids) == len(sampled.log_probs), "every sampled token has a log-prob"
        reason = INTERRUPTED if sampled.reason == "abort" else sampled.reason
        routes = None
        if sampled.routes is not None and sampled.token_ids:
            routes = routes_of(
                sampled.routes, self.process.routed, trained_part(self.hf_config).get_text_config()
            )
        return FinishedResponse(uid, sample, sampled.token_ids, sampled.log_probs, reason, routes=routes)


def _end(name: str) -> str:
    return ".".join(name.split(".")[-2:])
