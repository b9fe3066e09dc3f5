# SPDX-License-Identifier: Apache-2.0
"""SGLang's scheduler process, which runs the model: what is changed in it.

- Log-probs are of softmax(logits / temperature) without biases, penalties and grammars.
- Every request draws by its own seed, from nothing else that is random.
- A sync reaches every weight or fails.
- The reason of an error reaches the process that started it, which gets no signal.
"""

import importlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.workers.rollout.sglang.loaded_weights import checking, load_bucket, marking, wide_weights

UNCHANGED = "_unchanged_logits"  # attribute of SGLang's `LogitsProcessorOutput`
# SplitMix64 (Steele, Lea and Flood 2014), as signed numbers of 64 bits.
GOLDEN, MIXES = -7046029254386353131, ((30, -4658895280553007687), (27, -7723592293110705685))


def run_scheduler(reason: str, *args: Any, **named: Any) -> None:
    """Run SGLang's scheduler in this process; a traceback of what ends it goes to the file `reason`."""
    scheduler = srt("managers.scheduler")
    apply_patches()
    schedulers: Any = scheduler.Scheduler
    schedulers.get_init_info = _with_model(schedulers.get_init_info)
    scheduler.psutil = _Parents(reason)
    scheduler.run_scheduler_process(*args, **named)


def _with_model(theirs: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Add what the rollout engine asks of the model: weights in float32, and layers that have experts."""

    def get_init_info(self: Any) -> dict[str, Any]:
        mixture = srt("layers.moe.fused_moe_triton.layer").FusedMoE
        model = self.tp_worker.model_runner.model
        routed = sorted(module.layer_id for module in model.modules() if isinstance(module, mixture))
        return theirs(self) | {"wide": wide_weights(model), "routed": routed}

    return get_init_info


class _Parents:
    """Substitute of psutil and of the parent process, to which SGLang sends SIGQUIT when it fails."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def Process(self) -> "_Parents":  # noqa: N802 - psutil's name
        return self

    def parent(self) -> "_Parents":
        return self

    def send_signal(self, number: int) -> None:
        Path(self.reason).write_text(traceback.format_exc())
        raise SystemExit(1)


def apply_patches() -> None:
    """Replace methods of SGLang's classes; each keeps its arguments."""
    updater = srt("model_executor.model_runner_components.weight_updater").WeightUpdater
    updater.begin_weight_update = marking(updater.begin_weight_update)
    updater.update_weights_from_tensor = load_bucket
    updater.end_weight_update = checking(updater.end_weight_update)
    batch = srt("sampling.sampling_batch_info").SamplingBatchInfo
    batch.from_schedule_batch = classmethod(_seeded(batch.from_schedule_batch.__func__))
    runner = srt("model_executor.model_runner").ModelRunner
    runner._preprocess_logits = _keeping_logits(runner._preprocess_logits)
    sampler = srt("layers.sampler").Sampler
    sampler.forward = _with_log_probs(sampler.forward)
    sampler._sample_from_probs = _sample
    tower = srt("models.qwen2_5_vl").Qwen2_5_VisionTransformer
    tower.forward = _by_frame(tower.forward)
    if srt("utils.common").is_cpu():  # it locks pages of the buffer of routes for copies to a GPU
        srt("mem_cache.pool_host.common")._cuda_host_register = lambda *args, **named: None


def srt(module: str) -> Any:
    """Import a module of SGLang's runtime, which takes seconds and changes the process."""
    return importlib.import_module(f"sglang.srt.{module}")


def _by_frame(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Encode each frame of a video as an image; SGLang lets those of Qwen2.5-VL attend to one another."""

    def forward(self: Any, x: Tensor, grid_thw: Tensor) -> Tensor:
        frames = grid_thw.repeat_interleave(grid_thw[:, 0], dim=0)
        frames[:, 0] = 1
        return theirs(self, x, frames)

    return forward


def _seeded(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang leaves seeds out without `enable_deterministic_inference`, which has other attention kernels."""

    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = theirs(cls, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        info.sampling_seed = torch.tensor(
            [0 if seed is None else seed for seed in seeds], device=batch.device
        )
        return info

    return from_schedule_batch


def _keeping_logits(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a copy of the logits that SGLang is about to change for a request."""

    def preprocess(self: Any, logits_output: Any, sampling_info: Any, *args: Any, **named: Any) -> Any:
        setattr(logits_output, UNCHANGED, None)
        if _changes_logits(sampling_info):
            setattr(logits_output, UNCHANGED, logits_output.next_token_logits.clone())
        return theirs(self, logits_output, sampling_info, *args, **named)

    return preprocess


def _changes_logits(info: Any) -> bool:
    penalties = info.penalizer_orchestrator
    return (
        info.logit_bias is not None
        or bool(info.grammars)
        or info.acc_additive_penalties is not None
        or info.acc_scaling_penalties is not None
        or (penalties is not None and penalties.is_required)
    )


def _with_log_probs(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: Tensor,
    ) -> Tensor:
        logits = getattr(logits_output, UNCHANGED, None)
        has_log_probs = return_logprob and logits is None
        arguments = (
            logits_output,
            sampling_info,
            has_log_probs,
            top_logprobs_nums,
            token_ids_logprobs,
            positions,
        )
        tokens = theirs(self, *arguments)
        if logits is not None and return_logprob:
            setattr(logits_output, UNCHANGED, None)
            if not sampling_info.is_all_greedy:
                logits = logits / sampling_info.temperatures
            values = logits.log_softmax(-1)
            others = top_logprobs_nums, token_ids_logprobs, tokens
            self.output_logprob_processor.compute_logprobs(values, *others).write_output_to(logits_output)
        return tokens

    return forward


def _sample(self: Any, probs: Tensor, info: Any, positions: Tensor, is_simple: bool) -> tuple[Tensor, None]:
    """Draw a token for each row of probabilities (B, V), by the row's seed and position."""
    if info.sampling_mask_batch_indices is not None:
        raise NotImplementedError("SGLang's sampling masks are not returned by the sampler of this engine")
    weights = probs if is_simple else truncated(probs, info.top_ks, info.top_ps, info.min_ps)
    return draw(weights, uniform(info.sampling_seed, positions)), None


def truncated(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """Set the probabilities (B, V) of tokens to zero that top-k, top-p or min-p leave out; (B,) each."""
    ordered, tokens = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    kept = (
        (ranks < top_ks[:, None])
        & (before <= top_ps[:, None])
        & (ordered >= ordered[:, :1] * min_ps[:, None])
    )
    return torch.zeros_like(probs).scatter_(-1, tokens, ordered * kept)


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return the token (B,) at which the cumulated weights (B, V) pass a number (B,) of [0, 1)."""
    cumulated = weights.double().cumsum(-1)
    whole = cumulated[:, -1:]
    below = whole.nextafter(torch.zeros_like(whole))  # a product may be rounded up to all of it
    reached = torch.minimum(numbers[:, None] * whole, below)
    return torch.searchsorted(cumulated, reached, right=True)[:, 0].int()  # the first above has a weight


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a number of [0, 1) for each seed and position, integers of 64 bits, (B,) each."""
    bits = seeds + (positions.long() + 1) * GOLDEN
    for shift, factor in MIXES:
        bits = (bits ^ _shifted(bits, shift)) * factor
    return _shifted(bits ^ _shifted(bits, 31), 11).double() * 2.0**-53


def _shifted(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)  # without the sign
