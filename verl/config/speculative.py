# SPDX-License-Identifier: Apache-2.0
"""Section `worker.rollout.speculative`: drafts that the engine checks several tokens at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from verl.config.schema import option

UNSUPPORTED_SAMPLING = ("min_p", "logit_bias")  # vLLM does not apply them to drafted tokens


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding; it changes the time of sampling, not its distribution."""

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

    def engine_arguments(self) -> dict[str, Any]:
        """Return vLLM's `speculative_config`."""
        arguments: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.num_tokens}
        if self.method == "ngram":
            return arguments | {
                "prompt_lookup_min": self.prompt_lookup_min,
                "prompt_lookup_max": self.prompt_lookup_max,
            }
        return arguments | {
            "suffix_decoding_max_tree_depth": self.suffix_max_tree_depth,
            "suffix_decoding_max_cached_requests": self.suffix_max_cached_requests,
        }

    def problems(self, path: str) -> Iterator[str]:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            low, high = self.prompt_lookup_min, self.prompt_lookup_max
            yield f"`{path}.prompt_lookup_min` ({low}) must be at most `{path}.prompt_lookup_max` ({high})"

    def engine_problems(self, path: str, engine: str, sampling: Mapping[str, Any]) -> Iterator[str]:
        """Problems with the engine, and with sampling parameters of validation."""
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
