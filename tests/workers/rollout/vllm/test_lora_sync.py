# SPDX-License-Identifier: Apache-2.0
"""Adapters in vLLM, as adapters and folded into its weights, against transformers with peft's layers."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from tests.workers.rollout.reference import (
    OPTIONS,
    collect,
    finish,
    largest_difference,
    largest_difference_by_version,
    load_model,
    rollout_config,
    setup_of,
    text_references,
    text_requests,
)
from verl.models.hub_names import HubNames
from verl.models.lora import adapted_layers, adapted_parameters, attach_adapters
from verl.models.lora_weights import AdapterConfig, fold, is_adapter
from verl.models.tiny import save_tiny_model
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.vllm.lora_sync import engine_adapter

pytestmark = pytest.mark.heavy

LANGUAGE = r"model\.language_model\..*|model\.layers\..*"
PART = "q_proj,gate_proj,down_proj"
CONFIG = AdapterConfig(rank=4, alpha=6, target_modules=LANGUAGE)
WHOLE = replace(OPTIONS, ignore_eos=True)  # responses of 24 tokens


def adapted(path, config=CONFIG):
    model = load_model(path)
    attach_adapters(model, config, "worker.actor.model.lora")
    return model


@torch.no_grad()
def move(model, seed):
    """Give the adapters other numbers, large enough to change every log-prob."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.2)
    return {name: parameter.detach() for name, parameter in model.named_parameters() if is_adapter(name)}


def folded(model, config=CONFIG):
    return fold(model.state_dict().items(), config, adapted_parameters(model))


@pytest.fixture(
    scope="module",
    params=[
        ("qwen2", PART),
        pytest.param(("qwen2_5_vl", LANGUAGE), marks=pytest.mark.nightly("verl/models")),
        *(pytest.param((kind, LANGUAGE), marks=pytest.mark.slow) for kind in ("qwen3_vl", "mistral3")),
    ],
    ids=lambda param: param[0],
)
def served(request, tmp_path_factory, single_process):
    """A model with adapters and the engine that serves them over a base of its own."""
    kind, targets = request.param
    path = save_tiny_model(tmp_path_factory.mktemp(kind), kind)
    config = replace(CONFIG, target_modules=targets)
    model = adapted(path, config)
    adapter = engine_adapter(model, config, rollout_config(), "cuda")
    assert adapter is not None and adapter.modules == tuple(adapted_layers(model))
    engine = build_rollout_engine(rollout_config(), setup_of(path, adapter=adapter))
    yield engine, model, path
    engine.close()


def test_an_engine_that_serves_adapters_has_the_log_probs_of_each(served):
    engine, model, path = served
    base = load_model(path)

    for seed in (1, 2):
        engine.sync_adapter(move(model, seed))
        responses = collect(engine, text_requests())

        assert largest_difference(model, text_requests(), responses) < 1e-4
        assert largest_difference(base, text_requests(), responses) > 0.1


def test_only_adapted_layers_have_room_for_adapters(served):
    engine, model, _ = served
    runner = engine.engine.model_executor.driver_worker.worker.model_runner
    parts = {"qkv_proj": ["q_proj"], "gate_up_proj": ["gate_proj"]}
    layers = {name.rpartition(".")[2] for name in adapted_layers(model)}
    room = {name.rpartition(".")[2] for name in runner.lora_manager._adapter_manager.modules}

    assert {part for name in room for part in parts.get(name, [name])} <= layers


def test_a_response_continues_with_other_adapters(served):
    engine, model, _ = served
    sampling, models = ContinuedSampling(engine), []
    for version in (0, 1, 2):
        with sampling.interrupted(version):
            engine.sync_adapter(move(model, seed=version))
        models.append(deepcopy(model))
        if version == 0:
            sampling.submit(text_requests(), WHOLE)
        sampling.step(5)

    found = finish(sampling)

    assert {tuple(response.versions) for response in found.values()} == {(0,) * 5 + (1,) * 5 + (2,) * 14}
    assert largest_difference_by_version(found, text_references(models, text_requests())) < 1e-4


@pytest.mark.nightly
def test_an_engine_with_folded_weights_has_the_same_log_probs(tmp_path, single_process):
    path = save_tiny_model(tmp_path / "model", "qwen2")
    engine = build_rollout_engine(rollout_config(), setup_of(path))
    try:
        for method in ({}, {"use_rslora": True}, {"use_dora": True}):
            config = AdapterConfig(rank=4, alpha=6, target_modules="all-linear", **method)
            model = adapted(path, config)
            move(model, seed=1)
            engine.sync_weights(HubNames(model.config).convert(folded(model, config)))

            assert largest_difference(model, text_requests(), collect(engine, text_requests())) < 1e-4
    finally:
        engine.close()


@pytest.mark.nightly("verl/models")
def test_adapters_of_experts_reach_the_engine_folded(tmp_path, own_groups):
    path = save_tiny_model(tmp_path / "model", "qwen3_moe")
    config = AdapterConfig(4, 6, "q_proj", target_parameters=("experts.gate_up_proj", "experts.down_proj"))
    model = adapted(path, config)
    for device in ("cpu", "cuda"):
        assert engine_adapter(model, config, rollout_config(), device) is None
    with pytest.raises(ValueError, match="4 tensors of `target_parameters` have adapters, for example model"):
        engine_adapter(model, config, rollout_config(lora_sync="adapter"), "cuda")
    engine = build_rollout_engine(rollout_config(), setup_of(path))
    try:
        move(model, seed=1)
        engine.sync_weights(HubNames(model.config).convert(folded(model, config)))
        responses = collect(engine, text_requests())

        assert largest_difference(model, text_requests(), responses) < 1e-4
        assert largest_difference(load_model(path), text_requests(), responses) > 0.1
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (AdapterConfig(4, 6, "all-linear"), {}, "12 adapted modules are in the vision tower"),
        (AdapterConfig(4, 6, LANGUAGE, use_dora=True), {}, "does not serve DoRA"),
        (AdapterConfig(600, 6, LANGUAGE), {}, "ranks up to 512"),
        (CONFIG, {"name": "hf"}, "`worker.rollout.name=hf` takes whole weights"),
        (CONFIG, {"lora_sync": "merged"}, "`worker.rollout.lora_sync=merged`"),
    ],
)
def test_adapters_that_an_engine_cannot_serve_are_folded_and_logged(
    tmp_path, caplog, config, options, reason
):
    model = adapted(save_tiny_model(tmp_path / "model", "qwen2_5_vl"), config)

    with caplog.at_level("INFO", logger="verl"):
        assert engine_adapter(model, config, rollout_config(**options), "cuda") is None

    assert reason in caplog.text
    if "lora_sync" not in options:
        with pytest.raises(ValueError, match="`auto` or `merged`"):
            engine_adapter(model, config, rollout_config(**options, lora_sync="adapter"), "cuda")


@pytest.mark.nightly
def test_on_cpu_adapters_are_folded_unless_requested(tmp_path):
    model = adapted(save_tiny_model(tmp_path / "model", "qwen2"))

    assert engine_adapter(model, CONFIG, rollout_config(), "cpu") is None
    assert engine_adapter(model, CONFIG, rollout_config(lora_sync="adapter"), "cpu") is not None


@pytest.mark.nightly
def test_on_cpu_adapters_cannot_be_served_with_joint_experts(tmp_path):
    model = adapted(save_tiny_model(tmp_path / "model", "qwen3_moe"))
    asked = rollout_config(lora_sync="adapter")

    assert engine_adapter(model, CONFIG, asked, "cuda") is not None
    with pytest.raises(
        ValueError, match="on CPU vLLM serves no adapters of a model with joint experts: use `auto`"
    ):
        engine_adapter(model, CONFIG, asked, "cpu")
