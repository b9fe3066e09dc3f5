# SPDX-License-Identifier: Apache-2.0
"""Routers of a mixture: found in every family that records their logits, balanced as transformers does."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.helpers.causal_families import recorded_later, with_recorded_routers
from verl.config.model import FSDPConfig, ModelConfig
from verl.models.families.registry import load_config
from verl.models.families.tiny_sizes import TEXT
from verl.models.hub_names import meta_model
from verl.models.lora_weights import AdapterConfig, is_adapter
from verl.models.mixture.routing import Routing, balance_loss, routers_of
from verl.models.tiny import save_tiny_model
from verl.models.trainable import select_trainable
from verl.planning.memory_model import MicroBatch, ModelSetup, saved_activations
from verl.planning.model_sizes import read_shape

OPTION = "worker.actor.model"
SMALL = TEXT | {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
GROUPED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
           "moe_intermediate_size": 64, "first_k_dense_replace": 1, "num_hidden_layers": 3}  # fmt: skip
CAUSAL = {  # options, routers of the model
    "qwen3_moe": ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}, 2),
    "qwen2_moe": ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}, 2),
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, 2),
    "olmoe": ({"num_experts": 4, "num_experts_per_tok": 2}, 2),
    "granitemoe": ({"num_local_experts": 4, "num_experts_per_tok": 2}, 2),
    "gpt_oss": ({"num_local_experts": 4, "num_experts_per_tok": 2}, 2),
    "phimoe": ({"num_local_experts": 4, "num_experts_per_tok": 2}, 2),
    "glm4_moe": (GROUPED, 2),
}
EXACT = ("qwen3_moe", "mixtral", "gpt_oss", "granitemoe")  # they add transformers' own loss to an output
IDS = torch.arange(5, 29).view(2, 12)
MASK = torch.ones(2, 12, dtype=torch.long)
MASK[1, :5] = 0


def build(name):
    options, layers = CAUSAL[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **(SMALL | options))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval(), layers


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("name", with_recorded_routers(CAUSAL))
def test_routers_of_every_family_are_found_and_their_loss_is_that_of_transformers(name):
    model, layers = build(name)
    routing = Routing.of(model)
    assert routing is not None and len(routing.routers) == layers

    with routing.recording(MASK.flatten().float(), keeps_logits=True) as routes:
        result = model(IDS, attention_mask=MASK, output_router_logits=True)

    loss = balance_loss([routes], routes.choices())
    expected = load_balancing_loss_func(tuple(routes.logits), 4, 2, MASK)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=0)
    if name in EXACT:
        torch.testing.assert_close(loss, result.aux_loss, atol=1e-6, rtol=0)
    found = gradients(model, loss)
    with routing.recording(MASK.flatten().float(), keeps_logits=True) as again:
        model(IDS, attention_mask=MASK)
    whole = gradients(model, load_balancing_loss_func(tuple(again.logits), 4, 2, MASK))
    assert found.keys() == whole.keys() and any(grad.any() for grad in whole.values())
    for key, grad in whole.items():
        torch.testing.assert_close(found[key], grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", with_recorded_routers(CAUSAL))
def test_padding_is_counted_nowhere_and_every_token_once_for_each_of_its_experts(name):
    model, layers = build(name)
    routing = Routing.of(model)

    with torch.no_grad(), routing.recording(MASK.flatten().float(), by_token=True) as routes:
        model(IDS, attention_mask=MASK)

    load = torch.stack(routes.load)
    assert load.shape == (layers, 4)
    assert (load.sum(-1) == 2 * MASK.sum()).all()
    assert (routes.by_token.sum(-1) == 2 * layers).all()


@recorded_later
def test_the_load_counts_the_experts_that_a_grouped_router_really_chose():
    model, _ = build("glm4_moe")
    routing = Routing.of(model)
    with torch.no_grad():
        for router in routing.routers:
            router.module.e_score_correction_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))

        with routing.recording(MASK.flatten().float()) as routes:
            model(IDS, attention_mask=MASK)

    assert torch.stack(routes.load).tolist() == [[19.0, 19.0, 0.0, 0.0]] * 2


def test_recomputed_activations_are_recorded_once_and_change_no_gradient():
    model, _ = build("qwen3_moe")
    routing = Routing.of(model)
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        with routing.recording(MASK.flatten().float(), keeps_logits=True) as routes:
            logits = model(IDS, attention_mask=MASK, use_cache=False).logits
        loss = logits.log_softmax(-1)[..., 0].mean() + balance_loss([routes], routes.choices())
        found.append(gradients(model, loss))
        assert len(routes.logits) == len(routes.load) == 2

    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, atol=1e-7, rtol=1e-5)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe"])
def config(request, tmp_path_factory):
    return load_config(save_tiny_model(tmp_path_factory.mktemp("model"), request.param))


def frozen(model):
    return {name for name, param in model.named_parameters() if not param.requires_grad}


def test_frozen_routers_are_the_routers_and_nothing_else(config):
    model = meta_model(config)

    select_trainable(model, ModelConfig(freeze_router=True, train_modules=["mlp"]), OPTION)

    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert len(routers_of(model)) == 2
    assert trained == {name for name, _ in model.named_parameters() if "mlp" in name and "gate.w" not in name}


def test_frozen_routers_have_no_adapters(config):
    model = meta_model(config)
    adapter = AdapterConfig(4, 8, "all-linear", target_parameters=("gate.weight", "experts.down_proj"))

    select_trainable(model, ModelConfig(freeze_router=True), OPTION, adapter)

    adapted = {name for name, _ in model.named_parameters() if is_adapter(name)}
    assert any("experts" in name for name in adapted) and not any(".gate." in name for name in adapted)


def test_the_plan_knows_the_bytes_of_a_tokens_routes(tmp_path):
    few = save_tiny_model(tmp_path / "few", "qwen3_moe", num_experts=8)
    many = save_tiny_model(tmp_path / "many", "qwen3_moe", num_experts=300)
    dense = save_tiny_model(tmp_path / "dense", "qwen3")

    shapes = [
        read_shape(ModelConfig(str(folder)), FSDPConfig(), option=OPTION, is_trained=True)
        for folder in (few, many, dense)
    ]

    assert [shape.routes for shape in shapes] == [2 * 2, 2 * 2 * 2, 0]  # layers, experts of a token, bytes


def test_the_plan_counts_the_logits_that_the_loss_keeps(tmp_path):
    folder = save_tiny_model(tmp_path, "qwen3_moe", num_experts=8)
    arguments = {"option": OPTION, "is_trained": True}
    plain = read_shape(ModelConfig(str(folder)), FSDPConfig(), **arguments)
    balanced = read_shape(ModelConfig(str(folder), router_aux_loss_coef=0.1), FSDPConfig(), **arguments)

    setup, batch = ModelSetup("cpu", 1, c=2), MicroBatch(tokens=64, responses=8)
    kept = saved_activations(balanced, setup, batch) - saved_activations(plain, setup, batch)
    assert kept == 2 * 64 * 2 * 8  # bytes, tokens, layers, experts


def test_dense_models_have_no_routers_to_balance_and_nothing_to_freeze(tmp_path, caplog):
    model = meta_model(AutoConfig.from_pretrained(save_tiny_model(tmp_path, "qwen3")))

    assert Routing.of(model) is None
    with pytest.raises(
        ValueError, match=r"`worker.actor.model.router_aux_loss_coef` needs a mixture.*Qwen3For"
    ):
        select_trainable(model, ModelConfig(router_aux_loss_coef=0.1), OPTION)
    select_trainable(model, ModelConfig(freeze_router=True), OPTION)
    assert "`worker.actor.model.freeze_router` has no effect" in caplog.text
    assert not frozen(model)


def test_routers_that_transformers_does_not_record_are_not_left_trained_by_mistake(monkeypatch):
    model, _ = build("qwen3_moe")
    monkeypatch.setattr(type(model.get_decoder()), "_can_record_outputs", {})

    with pytest.raises(ValueError, match=r"freeze_router` finds no router in Qwen3MoeFor.*freeze_modules"):
        select_trainable(model, ModelConfig(freeze_router=True), OPTION)
