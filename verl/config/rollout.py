# SPDX-License-Identifier: Apache-2.0
"""Options of the engine that samples responses."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.model import TINY, dtype_option
from verl.config.schema import option

SAMPLING_PARAMETERS = (  # vLLM's; others are handed on to it, so this list only helps to find slips
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids"),
    *("stop", "stop_token_ids", "bad_words", "skip_special_tokens", "include_stop_str_in_output"),
)
VILA = "VILA models"
DIFFUSION = "diffusion models"


@dataclass(frozen=True)
class RolloutConfig:
    """The engine that samples responses."""

    name: str = option(
        "vllm", help="Engine: vLLM, or transformers' own generation as reference.", choices=("vllm", "hf")
    )
    n: int = option(1, help="Responses to each prompt: one group.", minimum=1, example=5)
    temperature: float = option(1.0, help="Sampling temperature; log-probs use it too.", minimum=0.01)
    top_p: float = option(
        1.0, help="Sample from the smallest set with this probability.", minimum=TINY, maximum=1.0
    )
    top_k: int = option(-1, help="Sample from this many tokens; -1 is all.", minimum=1, also=(-1, 0))
    seed: int = option(1, help="Seed of sampling.", minimum=0)
    lora_sync: str = option(
        "auto",
        help="How LoRA reaches the engine: as an adapter, or `merged` into its weights; `auto` is an adapter"
        " on GPUs, wherever the engine can serve it.",
        choices=("auto", "adapter", "merged"),
    )
    limit_images: int = option(0, help="Images in a prompt at most; 0 is the engine's own limit.", minimum=0)
    dtype: str = dtype_option("bf16", "Type of the engine's weights and activations.")
    gpu_memory_utilization: float = option(
        0.6, help="Share of GPU memory for the engine while it is awake.", minimum=0.01, maximum=1.0
    )
    ignore_eos: bool = option(False, help="Sample on after the end token; for measurements.")
    enforce_eager: bool = option(False, help="Do not capture CUDA graphs: starts faster, samples slower.")
    enable_chunked_prefill: bool = option(False, help="Let the engine split long prompts over its steps.")
    tensor_parallel_size: int = option(2, help="Ranks that hold one engine.", minimum=1)
    max_model_len: int | None = option(
        None, help="Tokens of a sequence at most; null is prompt and response length together.", minimum=1
    )
    max_num_batched_tokens: int = option(8192, help="Tokens the engine runs in one step at most.", minimum=1)
    disable_log_stats: bool = option(True, help="Keep the engine from logging its statistics.")
    disable_tqdm: bool = option(False, help="Show no progress bar while sampling.")
    val_override_config: dict[str, Any] = option(
        dict,
        help="Sampling parameters for validation, such as n, temperature, top_p, max_tokens.",
        example={"temperature": 0.6, "top_p": 0.95, "n": 1},
    )
    num_video_frames: int | None = option(
        None, help="Frames of a video, spread evenly; null takes `data.video_fps` a second.", minimum=2
    )
    tokens_per_frame: int | None = option(
        None, help="Tokens of a video frame at most; null is without limit but `data.max_pixels`.", minimum=1
    )
    group_frames: int = option(64, help="Frames encoded at once.", unavailable=VILA)
    max_frames_vllm: int = option(-1, help="Frames the engine sees; -1 is all.", unavailable=VILA)
    num_chunk_seq: int = option(
        -1,
        help="Pieces in which features of media are gathered over the ranks of a sequence; -1 is one.",
        minimum=1,
        also=(-1,),
    )
    audio_max_length: int = option(10000, help="Audio samples at most.", unavailable="audio")
    open_ended_reward: bool = option(
        False, help="Score with a language model.", unavailable="built-in language judge"
    )
    diffusion: bool = option(False, help="Sample images or videos.", unavailable=DIFFUSION)
    guidance_scale: float = option(4.5, help="Classifier-free guidance of diffusion.", unavailable=DIFFUSION)
    resolution: int = option(768, help="Image side in pixels.", unavailable=DIFFUSION)
    num_steps: int = option(10, help="Denoising steps.", unavailable=DIFFUSION)
    kl_reward: float = option(0.0, help="Weight of the KL in the reward of diffusion.", unavailable=DIFFUSION)
    num_frames: int = option(81, help="Frames of a sampled video.", unavailable=DIFFUSION)
    height: int = option(480, help="Height of a sampled video in pixels.", unavailable=DIFFUSION)
    width: int = option(832, help="Width of a sampled video in pixels.", unavailable=DIFFUSION)

    def problems(self, path: str) -> Iterator[str]:
        """Yield what is wrong with the engine and with the parameters for validation."""
        if self.name == "hf" and self.tensor_parallel_size != 1:
            size = self.tensor_parallel_size
            yield f"`{path}.tensor_parallel_size` must be 1 with `{path}.name=hf`, got {size}"
        for name in self.val_override_config:
            nearest = difflib.get_close_matches(str(name), SAMPLING_PARAMETERS, n=1, cutoff=0.8)
            if nearest and name not in SAMPLING_PARAMETERS:
                key = f"{path}.val_override_config.{name}"
                yield f"`{key}` is not a sampling parameter; did you mean `{nearest[0]}`?"
        for name, minimum in (("n", 1), ("temperature", 0), ("max_tokens", 1)):
            value = self.val_override_config.get(name, minimum)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < minimum:
                yield f"`{path}.val_override_config.{name}` must be at least {minimum}, got {value!r}"
