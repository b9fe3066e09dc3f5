# SPDX-License-Identifier: Apache-2.0
"""The tables of the page on rollout engines: `python3 -m tests.architecture.engines` rewrites them.

An engine has an ability if a test of it says so.
"""

import re

from tests.architecture.source import ROOT
from verl.config.rules.engine_argument_rules import own_arguments

PAGE = ROOT / "docs" / "engines.md"
TESTS = ROOT / "tests" / "workers" / "rollout"
ENGINES = ("vllm", "sglang", "hf")
JOIN = "test_stepwise.py::test_requests_that_join_are_sampled_by_the_same_law"
ABORT = "test_stepwise.py::test_aborted_requests_give_no_response_and_leave_the_others_alone"
SEEDS = "test_stepwise.py::test_a_seed_and_an_offset_give_a_request_its_own_random_numbers"
TURNS = "test_turns.py::test_both_turns_have_the_log_probs_of_the_whole_row"
ROUTES = "test_engine_routes.py::test_an_engine_returns_the_routes_of_all_tokens_but_the_last"
VERSIONS = "test_each_token_has_the_log_prob_of_the_weights_that_sampled_it"
MEDIA = "test_log_probs_equal_the_models_after_each_sync_with_the_same_media"
# Abilities with the test of each engine that has it.
ABILITIES: dict[str, dict[str, str]] = {
    "several responses to each prompt, requests that join others": dict.fromkeys(ENGINES, JOIN),
    "requests that are dropped": dict.fromkeys(ENGINES, ABORT),
    "a seed for each response": dict.fromkeys(ENGINES, SEEDS),
    "log-probs before top-p, top-k and banned tokens": {
        "vllm": "vllm/test_rollout.py::test_log_probs_are_those_of_the_scaled_logits_before_top_p_and_top_k",
        "sglang": "sglang/test_rollout.py::test_log_probs_are_those_of_the_scaled_logits_before_all_else",
        "hf": "test_hf_rollout.py::test_log_probs_are_those_of_the_scaled_logits_before_top_p_and_top_k",
    },
    "the random numbers of a checkpoint": {
        "vllm": "vllm/test_rollout.py::test_a_restored_random_stream_continues_with_the_same_tokens",
        "sglang": "sglang/test_rollout.py::test_a_restored_random_stream_repeats_the_tokens",
        "hf": "test_hf_rollout.py::test_a_restored_random_stream_continues_with_the_same_tokens",
    },
    "responses that continue with other weights": {
        "vllm": f"test_continued_sampling.py::{VERSIONS}",
        "sglang": f"sglang/test_rollout.py::{VERSIONS}",
        "hf": f"test_continued_sampling.py::{VERSIONS}",
    },
    "conversations, whose turns are one row": dict.fromkeys(ENGINES, TURNS),
    "images and videos": {
        "vllm": f"vllm/test_media.py::{MEDIA}",
        "sglang": f"sglang/test_sglang_media.py::{MEDIA}",
        "hf": "test_hf_rollout.py::test_log_probs_of_media_prompts_equal_the_models",
    },
    "features of a frozen tower": {
        "vllm": "vllm/test_media.py::test_features_give_the_log_probs_of_their_pixels_after_each_sync"
    },
    "experts with their routes": dict.fromkeys(ENGINES, ROUTES),
    "adapters that are synced without their base (`lora_sync=adapter`)": {
        "vllm": "vllm/test_lora_sync.py::test_an_engine_that_serves_adapters_has_the_log_probs_of_each"
    },
    "tensor parallelism": {
        "vllm": "vllm/test_parallel.py"
        "::test_tensor_parallel_ranks_sample_the_same_and_leave_no_shared_memory",
        "sglang": "sglang/test_sglang_parallel.py"
        "::test_tensor_parallel_ranks_return_the_same_responses_with_the_models_log_probs",
    },
    "speculative decoding": {
        "vllm": "vllm/test_drafts.py::test_drafts_do_not_change_the_distribution_of_responses"
    },
    "FP8 weights": {
        "vllm": "vllm/test_quantized_weights.py::test_each_sync_samples_from_the_weights_rounded_to_fp8"
    },
}


def abilities() -> str:
    """Return the table of what each engine can do, in Markdown."""
    rows = [
        f"| {ability} | " + " | ".join("yes" if engine in tests else "no" for engine in ENGINES) + " |"
        for ability, tests in ABILITIES.items()
    ]
    head = ["| | " + " | ".join(f"`{engine}`" for engine in ENGINES) + " |", "|---" * 4 + "|"]
    return "\n".join([*head, *rows, ""])


def arguments() -> str:
    """Return the table of the engines' arguments that `engine_arguments` refuses, in Markdown."""
    rows = ["| engine | argument | option, or reason |", "|---|---|---|"]
    for engine, table in own_arguments().items():
        rows += [
            f"| `{engine}` | `{pattern}` | {f'`{option}`' if option else reason} |"
            for pattern, (option, reason) in table.items()
        ]
    return "\n".join([*rows, ""])


TABLES = {"## What each engine can do": abilities, "## Arguments that are refused": arguments}


def with_tables(text: str) -> str:
    """Return the page with its tables generated again."""
    for heading, table in TABLES.items():
        found = re.search(rf"{heading}\n.*?\n((?:\|[^\n]*\n)+)", text, re.DOTALL)
        assert found, f"docs/engines.md needs the heading {heading!r} with a table"
        text = text[: found.start(1)] + table() + text[found.end(1) :]
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
