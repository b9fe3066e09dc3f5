# SPDX-License-Identifier: Apache-2.0
"""vLLM inside each worker process, driven request by request and step by step.

Finished responses leave at once. With tensor parallelism every rank of a group runs this with the same
requests in the same order and draws from an equal random stream, and so computes the same responses.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from verl.distributed.fsdp import torch_dtype
from verl.utils.rank_logger import get_logger
from verl.workers.model_builder import apply_overrides
from verl.workers.rollout import lora_sync as adapter_sync
from verl.workers.rollout import vllm_patches, weight_sync
from verl.workers.rollout.base import (
    EmbeddedMedia,
    EngineSetup,
    FinishedResponse,
    RolloutRequest,
    SamplingOptions,
    media_token_ids,
)
from verl.workers.rollout.generation_rng import GenerationRng, preserved_rng

logger = get_logger(__name__)

CPU_SEQUENCES = 256  # how many sequences the CPU cache is made for; vLLM runs that many at once
READS_EMBEDDINGS = (0, 32)  # the first vLLM that was read for it
VIDEO_FACTS = {  # what vLLM asks of an embedded video beside features and grid
    "qwen2_vl": (),
    "qwen2_5_vl": ("second_per_grid_ts",),
    "qwen3_vl": ("timestamps",),
    "qwen3_vl_moe": ("timestamps",),
}
MAX_CPU_CACHE_BYTES = 1 << 30  # vLLM fills it with zeros at start, 2 seconds for each GiB


class VLLMRollout:
    """The rollout engine `worker.rollout.name=vllm`.

    Example::

        engine = VLLMRollout(config.worker.rollout, EngineSetup(path, max_length=4096, device="cpu"))
        engine.sync_weights(full_named_tensors(model))
        engine.wake()
        for finished in engine.generate([RolloutRequest("a", [1, 2, 3])], SamplingOptions(n=8)):
            ...
        engine.sleep()
    """

    def __init__(self, config: Any, setup: EngineSetup) -> None:
        vllm_patches.set_environment(setup.device)
        import vllm  # noqa: PLC0415 - reads the environment

        vllm_patches.check_version(vllm.__version__)
        vllm_patches.apply_patches(setup.device)
        self.device = setup.device
        self.dtype = torch_dtype(config.dtype)
        self.rng = GenerationRng(config.seed + setup.dp_rank, setup.device)
        self.hf_config = AutoConfig.from_pretrained(
            setup.model_path, trust_remote_code=setup.trust_remote_code
        )
        apply_overrides(self.hf_config, dict(setup.override_config))
        self.banned = media_token_ids(self.hf_config)
        self.limit_images = config.limit_images
        self.scale = vllm_patches.LogitScale()
        with preserved_rng(setup.device), vllm_patches.preserved_threads():
            self.llm = vllm.LLM(**engine_arguments(config, setup, self.hf_config))
        self.engine = self.llm.llm_engine
        self.model = self.llm.apply_model(lambda model: model)[0]
        vllm_patches.scale_logits(self.model, self.scale)
        self.takes_embeddings = setup.takes_embeddings and reads_embeddings(vllm.__version__, self.hf_config)
        self.adapter = setup.adapter
        self.takes_adapter = setup.adapter is not None
        self.asleep: set[str] = set()
        self.synced = False

    def generate(
        self, requests: list[RolloutRequest], sampling: SamplingOptions
    ) -> Iterator[list[FinishedResponse]]:
        """Sample responses and yield them as they finish; see `RolloutEngine.generate`.

        Closing the iterator early aborts what is under way.
        """
        assert self.synced, (
            "weights must be synced before the first rollout: the engine starts with random ones"
        )
        self.wake()
        self.scale.temperature = 1.0 if sampling.is_greedy else sampling.temperature
        pending: dict[str, tuple[Any, int]] = {}
        try:
            self._add(requests, sampling, pending)
            while pending:
                with self.rng.active():
                    finished = self._step_until_finished()
                yield [self._response(output, *pending.pop(output.request_id)) for output in finished]
        finally:
            self.engine.abort_request(list(pending))

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load trained weights, taking their device memory back first; see `RolloutEngine.sync_weights`."""
        self._wake("weights")
        vllm_patches.drain(self.engine)
        weight_sync.load_into(self.model, named_tensors, self.hf_config, self.dtype)
        weight_sync.clear_caches(self.engine)
        self.synced = True

    def sync_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the adapter, taking the weights' device memory back first; see `RolloutEngine`."""
        assert self.adapter is not None, "the engine was built for whole weights"
        self._wake("weights")
        vllm_patches.drain(self.engine)
        adapter_sync.load_adapter(self.engine, self.adapter, tensors)
        weight_sync.clear_caches(self.engine)
        self.synced = True

    def wake(self) -> None:
        """Take back all device memory; nothing to do on CPU."""
        self._wake("weights")
        self._wake("kv_cache")

    def sleep(self) -> None:
        """Free the cache's device memory and move the weights to host memory; nothing to do on CPU."""
        if self.device == "cuda" and not self.asleep:
            vllm_patches.drain(self.engine)
            self.llm.sleep(level=1)
            self.asleep = {"weights", "kv_cache"}

    def rng_state(self) -> dict[str, Any]:
        """State of the sampling stream."""
        return self.rng.state()

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Continue the sampling stream from a state."""
        self.rng.set_state(state)

    def close(self) -> None:
        """End the engine and its own process groups; the default group stays."""
        self.engine.engine_core.shutdown()

    def _wake(self, tag: str) -> None:
        if tag in self.asleep:
            self.llm.wake_up(tags=[tag])
            self.asleep.discard(tag)

    def _add(
        self, requests: list[RolloutRequest], sampling: SamplingOptions, pending: dict[str, tuple[Any, int]]
    ) -> None:
        """Hand every prompt to vLLM `n` times, prepared once.

        vLLM's own `n` would hold a prompt's responses back until the last one is done, and refuses greedy
        sampling.
        """
        parameters = [sampling_params(sampling, self.banned, sample) for sample in range(sampling.n)]
        adapter = adapter_sync.adapter_request() if self.takes_adapter else None
        for index, request in enumerate(requests):
            prompt = self._prepare(request)
            for sample in range(sampling.n):
                request_id = f"{index}.{sample}"
                self.engine.add_request(request_id, prompt, parameters[sample], lora_request=adapter)
                pending[request_id] = (request.uid, sample)

    def _prepare(self, request: RolloutRequest) -> Any:
        from vllm.renderers.inputs.preprocess import parse_model_prompt  # noqa: PLC0415 - see `__init__`

        images = len(request.media.images) if request.media is not None else 0
        if self.limit_images and images > self.limit_images:
            raise ValueError(
                f"`worker.rollout.limit_images` ({self.limit_images}) must be at least the images of a"
                f" prompt, {request.uid} has {images}"
            )
        prompt = vllm_prompt(request, self.hf_config.model_type)
        parsed = parse_model_prompt(self.engine.model_config, prompt)
        return self.engine.renderer.render_cmpl([parsed])[0]

    def _step_until_finished(self) -> list[Any]:
        finished: list[Any] = []
        while not finished:
            assert self.engine.has_unfinished_requests(), "vLLM lost requests"
            finished = [output for output in self.engine.step() if output.finished]
        return finished

    def _response(self, output: Any, uid: Any, sample: int) -> FinishedResponse:
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended the response to prompt {uid} with {completion.finish_reason!r}")
        values = completion.logprobs  # flat: the sampled token comes first at every position
        return FinishedResponse(
            uid=uid,
            sample=sample,
            token_ids=list(completion.token_ids),
            log_probs=[values.logprobs[start] for start in values.start_indices],
            finish_reason=completion.finish_reason,
        )


def engine_arguments(config: Any, setup: EngineSetup, hf_config: Any) -> dict[str, Any]:
    """The arguments of `vllm.LLM` that follow from `worker.rollout`."""
    arguments: dict[str, Any] = dict(
        model=setup.model_path,
        tokenizer=setup.tokenizer_path,
        trust_remote_code=setup.trust_remote_code,
        load_format="dummy",  # the weights come by sync
        dtype=str(torch_dtype(config.dtype)).removeprefix("torch."),
        seed=config.seed,
        tensor_parallel_size=config.tensor_parallel_size,
        distributed_executor_backend="external_launcher",
        max_model_len=config.max_model_len or setup.max_length,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_prefix_caching=True,
        enforce_eager=config.enforce_eager
        or setup.device == "cpu",  # compiling on CPU takes 22 s and gains nothing
        disable_log_stats=config.disable_log_stats,
        mm_processor_cache_gb=0,  # no prompt comes twice in a step; it would hold 4 GiB in each process
    )
    arguments |= vllm_patches.media_arguments()
    if setup.adapter is not None:
        arguments |= adapter_sync.adapter_arguments(setup.adapter)
    if setup.takes_embeddings:
        arguments["enable_mm_embeds"] = True
    if setup.override_config:
        arguments["hf_overrides"] = partial(overridden, overrides=dict(setup.override_config))
    if config.limit_images and media_token_ids(hf_config):
        arguments["limit_mm_per_prompt"] = {"image": config.limit_images}
    if setup.device == "cpu":
        arguments["kv_cache_memory_bytes"] = cpu_cache_bytes(hf_config, config, arguments["max_model_len"])
    else:
        arguments |= dict(
            gpu_memory_utilization=config.gpu_memory_utilization,
            enable_sleep_mode=True,
            disable_custom_all_reduce=True,  # shares memory between processes, which sleep mode takes away
        )
        if hasattr(hf_config.get_text_config(), "num_experts"):
            arguments["moe_backend"] = (
                "triton"  # others reorder the experts' weights, which `load_weights` overwrites
            )
    return arguments


def overridden(hf_config: Any, overrides: dict[str, Any]) -> Any:
    """The config with `worker.actor.model.override_config`, as the trained model has it."""
    apply_overrides(hf_config, overrides)
    return hf_config


def cpu_cache_bytes(hf_config: Any, config: Any, max_model_len: int) -> int:
    """Memory for the attention states of `CPU_SEQUENCES` sequences, at most 1 GiB, but always for four."""
    text = hf_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token_bytes = 2 * text.num_hidden_layers * heads * head_dim * torch_dtype(config.dtype).itemsize
    blocks_of_sequence = -(-max_model_len // 128) + 1  # vLLM's CPU cache has blocks of 128 tokens
    sequence_bytes = blocks_of_sequence * 128 * token_bytes
    return max(4 * sequence_bytes, min(CPU_SEQUENCES * sequence_bytes, MAX_CPU_CACHE_BYTES))


def reads_embeddings(version: str, hf_config: Any) -> bool:
    """Whether vLLM reads features in place of all that a model sees, videos included."""
    can = tuple(int(part) for part in version.split(".")[:2]) >= READS_EMBEDDINGS
    can = can and hf_config.model_type in VIDEO_FACTS
    if not can:
        logger.warning(
            "the rollout engine encodes media again: model=%s vllm=%s take no features",
            hf_config.model_type,
            version,
        )
    return can


def vllm_prompt(request: RolloutRequest, model_type: str) -> dict[str, Any]:
    """A prompt as vLLM reads it."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_token_ids)}
    if request.media is None:
        return prompt
    if isinstance(request.media, EmbeddedMedia):
        return prompt | {"multi_modal_data": embedded_data(request.media, model_type)}
    data = {"image": list(request.media.images), "video": list(request.media.videos)}
    data = {modality: items for modality, items in data.items() if items}
    if data:
        prompt["multi_modal_data"] = data
    if "video" in data:
        prompt["mm_processor_kwargs"] = {
            "do_sample_frames": False
        }  # frames were chosen when the video was decoded
    return prompt


def embedded_data(media: EmbeddedMedia, model_type: str) -> dict[str, Any]:
    """Features as vLLM reads them, with what the positions or the tokens of videos follow from."""
    data: dict[str, Any] = {}
    for kind, items in (("image", media.images), ("video", media.videos)):
        if not items:
            continue
        joined = {name: torch.cat([item[name] for item in items]) for name in ("features", "grid_thw")}
        data[kind] = {f"{kind}_embeds": joined["features"], f"{kind}_grid_thw": joined["grid_thw"]}
        for name in VIDEO_FACTS[model_type] if kind == "video" else ():
            values = [item[name] for item in items]
            is_number = name == "second_per_grid_ts"
            data[kind][name] = torch.cat(values) if is_number else [value.tolist() for value in values]
    return data


def sampling_params(sampling: SamplingOptions, banned: list[int], sample: int) -> Any:
    """The options as vLLM's `SamplingParams` for one of a prompt's responses.

    The temperature is not among them: the logits come divided by it (`vllm_patches.scale_logits`). What vLLM
    adds to logits before its temperature is divided here instead.
    """
    from vllm import SamplingParams  # noqa: PLC0415 - after its environment
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    temperature = 1.0 if sampling.is_greedy else sampling.temperature
    extra = dict(sampling.extra)
    for added in ("presence_penalty", "frequency_penalty"):
        if added in extra:
            extra[added] = extra[added] / temperature
    bias = {int(token): value / temperature for token, value in (extra.pop("logit_bias", None) or {}).items()}
    bias |= dict.fromkeys(banned, float("-inf"))
    known = SamplingParams.__struct_fields__
    unknown = sorted(set(extra) - set(known))
    if unknown:
        raise ValueError(f"vLLM's SamplingParams has no field {unknown}; it has {sorted(known)}")
    fields: dict[str, Any] = dict(
        n=1,
        temperature=0.0 if sampling.is_greedy else 1.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
        seed=None if sampling.seed is None else sampling.seed + sample,
        logit_bias=bias or None,
        logprobs=0,  # only the sampled token's
        flat_logprobs=True,
        detokenize=bool(extra.get("stop")),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # all prompts share it; what vLLM adds to it is the same for all
    )
    fields |= extra
    return SamplingParams(**fields)
