# SPDX-License-Identifier: Apache-2.0
"""Routers whose experts are given: those experts' outputs, weighted by live scores, in every family."""

import pytest
import torch
from torch.nn import functional as F

from tests.helpers.causal_families import FAMILIES, build_family, with_recorded_routers
from verl.models.families.registry import load_config, trained_part
from verl.models.hub_names import meta_model
from verl.models.mixture.routes import extend_routes, join_routes, route_dtype, unrouted
from verl.models.mixture.routing import ChoicePass, ExpertChoices, check_replay, replay_obstacle
from verl.models.tiny import save_tiny_model

IDS = torch.arange(5, 29).view(2, 12)
MIXTURES = [
    "afmoe", "deepseek_v3", "ernie4_5_moe", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe",
    "hunyuan_v1_moe", "laguna", "lfm2_moe", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe",
    "qwen3_next", "solar_open",
]  # fmt: skip
MULTIMODAL = ["qwen3_vl_moe", "qwen3_omni_moe", "qwen3_5_moe", "glm4v_moe", "gemma4_moe"]


def mixture(name="qwen3_moe", **changes):
    model = build_family(name, FAMILIES[name] | changes)
    return model, ExpertChoices(model)


def random_routes(choices, tokens, seed=0):
    layers, k = choices.no_routes.shape[1:]
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, layers, choices.experts, generator=generator)
    return scores.topk(k, dim=-1).indices.to(choices.no_routes.dtype)


@pytest.mark.parametrize("name", with_recorded_routers(MIXTURES))
def test_own_routes_change_no_bit_and_given_ones_are_used_in_every_family(name):
    model, choices = mixture(name)

    with torch.no_grad():
        plain = model(IDS).logits
        with choices.running(ChoicePass(records=True)) as own:
            assert torch.equal(model(IDS).logits, plain)
        with choices.running(ChoicePass(own.routes(), replays=True)) as again:
            assert torch.equal(model(IDS).logits, plain)
        others = random_routes(choices, IDS.numel())
        with choices.running(ChoicePass(others, replays=True, records=True)) as used:
            assert not torch.equal(model(IDS).logits, plain)

    assert replay_obstacle(model) is None
    assert torch.equal(again.matches, again.known())
    assert torch.equal(used.routes(), others)


@pytest.mark.parametrize("normalizes", [False, True])
def test_random_routes_give_those_experts_outputs_weighted_by_their_live_probabilities(normalizes):
    model, choices = mixture(norm_topk_prob=normalizes)
    block, hidden = (
        model.model.layers[0].mlp,
        torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1)),
    )
    routes = random_routes(choices, 6)

    with choices.running(ChoicePass(routes, replays=True)):
        found = block(hidden)

    probabilities = (hidden[0] @ block.gate.weight.T).softmax(-1)  # (6, E)
    for token in range(6):
        chosen = routes[token, 0].tolist()
        total = sum(probabilities[token, expert] for expert in chosen) if normalizes else 1.0
        expected = torch.zeros(64)
        for expert in chosen:
            gate, up = (block.experts.gate_up_proj[expert] @ hidden[0, token]).chunk(2)
            output = block.experts.down_proj[expert] @ (F.silu(gate) * up)
            expected = expected + probabilities[token, expert] / total * output
        torch.testing.assert_close(found[0, token], expected, atol=1e-5, rtol=1e-5)


def test_a_router_learns_from_the_scores_of_experts_that_it_would_not_choose():
    model, choices = mixture()
    given = random_routes(choices, IDS.numel())

    with choices.running(ChoicePass(given, replays=True)):
        model(IDS).logits.square().sum().backward()

    for router in choices.routers:
        assert router.module.weight.grad.abs().max() > 0


def test_a_token_that_is_not_routed_chooses_for_itself_and_is_not_counted():
    model, choices = mixture()
    with torch.no_grad(), choices.running(ChoicePass(records=True)) as own:
        plain = model(IDS).logits
    given = own.routes().clone()
    given[5:] = unrouted(given.dtype)

    with torch.no_grad(), choices.running(ChoicePass(given, replays=True)) as found:
        replayed = model(IDS).logits

    assert torch.equal(replayed, plain)
    assert found.known().tolist() == [4.0] * 5 + [0.0] * 19  # 2 layers x 2 experts
    assert found.matches.tolist() == found.known().tolist()


def test_agreement_counts_experts_in_any_order():
    model, choices = mixture()
    with torch.no_grad(), choices.running(ChoicePass(records=True)) as own:
        model(IDS)

    with torch.no_grad(), choices.running(ChoicePass(own.routes().flip(-1))) as turned:
        model(IDS)

    assert torch.equal(turned.matches, turned.known())


def test_a_checkpointed_block_repeats_the_routes_of_its_own_pass():
    model, choices = mixture()
    checkpointed = build_family("qwen3_moe", FAMILIES["qwen3_moe"])
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed.train()
    others = ExpertChoices(checkpointed)
    routes = [random_routes(choices, IDS.numel(), seed) for seed in (0, 1)]

    found = []
    for each, observer in ((model, choices), (checkpointed, others)):
        losses = []
        for given in routes:  # both passes come before the backward passes
            with observer.running(ChoicePass(given, replays=True)):
                losses.append(each(IDS).logits.square().mean())
        sum(losses).backward()
        found.append({name: param.grad for name, param in each.named_parameters()})

    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_models_with_senses_are_replayed_as_well(family, tmp_path):
    folder = save_tiny_model(tmp_path, family)

    assert replay_obstacle(meta_model(trained_part(load_config(str(folder))))) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3", "no mixture of experts"),
        ("phimoe", "PhimoeTopKRouter does not choose experts by one topk"),
        ("jamba", "does not choose experts by one topk"),
    ],
)
def test_other_models_are_refused_with_the_reason(name, reason):
    model = build_family(name, FAMILIES[name])

    check_replay(model, "off")
    with pytest.raises(ValueError, match=f"`worker.actor.router_replay` must be 'off', got 'r3': .*{reason}"):
        check_replay(model, "r3")


def test_the_mark_of_unknown_experts_is_no_expert():
    assert route_dtype(255) == torch.uint8 and unrouted(torch.uint8) == 255
    assert route_dtype(256) == torch.int16 and unrouted(torch.int16) == -1


def test_known_routes_stay_and_later_passes_add_the_rest():
    first = torch.full((2, 1, 1), 3, dtype=torch.uint8)
    later = torch.arange(4, dtype=torch.uint8).view(4, 1, 1)

    assert join_routes(first, later).flatten().tolist() == [3, 3, 2, 3]
    assert join_routes(None, later) is later and join_routes(first, None) is first
    assert extend_routes(first, 4).flatten().tolist() == [3, 3, 255, 255]
    with pytest.raises(ValueError, match="a row of 1 tokens has routes of 2"):
        extend_routes(first, 1)
