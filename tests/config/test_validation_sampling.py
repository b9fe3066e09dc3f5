# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of validation, which a mapping hands on to the engine, are checked as options are."""

from dataclasses import replace

import pytest

from verl.config.data import DataConfig
from verl.config.multi_turn import MultiTurnConfig
from verl.config.rollout import RolloutConfig
from verl.config.rules.engine_rules import length_problems
from verl.config.worker import WorkerConfig

KEY = "worker.rollout.val_override_config"


def problems_of(name="vllm", **values):
    return list(RolloutConfig(name=name, val_override_config=values).problems("worker.rollout"))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"temp": 0.5}, f"`{KEY}.temp` is not a sampling parameter; did you mean `temperature`?"),
        ({"topp": 0.5}, f"`{KEY}.topp` is not a sampling parameter; did you mean `top_p`?"),
        ({"frobnicate": 1}, f"`{KEY}.frobnicate` is not a sampling parameter: it must be one of"),
        ({"n": 2.5}, f"`{KEY}.n` must be an integer of at least 1, got 2.5"),
        ({"n": True}, f"`{KEY}.n` must be an integer of at least 1, got True"),
        ({"top_p": 2}, f"`{KEY}.top_p` must be a number of at least 1e-06 and at most 1, got 2"),
        ({"top_k": -3}, f"`{KEY}.top_k` must be an integer of at least 1, or -1, or 0, got -3"),
        ({"temperature": "0.6"}, f"`{KEY}.temperature` must be a number of at least 0, got '0.6'"),
        ({"temperature": float("nan")}, f"`{KEY}.temperature` must be a number of at least 0, got nan"),
        ({"max_tokens": None}, f"`{KEY}.max_tokens` must be an integer of at least 1, got None"),
    ],
)
def test_a_parameter_that_the_engine_would_refuse_is_named(values, problem):
    [found] = problems_of(**values)

    assert found.startswith(problem)


def test_parameters_that_engines_take_are_no_problem():
    assert not problems_of(
        n=4, temperature=0, top_p=0.7, top_k=-1, min_p=0.1, seed=None, stop=["."], max_tokens=9
    )
    assert not problems_of(name="mine.py:Engine", whatever=1)


def lengths(max_tokens, *, converses=False, **changes):
    rollout = replace(
        RolloutConfig(val_override_config={"max_tokens": max_tokens}, **changes),
        multi_turn=MultiTurnConfig(enable=converses),
    )
    data = DataConfig(max_prompt_length=100, max_response_length=50)
    return list(length_problems(data, replace(WorkerConfig(), rollout=rollout)))


def test_validation_may_sample_more_tokens_and_the_engine_holds_them():
    assert not lengths(80)
    assert RolloutConfig(val_override_config={"max_tokens": 80}).longest_sequence(100, 50) == 180
    assert RolloutConfig(val_override_config={"max_tokens": 20}).longest_sequence(100, 50) == 150
    assert RolloutConfig().longest_sequence(100, 50) == 150


def test_more_tokens_than_the_engine_holds_or_a_conversation_may_have_are_refused():
    [short] = lengths(80, max_model_len=170)
    [conversation] = lengths(80, converses=True)

    assert short == (
        "`worker.rollout.max_model_len` (170) must be at least `data.max_prompt_length` +"
        f" `{KEY}.max_tokens` (180)"
    )
    assert conversation.startswith(f"`{KEY}.max_tokens` (80) must be at most `data.max_response_length` with")


def test_a_length_of_another_type_is_refused_once():
    assert not lengths("80")
    assert len(problems_of(max_tokens="80")) == 1


@pytest.mark.parametrize(
    ("engine", "refused"), [("sglang", ("min_tokens", "stop", "bad_words")), ("hf", ("min_p", "min_tokens"))]
)
def test_a_parameter_that_only_another_engine_takes_is_refused(engine, refused):
    for name in refused:
        [problem] = (found for found in problems_of(engine, **{name: 1}) if KEY in found)
        assert problem.startswith(f"`{KEY}.{name}` must not be set with the engine {engine}: it samples by ")
        assert not problems_of("vllm", **{name: 1})
    common = dict(temperature=0.6, top_p=0.9, top_k=20, n=2, max_tokens=5, seed=3, ignore_eos=True)
    assert problems_of(engine, **common) == problems_of(engine)


def test_sglang_samples_by_what_its_requests_translate():
    assert not problems_of("sglang", min_p=0.1, presence_penalty=0.5, stop_token_ids=[5], logit_bias={7: -5})
