# SPDX-License-Identifier: Apache-2.0
"""Section `worker.rollout`: the engine that samples responses."""

import difflib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from verl.config.model import TINY, dtype_option
from verl.config.multi_turn import MultiTurnConfig
from verl.config.schema import option

COMMON_SAMPLING = ("n", "temperature", "top_p", "top_k", "seed", "max_tokens", "ignore_eos")
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
SGLANG_SAMPLING = (*COMMON_SAMPLING, *PENALTIES, "min_p", "logit_bias", "stop_token_ids")
SAMPLING_PARAMETERS = (  # vLLM's that change what is sampled
    *(*SGLANG_SAMPLING, "min_tokens", "allowed_token_ids", "stop", "bad_words", "skip_special_tokens"),
    *("structured_outputs", "extra_args", "thinking_token_budget", "repetition_detection", "detokenize"),
    *("include_stop_str_in_output", "spaces_between_special_tokens", "watermarking"),
)
# For each that is a number: is it an integer, its minimum and maximum, and other values it may have.
SAMPLING_RANGES: dict[str, tuple[bool, float, float, tuple[Any, ...]]] = {
    "n": (True, 1, math.inf, ()),
    "temperature": (False, 0, sys.float_info.max, ()),
    "top_p": (False, TINY, 1, ()),
    "top_k": (True, 1, math.inf, (-1, 0)),
    "min_p": (False, 0, 1, ()),
    "seed": (True, 0, math.inf, (None,)),
    "max_tokens": (True, 1, math.inf, ()),
    "min_tokens": (True, 0, math.inf, ()),
    "presence_penalty": (False, -2, 2, ()),
    "frequency_penalty": (False, -2, 2, ()),
    "repetition_penalty": (False, TINY, sys.float_info.max, ()),
}
SAMPLED_BY = {"vllm": SAMPLING_PARAMETERS, "sglang": SGLANG_SAMPLING, "hf": COMMON_SAMPLING}

# Sequences at once, unless set. On a GPU each takes 8 to 12 bytes for each word of the vocabulary: float32
# logits, and counts of sampled tokens.
GPU_SEQUENCES, CPU_SEQUENCES = 512, 256

# Tokens of a block of vLLM's cache on CPUs, the fewest that its attention takes (its default is 128): a group
# of responses shares the whole blocks of its prompt, and computes the rest once for each response.
CPU_BLOCK = 32
MAX_CPU_CACHE = 1 << 30  # vLLM fills it with zeros at start, 2 seconds for each GiB

ENGINES = ("vllm", "sglang", "hf")
FP8 = "fp8"
OBJECT_STORE, COLLECTIVE, DELTA = "object_store", "collective", "delta"  # ways of weights
UNSUPPORTED_SAMPLING = ("min_p", "logit_bias")  # vLLM does not apply them to drafted tokens


@dataclass(frozen=True)
class SpeculativeConfig:
    """Section `worker.rollout.speculative`: drafts that the engine checks several tokens at a time.

    They change the time of sampling, not its distribution.
    """

    method: str | None = option(
        None,
        "Source of drafts: earlier text of the same sequence (`ngram`), or also of other responses (`suffix`,"
        " needs arctic-inference); null samples one token at a time.",
        choices=("ngram", "suffix"),
    )
    num_tokens: int = option(4, "Maximum tokens of a draft.", minimum=1, maximum=128)
    prompt_lookup_min: int = option(2, "`ngram`: fewest tokens that must recur before a draft.", minimum=1)
    prompt_lookup_max: int = option(4, "`ngram`: most tokens that are looked up.", minimum=1)
    suffix_max_tree_depth: int = option(
        24, "`suffix`: most tokens of a match and its draft together.", minimum=1
    )
    suffix_max_cached_requests: int = option(
        10000, "`suffix`: responses since the last weight sync to draft from; 0 is only the own.", minimum=0
    )

    @property
    def is_used(self) -> bool:
        return self.method is not None

    def problems(self, path: str) -> Iterator[str]:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            low, high = self.prompt_lookup_min, self.prompt_lookup_max
            yield f"`{path}.prompt_lookup_min` ({low}) must be at most `{path}.prompt_lookup_max` ({high})"

    def engine_problems(self, path: str, engine: str, sampling: Mapping[str, Any]) -> Iterator[str]:
        if not self.is_used:
            return
        if engine != "vllm":
            yield f"`{path}.speculative.method` must be null with `{path}.name={engine}`, got {self.method!r}"
        if self.method == "suffix" and find_spec("arctic_inference") is None:
            yield (
                f"`{path}.speculative.method=suffix` needs arctic-inference, which is not installed:"
                " pip install 'easy-verl[suffix]', or set the method to ngram"
            )
        for name in UNSUPPORTED_SAMPLING:
            if sampling.get(name):
                yield (
                    f"`{path}.val_override_config.{name}` must not be set with `{path}.speculative.method"
                    f"={self.method}`: vLLM does not apply it to drafts; leave one of them out"
                )


@dataclass(frozen=True)
class RolloutConfig:
    """Rollout engine."""

    name: str = option(
        "vllm",
        "Rollout engine: vLLM, SGLang, or transformers for reference.",
        choices=ENGINES,
        extension="rollout engine",
    )
    n: int = option(1, "Responses per prompt, which form a group.", minimum=1, example=5)
    temperature: float = option(1.0, "Sampling temperature; also applied to log-probs.", minimum=0.01)
    top_p: float = option(1.0, "Probability mass of the tokens to sample from.", minimum=TINY, maximum=1.0)
    top_k: int = option(-1, "Sample from the k most likely tokens; -1 is all.", minimum=1, also=(-1, 0))
    seed: int = option(1, "Random seed for sampling.", minimum=0)
    lora_sync: str = option(
        "auto",
        "How LoRA weights reach the engine: as an adapter, or `merged` into its weights; `auto` uses an"
        " adapter on GPUs if the engine supports it.",
        choices=("auto", "adapter", "merged"),
    )
    weight_transport: str = option(
        "auto",
        "How weights reach engines in processes of their own (`worker.hybrid_engine=false`): through Ray's"
        " object store, or straight from the devices that train (`collective`: NCCL, on CPU gloo; `delta`: so"
        " too, but only what changed); `auto` is `collective` on GPUs and `object_store` on CPU.",
        choices=("auto", OBJECT_STORE, COLLECTIVE, DELTA),
    )
    limit_images: int = option(0, "Maximum images per prompt; 0 is the engine's own limit.", minimum=0)
    dtype: str = dtype_option("bf16", "Data type of the engine's weights and activations.")
    quantization: str | None = option(
        None,
        "Weights of the engine's linear layers and experts: null keeps `dtype`, `fp8` quantizes them at each"
        " sync, with activations; needs GPUs and `algorithm.rollout_correction`.",
        choices=(FP8,),
    )
    gpu_memory_utilization: float = option(0.6, "GPU memory fraction while awake.", minimum=0.01, maximum=1.0)
    ignore_eos: bool = option(False, "Continue sampling after the EOS token; for benchmarks.")
    enforce_eager: bool = option(False, "Disable CUDA graphs: faster to start, slower to sample.")
    enable_chunked_prefill: bool = option(True, "Let the engine split the prefill of long prompts.")
    tensor_parallel_size: int = option(2, "Ranks per engine.", minimum=1)
    max_model_len: int | None = option(
        None, "Maximum tokens per sequence; null is the sum of maximum prompt and response length.", minimum=1
    )
    max_num_batched_tokens: int = option(8192, "Maximum tokens the engine processes per step.", minimum=1)
    disable_log_stats: bool = option(True, "Disable the engine's logging of statistics.")
    disable_tqdm: bool = option(False, "Disable the progress bar of the rollout.")
    val_override_config: dict[str, Any] = option(
        dict,
        "Sampling parameters for validation, such as n, temperature, top_p, max_tokens.",
        example={"temperature": 0.6, "top_p": 0.95, "n": 1},
    )
    num_video_frames: int | None = option(
        None, "Frames per video, evenly spaced; null samples at `data.video_fps`.", minimum=2
    )
    tokens_per_frame: int | None = option(
        None, "Maximum tokens per video frame; null is limited by `data.max_pixels` only.", minimum=1
    )
    group_frames: int = option(64, "Frames encoded at once.")
    max_frames_vllm: int = option(-1, "Maximum number of frames for the engine; -1 is all.")
    bs_vllm: int | None = option(None, "Prompts per call of the engine.")
    use_cached_embeds: bool = option(False, "Use cached media features in the engine.")
    trust_remote_code: bool = option(False, "Allow Python code that comes with the model.")
    num_chunk_seq: int = option(
        -1, "Chunks in which ranks of a sequence gather media features; -1 is one.", minimum=1, also=(-1,)
    )
    audio_max_length: int = option(10000, "Frames that audio is padded to.")
    open_ended_reward: bool = option(
        False, "Score responses by a judge: 0.9 x its yes or no + 0.1 x format; replaces the reward function."
    )
    diffusion: bool = option(False, "Generate images or videos.")
    guidance_scale: float = option(4.5, "Classifier-free guidance scale of diffusion.")
    resolution: int = option(768, "Side length of generated images in pixels.")
    num_steps: int = option(10, "Denoising steps.")
    noise_level: float = option(0.7, "Noise of the steps of sampling; 0 samples by the ODE.", minimum=0.0)
    sde_type: str = option(
        "sde",
        "Distribution of a step: `sde` of Flow-GRPO, or `cps`, which keeps the sampler's coefficients.",
        choices=("sde", "cps"),
    )
    sde_window: list[int] | None = option(
        None, "First step with noise and the one after the last; null is all but the very last step."
    )
    train_timestep_fraction: float = option(
        1.0,
        "Share of the steps with noise that a picture is trained on, drawn for each picture.",
        minimum=0.0,
        maximum=1.0,
    )
    val_num_steps: int | None = option(None, "Denoising steps in validation; null is `num_steps`.", minimum=1)
    kl_reward: float = option(0.0, "Coefficient of the KL in the reward of diffusion.")
    num_frames: int = option(81, "Frames of generated videos; a multiple of 4 plus 1 for Wan.", minimum=1)
    height: int = option(
        480, "Height of generated videos in pixels; a multiple of 16 for Wan 2.1.", minimum=1
    )
    width: int = option(832, "Width of generated videos in pixels; a multiple of 16 for Wan 2.1.", minimum=1)
    max_num_seqs: int | None = option(
        None,
        "Maximum sequences the engine samples at once; null is 512 on GPUs and 256 on CPU, and at most"
        " `max_num_batched_tokens`.",
        minimum=1,
    )
    engine_arguments: dict[str, Any] = option(
        dict,
        "Further arguments of vLLM's `LLM`, or of SGLang's `ServerArgs`, such as"
        " {attention_backend: FLASH_ATTN}; refused are those on which a run depends.",
    )
    multi_turn: MultiTurnConfig = option(MultiTurnConfig, "Conversations with tools.")
    speculative: SpeculativeConfig = option(SpeculativeConfig, "Speculative decoding.")

    def sequences_at_once(self, on_gpu: bool) -> int:
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return min(GPU_SEQUENCES if on_gpu else CPU_SEQUENCES, self.max_num_batched_tokens)

    def cpu_cache_bytes(self, token_bytes: int, length: int) -> int:
        """Return the size of vLLM's cache on CPUs for sequences of a length.

        It holds the sequences at once, up to 1 GiB, but always four.
        """
        sequence = (-(-length // CPU_BLOCK) + 1) * CPU_BLOCK * token_bytes
        return max(4 * sequence, min(self.sequences_at_once(on_gpu=False) * sequence, MAX_CPU_CACHE))

    def weights_go_by(self, on_gpu: bool) -> str:
        """Return the transport of weights to engines in separate processes."""
        if self.weight_transport != "auto":
            return self.weight_transport
        return COLLECTIVE if on_gpu else OBJECT_STORE

    def problems(self, path: str) -> Iterator[str]:
        if self.name == "hf" and (size := self.tensor_parallel_size) != 1:
            yield f"`{path}.tensor_parallel_size` must be 1 with `{path}.name=hf`, got {size}"
        if self.max_num_seqs is not None and self.max_num_seqs > self.max_num_batched_tokens:
            yield (
                f"`{path}.max_num_seqs` ({self.max_num_seqs}) must be at most"
                f" `{path}.max_num_batched_tokens` ({self.max_num_batched_tokens})"
            )
        if self.lora_sync == "adapter" and (self.name != "vllm" or self.quantization is not None):
            cause = f"name={self.name}" if self.name != "vllm" else f"quantization={self.quantization}"
            yield (
                f"`{path}.lora_sync` must be auto or merged with `{path}.{cause}`, got 'adapter': whole"
                " weights are synced"
            )
        key, value = f"`{path}.quantization`", self.quantization
        if value is not None and self.name != "vllm":
            yield f"{key} must be null with `{path}.name={self.name}`, got {value!r}: only vLLM quantizes"
        if value is not None and self.dtype == "fp32":
            yield f"`{path}.dtype` must be bf16 or fp16 with {key}={value}, got 'fp32'"
        yield from self.speculative.engine_problems(path, self.name, self.val_override_config)
        if self.engine_arguments:  # the names are in files of the engine
            from verl.config.rules.engine_argument_rules import engine_argument_problems  # noqa: PLC0415

            yield from engine_argument_problems(path, self.name, self.engine_arguments)
        for name, value in self.val_override_config.items():
            yield from self._sampling_problems(f"`{path}.val_override_config.{name}`", str(name), value)

    def notes(self, path: str) -> Iterator[str]:
        for name, everything in (("top_p", 1.0), ("top_k", -1)):
            if (value := getattr(self, name)) not in (everything, 0):
                yield (
                    f"`{path}.{name}` ({value}) samples from a part of the vocabulary, and training computes"
                    " log-probs of all of it: the gradient is not quite that of what samples. Train with"
                    f" `{name}={everything}`, and set another for validation in `{path}.val_override_config`"
                )

    def _sampling_problems(self, key: str, name: str, value: Any) -> Iterator[str]:
        if name not in SAMPLING_PARAMETERS:
            if self.name not in ENGINES:
                return  # an engine of the user's takes what it likes
            longer = [known for known in SAMPLING_PARAMETERS if known.startswith(name)]
            found = longer or difflib.get_close_matches(name, SAMPLING_PARAMETERS, n=1, cutoff=0.7)
            hint = f"; did you mean `{found[0]}`?" if found else f": it must be one of {SAMPLING_PARAMETERS}"
            yield f"{key} is not a sampling parameter{hint}"
        elif name not in (taken := SAMPLED_BY.get(self.name, SAMPLING_PARAMETERS)):
            yield f"{key} must not be set with the engine {self.name}: it samples by {taken} only"
        elif name in SAMPLING_RANGES:
            is_integer, low, high, others = SAMPLING_RANGES[name]
            is_number = isinstance(value, int if is_integer else int | float) and not isinstance(value, bool)
            if value not in others and not (is_number and low <= value <= high):
                noun = "an integer" if is_integer else "a number"
                bounds = f" of at least {low:g}" + (f" and at most {high:g}" if high <= 2 else "")
                also = "".join(f", or {other!r}" for other in others)
                yield f"{key} must be {noun}{bounds}{also}, got {value!r}"

    @property
    def validation_tokens(self) -> int:
        """Maximum tokens of a response in validation; 0 if they are those of training."""
        value = self.val_override_config.get("max_tokens")
        return value if isinstance(value, int) else 0

    def longest_sequence(self, prompt: int, response: int) -> int:
        """Return the most tokens of a sequence in the engine, also in validation, from those of training."""
        return self.max_model_len or prompt + max(response, self.validation_tokens)
