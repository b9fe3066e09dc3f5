# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine whose weights are quantized to FP8, on CPU.

A plain product with dequantized weights replaces vLLM's, whose kernels need GPUs. Quantization, loading and
sampling are vLLM's.
"""

import importlib

import pytest
import torch
import torch.nn.functional as F

from tests.workers.rollout.reference import (
    change_weights,
    collect,
    hub_tensors,
    largest_difference,
    load_model,
    rollout_config,
    setup_of,
    text_requests,
)
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.vllm.vllm_import import import_vllm
from verl.workers.rollout.vllm.weight_sync import quantized_layers

LARGEST = 448.0  # of float8_e4m3fn
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class PlainProduct:
    """A product of activations and FP8 weights (in, out) with a scale for each output."""

    def __init__(self, *args, **kwargs):
        pass

    def input_quant_key(self):
        return None

    def process_weights_after_loading(self, layer):
        assert layer.weight.dtype == torch.float8_e4m3fn

    def apply_weights(self, layer, x, bias=None):
        weight = layer.weight.float() * layer.weight_scale.float().reshape(1, -1)
        return F.linear(x, weight.t().to(x.dtype), bias)


@torch.no_grad()
def quantized(model):
    """The model with each row of its linear weights rounded to FP8 and back."""
    for name, module in model.named_modules():
        if name.endswith(LINEAR):
            weight = module.weight
            scale = weight.abs().amax(-1, keepdim=True) / LARGEST
            weight.copy_((weight / scale).to(torch.float8_e4m3fn).float() * scale)
    return model


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def engine_and_path(request, tmp_path_factory, single_process):
    import_vllm("cpu")
    online = importlib.import_module("vllm.model_executor.layers.quantization.online.fp8")
    base = importlib.import_module("vllm.model_executor.layers.quantization.online.base")
    path = save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online, "init_fp8_linear_kernel", PlainProduct)
        # in float32 an error of loading is not hidden by rounding
        types = staticmethod(lambda: [torch.float32])
        patch.setattr(base.OnlineQuantizationConfig, "get_supported_act_dtypes", types)
        engine = build_rollout_engine(rollout_config(quantization="fp8"), setup_of(path))
    yield engine, path
    engine.close()


@pytest.mark.nightly
@pytest.mark.heavy
def test_each_sync_samples_from_the_weights_rounded_to_fp8(engine_and_path):
    engine, path = engine_and_path
    requests, addresses = text_requests(), []
    for seed in (1, 2, 3):
        model = load_model(path)
        change_weights(model, seed)

        engine.sync_weights(hub_tensors(model))

        responses = collect(engine, requests)
        exact = largest_difference(model, requests, responses)
        rounded = largest_difference(quantized(model), requests, responses)
        assert rounded < 1e-4 < 1e-2 < exact
        addresses.append({name: each.data_ptr() for name, each in engine.model.named_parameters()})
    # captured graphs read the same memory
    assert addresses[0] == addresses[1] == addresses[2]
    layers = quantized_layers(engine.model)
    assert len(layers) == 4 * model.config.num_hidden_layers
    assert {layer.weight.dtype for layer in layers} == {torch.float8_e4m3fn}


@pytest.mark.nightly
@pytest.mark.heavy
def test_a_sync_that_leaves_a_layer_out_is_an_error(engine_and_path):
    engine, path = engine_and_path
    model = load_model(path)
    without = [pair for pair in hub_tensors(model) if "layers.0.mlp.down_proj" not in pair[0]]

    with pytest.raises(RuntimeError, match=r"did not reach .*layers\.0\.mlp\.down_proj\.weight"):
        engine.sync_weights(without)
