# SPDX-License-Identifier: Apache-2.0
"""vLLM inside each worker process, driven step by step; finished responses leave at once.

With tensor parallelism every rank of a group makes the same calls in the same order and draws from an equal
random stream, and so computes the same responses.
"""

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count, islice
from typing import Any, NamedTuple

from torch import Tensor

from verl.distributed.device import is_gpu
from verl.distributed.fsdp import torch_dtype
from verl.models.families.interface import is_part
from verl.models.families.registry import engine_encoder_of, family_of, trained_part
from verl.models.layer_configs import experts_per_layer
from verl.workers.model_builder import read_config
from verl.workers.rollout.generation_rng import GenerationRng, preserved_rng
from verl.workers.rollout.interface import (
    INTERRUPTED,
    Drafts,
    EngineSetup,
    FinishedResponse,
    RolloutEngine,
    RolloutRequest,
    SamplingOptions,
    media_token_ids,
)
from verl.workers.rollout.processed_media import PendingMedia, with_media
from verl.workers.rollout.vllm import lora_sync, sleep_mode, vllm_import, weight_sync
from verl.workers.rollout.vllm.engine_requests import (
    check_sampling,
    prompt_embeddings,
    reads_embeddings,
    sampled_log_probs,
    sampling_params,
    scale_logits,
    unshared_tokens,
    vllm_prompt,
)
from verl.workers.rollout.vllm.expert_sync import JointExperts
from verl.workers.rollout.vllm.family_patches import apply_family_patches
from verl.workers.rollout.vllm.llm_arguments import engine_arguments
from verl.workers.rollout.vllm.slot_routes import ReturnedRoutes, SlotRoutes

PROCESSED_AHEAD = 32  # prompts whose media threads process before the engine needs them


class WaitingRequest(NamedTuple):
    """A request that vLLM does not have yet."""

    request: RolloutRequest
    params: list[Any]  # vLLM's, of each response


class RunningRequest(NamedTuple):
    """A response that is being sampled."""

    uid: Any
    sample: int
    internal: str  # vLLM's own name of the request


class VLLMRollout(RolloutEngine):
    """The rollout engine `worker.rollout.name=vllm`.

    Example::

        engine = VLLMRollout(config.worker.rollout, EngineSetup(path, max_length=4096, device="cpu"))
        engine.sync_weights(hub_names.convert(full_named_tensors(model)))
        engine.wake()
        for finished in engine.generate([RolloutRequest("a", [1, 2, 3])], SamplingOptions(n=8)):
            ...
        engine.sleep()
    """

    def __init__(self, config: Any, setup: EngineSetup) -> None:
        super().__init__()
        vllm = vllm_import.import_vllm(setup.device)
        vllm_import.choose_device(setup.device)
        self.device, self.dtype = setup.device, torch_dtype(config.dtype)
        self.limit_images = config.limit_images
        self.hf_config = read_config(
            setup.model_path, trust_remote_code=setup.trust_remote_code, overrides=setup.override_config
        )
        family = family_of(self.hf_config)
        apply_family_patches(family)
        self.banned = media_token_ids(self.hf_config)
        self.embeds_prompts = family.embeds_prompts
        takes = self.embeds_prompts or setup.takes_embeddings
        self.takes_embeddings = takes and reads_embeddings(vllm.__version__, self.hf_config)
        self.adapter, self.takes_adapter = setup.adapter, setup.adapter is not None
        self.rng = GenerationRng(config.seed + setup.dp_rank, setup.device)
        with preserved_rng(setup.device), vllm_import.preserved_threads():
            self.llm = vllm.LLM(**engine_arguments(config, setup, self.hf_config))
        self.engine = self.llm.llm_engine
        check_sampling(self.engine.vllm_config)
        self.model = self.llm.apply_model(lambda model: model)[0]
        scale_logits(self.model, lambda: self._temperature)
        self.experts = JointExperts(self.model, self.hf_config, setup.trust_remote_code)
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner
        self.level = sleep_mode.KEPT
        if is_gpu(self.device):
            self.level = sleep_mode.sleep_level(
                self.runner, takes_adapter=self.takes_adapter, is_quantized=config.quantization is not None
            )
        self.keeps_weights = self.level == sleep_mode.KEPT
        self.asleep: set[str] = set()
        self.frozen_parts = engine_encoder_of(self.hf_config) if setup.takes_embeddings else ()
        self.tower: set[str] = set()  # parameters of a frozen tower, after a sync
        self.synced = False
        self.numbers = count()  # of requests
        self.waiting: deque[WaitingRequest] = deque()
        self.running: dict[str, RunningRequest] = {}  # by vLLM's name of the request
        self.unread: dict[str, int] = {}  # tokens of prompts with media, while vLLM has read none of them
        if setup.media is not None and self.engine.renderer.mm_processor is not None:
            setup.media.share_with(self.engine.renderer.mm_processor.info)
        self.routes = self._route_recorder() if setup.records_routes else None
        self.drafts: dict[str, Drafts] | None = None  # by vLLM's name of the request
        if config.speculative.is_used:
            self.drafts = count_drafts(self.engine.engine_core.engine_core.scheduler)

    def agree(self, value: Any) -> Any:
        from vllm.distributed import get_tp_group  # noqa: PLC0415 - after vLLM's environment

        return get_tp_group().broadcast_object(value)

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        with self._new_weights(), weight_sync.reloading(self.model):
            loaded = weight_sync.load_into(
                self.model,
                named_tensors,
                self.hf_config,
                self.dtype,
                frozen=self.tower,
                experts=self.experts,
            )
            self.tower |= {name for name in loaded if is_part(name, self.frozen_parts)}

    def sync_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        assert self.adapter is not None, "the engine was built for whole weights"
        with self._new_weights():
            lora_sync.load_adapter(self.engine, self.adapter, tensors)

    def wake(self) -> None:
        self._wake("weights")
        self._wake("kv_cache")

    def sleep(self) -> None:
        """Free the cache and the weights, which are lost unless `keeps_weights`; on CPU all stay."""
        self._abort_all()
        if not is_gpu(self.device) or self.asleep:
            return
        drain(self.engine)
        self.copies = [] if self.keeps_weights else sleep_mode.host_copies(self.model)
        self.llm.sleep(level=self.level)
        self.asleep = {"weights", "kv_cache"}
        if not self.keeps_weights:
            self.tower.clear()
            self.synced = False

    def rng_state(self) -> dict[str, Any]:
        return self.rng.state()

    def set_rng_state(self, state: dict[str, Any]) -> None:
        self.rng.set_state(state)

    def close(self) -> None:
        """Shut the engine and its own process groups down; the default group stays."""
        self.engine.engine_core.shutdown()

    def _wake(self, tag: str) -> None:
        if tag not in self.asleep:
            return
        sleep_mode.release_cache(self.device)
        self.llm.wake_up(tags=[tag])
        self.asleep.discard(tag)
        if tag == "weights" and not self.keeps_weights:
            sleep_mode.restore(self.copies, self.runner)

    @contextmanager
    def _new_weights(self) -> Iterator[None]:
        self._check_idle()
        self._wake("weights")
        drain(self.engine)
        forget_responses(self.runner)
        yield
        weight_sync.clear_caches(self.engine)
        self.synced = True

    def _sampling(self) -> AbstractContextManager[Any]:
        return self.rng.active()

    def _accept(self, requests: Sequence[RolloutRequest], sampling: SamplingOptions) -> None:
        assert self.synced, "weights must be synced before a rollout: the engine has random or discarded ones"
        self.wake()
        shared: dict[tuple[int, int], Any] = {}  # parameters, by longest response and offset of the seed
        accepted = []
        for request in requests:
            limit = request.response_limit(sampling)
            keys = [(limit, request.seed_offset + sample) for sample in range(sampling.n)]
            for key in keys:
                if key not in shared:
                    shared[key] = sampling_params(sampling, self.banned, *key, drafts=self.drafts is not None)
            accepted.append(WaitingRequest(request, [shared[key] for key in keys]))
        self.waiting += accepted
        try:
            self._feed()
        except BaseException:
            self._drop({request.uid for request in requests})
            raise

    def _feed(self) -> None:
        """Give vLLM waiting requests, in order, as far as its next step may read their prompts.

        The step begins while threads process the media of later prompts. How many it gets does not depend on
        the threads, so that runs repeat and the ranks of an engine agree.
        """
        if not self.waiting:
            return
        for waiting in islice(self.waiting, PROCESSED_AHEAD):
            if isinstance(waiting.request.media, PendingMedia):
                waiting.request.media.start()
        scheduler = self.engine.engine_core.engine_core.scheduler
        budget = self.engine.vllm_config.scheduler_config.max_num_batched_tokens
        names = (each.request_id for each in scheduler.waiting)
        self.unread = {name: self.unread[name] for name in names if name in self.unread}
        while self.waiting:
            is_pending = isinstance(self.waiting[0].request.media, PendingMedia)
            if is_pending and sum(self.unread.values()) >= budget:
                return
            self._add(*self.waiting.popleft())

    def _add(self, request: RolloutRequest, params: list[Any]) -> None:
        # Each prompt is prepared once and added `n` times: vLLM's own `n` would hold a prompt's responses
        # back until the last one finishes, and refuses greedy sampling.
        prompt, number = self._prepare(request), next(self.numbers)
        adapter = lora_sync.adapter_request() if self.takes_adapter else None
        for sample, its in enumerate(params):
            name = f"{number}.{sample}"
            internal = self.engine.add_request(name, prompt, its, lora_request=adapter)
            self.running[name] = RunningRequest(request.uid, sample, internal)
            if sample == 0:
                self.unread[internal] = unshared_tokens(prompt)

    def _advance(self) -> list[FinishedResponse]:
        self._feed()
        assert self.engine.has_unfinished_requests(), "vLLM lost requests"
        finished = [output for output in self.engine.step() if output.finished]
        return [self._response(output, self.running.pop(output.request_id)) for output in finished]

    def _begun(self) -> list[FinishedResponse]:
        processor = self.engine.output_processor
        begun = []
        for name, (uid, sample, internal) in self.running.items():
            state = processor.request_states[internal]
            tokens, log_probs = list(state.detokenizer.output_token_ids), state.logprobs_processor.logprobs
            assert len(tokens) == len(log_probs.start_indices), "every sampled token has a log-prob"
            routes = self._routes(internal, len(tokens))
            values = sampled_log_probs(log_probs)
            drafts = self._drafts_of(name)
            begun.append(
                FinishedResponse(uid, sample, tokens, values, INTERRUPTED, routes=routes, drafts=drafts)
            )
        drafts = None if self.drafts is None else Drafts()
        for request, params in self.waiting:
            begun += [
                FinishedResponse(request.uid, sample, [], [], INTERRUPTED, drafts=drafts)
                for sample in range(len(params))
            ]
        return begun

    def _drop(self, uids: set[Any]) -> None:
        self.waiting = deque(each for each in self.waiting if each.request.uid not in uids)
        names = [name for name, request in self.running.items() if request.uid in uids]
        self.engine.abort_request(names)
        for name in names:
            del self.running[name]
            self._drafts_of(name)

    def _drafts_of(self, name: str) -> Drafts | None:
        return None if self.drafts is None else self.drafts.pop(name, Drafts())

    def _prepare(self, request: RolloutRequest) -> Any:
        from vllm.renderers.inputs.preprocess import parse_model_prompt  # noqa: PLC0415 - after vLLM's environment

        request = with_media(request)
        images = len(request.media.images) if request.media is not None else 0
        if self.limit_images and images > self.limit_images:
            raise ValueError(
                f"`worker.rollout.limit_images` ({self.limit_images}) must be at least the images of a"
                f" prompt, {request.uid} has {images}"
            )
        if self.embeds_prompts and request.media is not None:  # features are among the tokens' embeddings
            embeddings = prompt_embeddings(
                request, self.hf_config, lambda ids: self.model.embed_input_ids(ids.to(self.device))
            )
            prompt = {"prompt_embeds": embeddings}
        else:
            prompt = vllm_prompt(request, self.hf_config)
        parsed = parse_model_prompt(self.engine.model_config, prompt)
        return self.engine.renderer.render_cmpl([parsed])[0]

    def _response(self, output: Any, request: RunningRequest) -> FinishedResponse:
        completion, uid = output.outputs[0], request.uid
        if completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended the response to prompt {uid} with {completion.finish_reason!r}")
        return FinishedResponse(
            uid=uid,
            sample=request.sample,
            token_ids=list(completion.token_ids),
            log_probs=sampled_log_probs(completion.logprobs),
            finish_reason=completion.finish_reason,
            routes=self._routes(request.internal, len(completion.token_ids), completion),
            drafts=self._drafts_of(output.request_id),
        )

    def _routes(self, internal: str, sampled: int, completion: Any = None) -> Tensor | None:
        return None if self.routes is None else self.routes.routes(internal, sampled, completion)

    def _route_recorder(self) -> ReturnedRoutes | SlotRoutes:
        experts = experts_per_layer(trained_part(self.hf_config).get_text_config())
        if is_gpu(self.device):
            return ReturnedRoutes(self.model, experts)
        return SlotRoutes(self.model, self.runner, experts)


def drain(engine: Any) -> None:
    """Run the steps that vLLM's `LLMEngine` has still scheduled after all requests finished."""
    # on CUDA it schedules a step ahead of the results, and caches cannot be cleared until that one is done
    core = engine.engine_core.engine_core
    while core.batch_queue or core.scheduler.has_requests():
        engine.step()


def count_drafts(scheduler: Any) -> dict[str, Drafts]:
    """Count what an engine's scheduler learns of drafts; vLLM itself does so only if it logs statistics.

    Returns the counts of requests so far, by vLLM's names of them; take those of finished ones out.
    """
    counts: dict[str, Drafts] = {}
    theirs = scheduler.make_spec_decoding_stats

    @functools.wraps(theirs)
    def counting(
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: Any,
        request_id: str,
    ) -> Any:
        name = request_id.partition("-")[0]  # vLLM appends a dash and random digits to ours
        counts[name] = counts.get(name, Drafts()).plus(num_draft_tokens, num_accepted_tokens)
        return theirs(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )

    scheduler.make_spec_decoding_stats = counting
    return counts


def forget_responses(runner: Any) -> None:
    """Draft from responses of the coming weights only.

    A resumed run has no older ones, and would draw other random numbers.
    """
    drafter = getattr(runner, "drafter", None)
    cache = getattr(drafter, "suffix_cache", None)
    if drafter is not None and cache is not None:
        drafter.suffix_cache = type(cache)(
            max_tree_depth=cache.max_tree_depth, max_cached_requests=cache.max_cached_requests
        )
