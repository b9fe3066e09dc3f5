# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding of the vLLM engine: drafts change neither what is sampled nor its log-probs."""

import importlib.util
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from tests.helpers.conversations import rules_of
from tests.workers.rollout.reference import (
    collect,
    hub_tensors,
    largest_difference,
    load_model,
    rollout_config,
    setup_of,
)
from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import CallFormat
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig
from verl.config.rollout import SpeculativeConfig
from verl.models.tiny import save_tiny_model
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.conversations.driver import ConversationDriver
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import Drafts, RolloutRequest, SamplingOptions, join_drafts
from verl.workers.rollout.vllm.cpu_patches import expand_to_tokens

TEMPERATURE, LENGTH, LIKELY = 1.0, 3, 8
PROMPT = [40, 41, 42, 42, 42, 42]
HAS_SUFFIX = importlib.util.find_spec("arctic_inference") is not None
METHODS = [
    pytest.param("ngram", marks=pytest.mark.nightly),
    pytest.param("suffix", marks=pytest.mark.skipif(not HAS_SUFFIX, reason="needs arctic-inference")),
]


@pytest.fixture(scope="module", params=METHODS)
def drafting(request, tmp_path_factory, single_process):
    """An engine that drafts, its model, and a prompt whose ends recur, so that there are drafts."""
    path = save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")
    options = SpeculativeConfig(request.param, num_tokens=LENGTH, prompt_lookup_min=1, prompt_lookup_max=2)
    engine = build_rollout_engine(rollout_config(speculative=options), setup_of(path))
    model = load_model(path)
    with torch.no_grad():  # the head is tied: a token is followed by itself about every second time
        model.get_input_embeddings().weight.mul_(3)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.3)
    engine.sync_weights(hub_tensors(model))
    yield engine, model, PROMPT
    engine.close()


@torch.no_grad()
def likely_responses(model, prompt, temperature, top_k):
    """Probabilities of responses made of the likeliest tokens at each place, by transformers."""
    found = {(): 1.0}
    for _ in range(LENGTH):
        logits = model(input_ids=torch.tensor([[*prompt, *begun] for begun in found])).logits[:, -1]
        logits = logits.double() / temperature
        if top_k > 0:
            logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
        probs, tokens = logits.softmax(-1).topk(LIKELY)
        found = {
            (*begun, token): found[begun] * prob
            for row, begun in enumerate(found)
            for token, prob in zip(tokens[row].tolist(), probs[row].tolist(), strict=True)
            if prob > 0
        }
    return found


def p_value(counts, probs, number):
    """p-value of Pearson's chi-square test; outcomes expected fewer than five times are one class."""
    often = [one for one, prob in probs.items() if number * prob >= 5]
    expected = torch.tensor([number * probs[one] for one in often], dtype=torch.float64)
    observed = torch.tensor([counts[one] for one in often], dtype=torch.float64)
    expected = torch.cat([expected, number - expected.sum(0, keepdim=True)])
    observed = torch.cat([observed, number - observed.sum(0, keepdim=True)])
    if expected[-1] < 5:
        expected, observed = expected[:-1], observed[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return len(expected), torch.special.gammaincc(
        (len(expected) - 1) * 0.5 * torch.ones(()), statistic / 2
    ).item()


@pytest.mark.heavy
@pytest.mark.parametrize("top_k", [-1, pytest.param(4, marks=pytest.mark.nightly)])
def test_drafts_do_not_change_the_distribution_of_responses(drafting, top_k):
    engine, model, prompt = drafting
    number = 4096
    options = SamplingOptions(number, TEMPERATURE, top_k=top_k, max_tokens=LENGTH, ignore_eos=True)

    responses = collect(engine, [RolloutRequest("a", prompt)], options).values()

    counts = Counter(tuple(response.token_ids) for response in responses)
    probs = likely_responses(model, prompt, TEMPERATURE, top_k)
    classes, p = p_value(counts, probs, number)
    proposed, accepted = (sum(response.drafts[index] for response in responses) for index in (0, 1))
    assert classes >= 10 and p > 0.01
    assert accepted > 0.1 * proposed > 100
    # the test would notice a temperature that is wrong by a tenth
    assert p_value(counts, likely_responses(model, prompt, TEMPERATURE * 1.1, top_k), number)[1] < 1e-3


@pytest.mark.heavy
@pytest.mark.parametrize(("temperature", "top_p"), [(TEMPERATURE, 1.0), (0.6, 0.8), (0.0, 1.0)])
def test_log_probs_of_accepted_tokens_are_those_of_the_policy(drafting, temperature, top_p):
    engine, model, prompt = drafting
    options = SamplingOptions(8, temperature, top_p, max_tokens=40)
    requests = [RolloutRequest("a", prompt), RolloutRequest("b", [50, 51, 50, 51, 50])]

    responses = collect(engine, requests, options)

    assert sum(response.drafts.accepted for response in responses.values()) > 0
    assert largest_difference(model, requests, responses, options.logit_temperature) < 1e-4
    if options.is_greedy:
        for request in requests:
            ids = responses[request.uid, 0].token_ids
            whole = torch.tensor([[*request.prompt_token_ids, *ids]])
            likeliest = model(whole).logits[0, len(request.prompt_token_ids) - 1 : -1].argmax(-1)
            assert likeliest.tolist() == ids


@pytest.mark.heavy
def test_banned_tokens_are_not_sampled_from_drafts_either(drafting, monkeypatch):
    engine, model, prompt = drafting
    options = SamplingOptions(64, TEMPERATURE, max_tokens=20, ignore_eos=True)
    free = collect(engine, [RolloutRequest("a", prompt)], options)
    [(often, _)] = Counter(token for one in free.values() for token in one.token_ids).most_common(1)

    monkeypatch.setattr(engine, "banned", [often])
    responses = collect(engine, [RolloutRequest("a", prompt)], options)

    assert all(often not in response.token_ids for response in responses.values())
    assert largest_difference(model, [RolloutRequest("a", prompt)], responses, TEMPERATURE) < 1e-4


TOOL = """
def wait(number: int) -> str:
    \"\"\"Wait.

    Args:
        number: How long.
    \"\"\"
    return "and on"
"""


@pytest.mark.heavy
def test_drafts_of_conversations_are_those_of_all_turns_and_of_their_interrupted_parts(
    drafting, tmp_path, monkeypatch
):
    engine, model, _ = drafting
    scheduler, counted = engine.engine.engine_core.engine_core.scheduler, []
    count = scheduler.make_spec_decoding_stats

    def counting(*values, num_draft_tokens, num_accepted_tokens, **others):
        counted.append((num_draft_tokens, num_accepted_tokens))
        numbers = {"num_draft_tokens": num_draft_tokens, "num_accepted_tokens": num_accepted_tokens}
        return count(*values, **numbers, **others)

    monkeypatch.setattr(scheduler, "make_spec_decoding_stats", counting)
    (tmp_path / "tools.py").write_text(TOOL)
    options = MultiTurnConfig(enable=True, tools=(f"{tmp_path / 'tools.py'}:wait",))
    form = CallFormat(lambda text, schemas: [ToolCall("wait", {"number": 1})], "")
    rules = rules_of(
        tokenizer=AutoTokenizer.from_pretrained(model.name_or_path), max_tokens=200, max_assistant_turns=3
    )
    row = {"raw_prompt_ids": PROMPT, "prompt_messages": [{"role": "user", "content": "?"}]}
    rows = [row | {"uid": uid, "multi_modal_data": None} for uid in "ab"]
    # every third token ends a turn, but none that the prompt repeats: turns are long enough for drafts
    sampling = SamplingOptions(n=4, max_tokens=200).override({"stop_token_ids": list(range(31, 300, 3))})

    with ToolPool(options) as pool:
        driver = ConversationDriver(
            ContinuedSampling(engine), pool, replace(rules, format=form), lambda _: None
        )
        driver.submit(rows, sampling)
        responses = driver.step(2)
        assert not responses and engine.num_unfinished
        driver.interrupt()
        driver.submit(rows, sampling)
        while len(responses) < 8:
            responses += driver.step(16)

    assert sum(len(response.trajectory.turns) > 1 for response in responses) > 1
    proposed, accepted = (sum(response.drafts[index] for response in responses) for index in (0, 1))
    assert (proposed, accepted) == tuple(map(sum, zip(*counted, strict=True)))
    assert 0 < accepted < proposed


def test_drafts_of_two_parts_are_added():
    assert join_drafts(Drafts(3, 1), Drafts(4, 2)) == Drafts(7, 3)
    assert join_drafts(None, Drafts(4, 2)) == join_drafts(Drafts(4, 2), None) == Drafts(4, 2)
    assert join_drafts(None, None) is None


def test_each_token_of_a_draft_gets_the_option_of_its_request():
    # the second request has no draft
    values, ends = torch.tensor([0.5, 0.7, 0.0]), torch.tensor([2, 2, 5])

    expanded = expand_to_tokens(values, ends, 5, replace_from=0, replace_to=1)

    assert expanded.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
