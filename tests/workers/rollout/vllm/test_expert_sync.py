# SPDX-License-Identifier: Apache-2.0
"""Joint experts in vLLM: the same weights as from vLLM's own loaders, which take experts one by one."""

from types import SimpleNamespace

import pytest
import torch

from tests.workers.rollout.reference import change_weights, hub_tensors, load_model, rollout_config, setup_of
from verl.distributed.weights.gathering import ExpertSlice, full_named_tensors
from verl.models.hub_names import HubNames
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.vllm.expert_sync import PARAMETERS, UNQUANTIZED, load_stack, takes_stacks
from verl.workers.rollout.vllm.vllm_import import import_vllm

HIDDEN, INTERMEDIATE, EXPERTS = 3, 8, 6
LAYERS, TINY_EXPERTS = 2, 4  # of the tiny models
TWO_EXPERTS = 2 * 128 * 128 * 4  # bytes of two experts' gate and up projections there, in float32


def joint_tensors(model, names, slice_bytes):
    return names.convert(full_named_tensors(model, stacks=names.stacks, slice_bytes=slice_bytes))


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


def forget_weights(engine):
    for param in engine.model.parameters():
        param.data.fill_(float("nan"))


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Qwen3-VL's experts are transposed on the hub, and Qwen3's are single tensors.
@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_vl_moe"])
def synced(request, tmp_path_factory, single_process):
    """An engine, a model, its names, and the engine's weights from vLLM's own loaders."""
    path = save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    engine = build_rollout_engine(rollout_config(), setup_of(path))
    model = load_model(path)
    change_weights(model, 1)
    engine.sync_weights(hub_tensors(model))
    yield engine, model, HubNames(model.config), weights_of(engine)
    engine.close()


def count_calls(engine, monkeypatch):
    calls = []
    for layer in engine.experts.layers.values():
        for name in ("w13_weight", "w2_weight"):
            param = getattr(layer, name)
            theirs = param.weight_loader

            def counting(*args, theirs=theirs, **kwargs):
                calls.append(kwargs["shard_id"])
                return theirs(*args, **kwargs)

            monkeypatch.setattr(param, "weight_loader", counting)
    return calls


@pytest.mark.heavy
@pytest.mark.parametrize("slice_bytes, slices", [(1 << 30, (1, 1)), (TWO_EXPERTS, (2, 1)), (1, (4, 4))])
def test_joint_experts_are_loaded_bit_for_bit_in_a_call_for_each_projection(
    synced, monkeypatch, slice_bytes, slices
):
    engine, model, names, expected = synced
    calls = count_calls(engine, monkeypatch)
    forget_weights(engine)

    engine.sync_weights(joint_tensors(model, names, slice_bytes))

    assert are_equal(weights_of(engine), expected)
    assert len(calls) == LAYERS * (2 * slices[0] + slices[1])


@pytest.mark.heavy
@pytest.mark.parametrize("slice_bytes", [1 << 30, TWO_EXPERTS, 1])
def test_layers_that_take_no_stacks_get_the_same_experts_separately(synced, monkeypatch, slice_bytes):
    engine, model, names, expected = synced
    calls = count_calls(engine, monkeypatch)
    monkeypatch.setattr(engine.experts, "layers", {})
    forget_weights(engine)

    engine.sync_weights(joint_tensors(model, names, slice_bytes))

    assert are_equal(weights_of(engine), expected)
    assert len(calls) == LAYERS * 3 * TINY_EXPERTS


@pytest.mark.heavy
@pytest.mark.parametrize("missing", ["down_proj[0:4]", "gate_up_proj[2:4]"])
def test_a_missing_stack_or_slice_is_named(synced, missing):
    engine, model, names, _ = synced
    limit = 1 << 30 if missing.endswith("[0:4]") else TWO_EXPERTS

    def some():
        for name, tensor in joint_tensors(model, names, limit):
            if not name.endswith(f".1.mlp.experts.{missing}"):
                yield name, tensor

    parameter = PARAMETERS[ExpertSlice.of(missing).weight].parameter
    with pytest.raises(RuntimeError, match=rf"did not reach .*layers\.1\.mlp\.experts.*{parameter}"):
        engine.sync_weights(some())
    engine.sync_weights(joint_tensors(model, names, limit))  # the next one is counted from the start


def layer_of(rank, ranks, places=None, **changes):
    """vLLM's layer of experts as one of tensor-parallel `ranks` has it, or with experts at `places`."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    local = EXPERTS if places is None else int((places >= 0).sum())
    width = INTERMEDIATE // ranks
    moe = dict(
        tp_rank=rank, moe_parallel_config=SimpleNamespace(tp_size=ranks), is_act_and_mul=True, has_bias=False,
        tp_shard_with_padding=False, num_logical_experts=EXPERTS,
    )  # fmt: skip
    layer.moe_config = SimpleNamespace(**moe | changes)
    layer.layer_name, layer.global_num_experts, layer.quant_config = "experts", EXPERTS, None
    layer.quant_method, layer._fused_shared_expert_quantizer = type(UNQUANTIZED, (), {})(), None
    layer.expert_map_manager = SimpleNamespace(
        expert_map=places, map_global_to_local=lambda g: g if places is None else places[g].item()
    )
    for name, shape in (("w13_weight", (2 * width, HIDDEN)), ("w2_weight", (HIDDEN, width))):
        param = torch.nn.Parameter(torch.full((local, *shape), float("nan")), requires_grad=False)
        param.weight_loader = layer.weight_loader
        setattr(layer, name, param)
    return layer


def load_one_by_one(layer, gate_up, down):
    """As vLLM's own loaders do."""
    gate, up = gate_up.chunk(2, dim=1)
    for shard, stack in (("w1", gate), ("w3", up), ("w2", down)):
        param = layer.w2_weight if shard == "w2" else layer.w13_weight
        name = "w2_weight" if shard == "w2" else "w13_weight"
        for expert, weight in enumerate(stack):
            layer.weight_loader(param, weight, name, shard, expert, return_success=True)


LINEAR = torch.tensor([-1, -1, 0, 1, 2, -1])  # experts 2, 3 and 4 are on this rank
ROUND_ROBIN = torch.tensor([-1, 0, -1, 1, -1, 2])


@pytest.mark.parametrize("rank, ranks, places", [
    (0, 1, None), (0, 2, None), (1, 2, None), (3, 4, None), (0, 1, LINEAR), (0, 1, ROUND_ROBIN),
])  # fmt: skip
@pytest.mark.parametrize("step", [EXPERTS, 4, 1])
def test_shards_and_experts_of_a_rank_are_those_that_single_experts_give(rank, ranks, places, step):
    import_vllm("cpu")
    gate_up, down = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN), torch.randn(EXPERTS, HIDDEN, INTERMEDIATE)
    expected, layer = layer_of(rank, ranks, places), layer_of(rank, ranks, places)
    load_one_by_one(expected, gate_up, down)

    for start in range(0, EXPERTS, step):
        for weight, stack in (("gate_up_proj", gate_up), ("down_proj", down)):
            load_stack(layer, PARAMETERS[weight], stack[start : start + step], start)

    assert torch.equal(layer.w13_weight, expected.w13_weight) and not layer.w13_weight.isnan().any()
    assert torch.equal(layer.w2_weight, expected.w2_weight) and not layer.w2_weight.isnan().any()


def test_experts_at_irregular_places_are_refused():
    import_vllm("cpu")
    layer = layer_of(0, 1, torch.tensor([0, 1, -1, 2, -1, -1]))

    with pytest.raises(NotImplementedError, match="experts has its experts at irregular places"):
        load_stack(layer, PARAMETERS["down_proj"], torch.randn(EXPERTS, HIDDEN, INTERMEDIATE), 0)


def test_only_unquantized_plain_layers_take_stacks():
    import_vllm("cpu")
    quantized, other = layer_of(0, 1), layer_of(0, 1)
    quantized.quant_method = type("Fp8OnlineMoEMethod", (), {})()
    other.__class__ = type("GptOssRoutedExperts", (type(other),), {})

    assert takes_stacks(layer_of(0, 1))
    for layer in (quantized, other, layer_of(0, 1, has_bias=True), layer_of(0, 1, is_act_and_mul=False),
                  layer_of(0, 1, num_logical_experts=EXPERTS - 1)):  # fmt: skip
        assert not takes_stacks(layer)
