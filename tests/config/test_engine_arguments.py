# SPDX-License-Identifier: Apache-2.0
"""`worker.rollout.engine_arguments`: what a run depends on is refused, names are those of the engine."""

from dataclasses import replace
from fnmatch import filter as matching
from importlib.util import find_spec

import pytest

from verl.config.ppo import PPOConfig
from verl.config.rollout import RolloutConfig
from verl.config.rules.engine_argument_rules import declared_arguments, own_arguments
from verl.config.schema import list_options

ENGINES = ("vllm", "sglang")


def problems_of(name="vllm", **arguments):
    changes = dict(name=name, tensor_parallel_size=1, engine_arguments=arguments)
    return list(replace(RolloutConfig(), **changes).problems("worker.rollout"))


def test_an_argument_that_an_option_sets_names_the_option():
    [problem] = problems_of(max_model_len=100)
    assert problem == (
        "`worker.rollout.engine_arguments.max_model_len` must not be set: set `worker.rollout.max_model_len`"
        " instead"
    )
    [problem] = problems_of("sglang", tp_size=2)
    assert "set `worker.rollout.tensor_parallel_size` instead" in problem


def test_an_argument_on_which_a_run_depends_is_refused_with_the_reason():
    [problem] = problems_of(logprobs_mode="raw_logits")
    assert "before top-p" in problem
    first, second = problems_of("sglang", speculative_algorithm="EAGLE", enable_lora=True)
    assert "`worker.rollout.name=vllm`" in first and "folded into the weights" in second


def test_transformers_takes_no_arguments_and_an_engine_of_the_users_any():
    [problem] = problems_of("hf", use_cache=True)
    assert "must be empty with `worker.rollout.name=hf`, got ['use_cache']" in problem
    assert not problems_of("my_engine.py:Engine", model="x", anything=1)


@pytest.mark.skipif(find_spec("vllm") is None, reason="reads vLLM's files")
def test_an_unknown_argument_of_vllm_is_named_with_the_nearest():
    assert not problems_of(block_size=64, attention_backend="FLASH_ATTN")
    [problem] = problems_of(blok_size=64)
    assert problem == (
        "`worker.rollout.engine_arguments.blok_size` is not an argument of the installed vllm; did you mean"
        " `block_size`?"
    )


@pytest.mark.skipif(find_spec("sglang") is None, reason="reads SGLang's files")
def test_an_unknown_argument_of_sglang_is_named_with_the_nearest():
    assert not problems_of("sglang", page_size=16)
    [problem] = problems_of("sglang", page_sise=16)
    assert "is not an argument of the installed sglang; did you mean `page_size`?" in problem


@pytest.mark.parametrize("engine", ENGINES)
def test_every_refused_argument_exists_and_every_option_that_sets_one(engine):
    options = {entry.key for entry in list_options(PPOConfig)}
    for pattern, (option, reason) in own_arguments()[engine].items():
        assert bool(option) != bool(reason)
        assert option is None or option in options or any(key.startswith(f"{option}.") for key in options)
        if find_spec(engine):
            assert matching(declared_arguments(engine), pattern), pattern
