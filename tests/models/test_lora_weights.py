# SPDX-License-Identifier: Apache-2.0
"""Adapters folded into weights, and their files."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from verl.models.lora_weights import (
    AdaptedParameter,
    AdapterConfig,
    AdapterFiles,
    fold,
    fold_experts,
    fold_weight,
    memory_name,
    peft_name,
    plain_name,
    read_adapter,
    read_adapter_config,
)

WEIGHT = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
DOWN, UP = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0], [0.0]])  # their product: [[2, 0], [0, 0]]


def test_a_folded_weight_is_the_weight_plus_the_scaled_product():
    torch.testing.assert_close(
        fold_weight(WEIGHT, DOWN, UP, scale=0.5), torch.tensor([[2.0, 2.0], [3.0, 4.0]])
    )


def test_the_row_norms_of_a_folded_dora_weight_are_the_magnitudes():
    # The rows of W + BA / 2 are (2, 2) and (3, 4), of lengths 2 sqrt(2) and 5.
    result = fold_weight(WEIGHT, DOWN, UP, scale=0.5, magnitude=torch.tensor([2.0**0.5, 10.0]))

    torch.testing.assert_close(result, torch.tensor([[1.0, 1.0], [6.0, 8.0]]))


def test_folding_into_a_bfloat16_weight_keeps_small_adapters():
    weight = torch.ones(1, 1, dtype=torch.bfloat16)

    result = fold_weight(weight, torch.full((1, 1), 1e-3), torch.ones(1, 1), scale=1.0)

    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(1.001)


def test_folding_yields_plain_names_for_any_order_of_the_tensors():
    tensors = {
        "layer.norm.weight": torch.ones(2),
        "layer.q.lora_B.default.weight": UP,
        "layer.q.base_layer.weight": WEIGHT,
        "layer.q.base_layer.bias": torch.zeros(2),
        "layer.q.lora_A.default.weight": DOWN,
    }

    result = dict(fold(tensors.items(), AdapterConfig(2, 1, "")))

    assert sorted(result) == ["layer.norm.weight", "layer.q.bias", "layer.q.weight"]
    torch.testing.assert_close(result["layer.q.weight"], fold_weight(WEIGHT, DOWN, UP, 0.5))


def test_each_expert_is_folded_with_its_own_rows_and_columns_of_the_adapter():
    # rank 1; expert 0: B A = (1, 2)^T (1, 0), expert 1: B A = (3, 4)^T (0, 1)
    down = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    up = torch.tensor([[1.0, 3.0], [2.0, 4.0]])
    expected = torch.tensor([[[2.0, 0.0], [4.0, 0.0]], [[0.0, 6.0], [0.0, 8.0]]])

    folded = fold_experts(torch.zeros(2, 2, 2), down, up, 2.0, is_transposed=False)
    transposed = fold_experts(torch.zeros(2, 2, 2), down, up, 2.0, is_transposed=True)

    assert torch.equal(folded, expected) and torch.equal(transposed, expected.mT)


def test_two_tensors_of_a_module_are_folded_with_the_layers_around_it():
    first, second = (AdaptedParameter("experts.a", "experts.base_layer", False),
                     AdaptedParameter("experts.b", "experts", False))  # fmt: skip
    tensors = {
        "experts.lora_A.default.weight": torch.ones(2, 2),
        "experts.lora_B.default.weight": torch.ones(2, 2),
        "experts.base_layer.lora_A.default.weight": torch.ones(2, 2),
        "experts.base_layer.lora_B.default.weight": torch.ones(2, 2) * 5,
        "experts.base_layer.base_layer.a": torch.zeros(2, 2, 2),
        "experts.base_layer.base_layer.a_bias": torch.ones(2, 2),
        "experts.base_layer.base_layer.b": torch.zeros(2, 2, 2),
    }

    found = dict(fold(tensors.items(), AdapterConfig(1, 1, ""), [first, second]))

    assert sorted(found) == ["experts.a", "experts.a_bias", "experts.b"]
    assert (found["experts.a"] == 5).all() and (found["experts.b"] == 1).all()
    assert torch.equal(found["experts.a_bias"], torch.ones(2, 2))


@pytest.mark.parametrize("lost", ["base_layer", "lora_A", "lora_B", "lora_magnitude_vector"])
def test_an_incomplete_adapter_is_an_error_that_names_the_module(lost):
    tensors = {
        "q.base_layer.weight": WEIGHT,
        "q.lora_A.default.weight": DOWN,
        "q.lora_B.default.weight": UP,
        "q.lora_magnitude_vector.default.weight": torch.ones(2),
    }
    tensors = {name: tensor for name, tensor in tensors.items() if lost not in name}

    with pytest.raises(ValueError, match=r"incomplete: \['q'\]"):
        list(fold(tensors.items(), AdapterConfig(1, 1, "", use_dora=True)))


@pytest.mark.parametrize(
    ("inside", "on_disk"),
    [
        ("model.q.lora_A.default.weight", "base_model.model.model.q.lora_A.weight"),
        ("model.q.lora_B.default.weight", "base_model.model.model.q.lora_B.weight"),
        ("model.q.lora_magnitude_vector.default.weight", "base_model.model.model.q.lora_magnitude_vector"),
    ],
)
def test_names_convert_between_the_model_and_peft_files(inside, on_disk):
    assert peft_name(inside) == on_disk
    assert memory_name(on_disk) == inside
    assert plain_name("model.q.base_layer.bias") == "model.q.bias"
    assert plain_name("mlp.experts.base_layer.base_layer.down_proj") == "mlp.experts.down_proj"


def test_the_scale_is_alpha_over_the_rank_or_its_square_root():
    assert AdapterConfig(rank=4, alpha=6, target_modules="q").scale == 1.5
    assert AdapterConfig(rank=4, alpha=6, target_modules="q", use_rslora=True).scale == 3.0


def test_a_written_adapter_is_read_back_unchanged(tmp_path):
    config = AdapterConfig(4, 6, "all-linear", use_dora=True, base="Qwen/Qwen3-4B")
    tensors = {"q.lora_A.default.weight": DOWN, "q.lora_magnitude_vector.default.weight": torch.ones(2)}
    AdapterFiles(config, ["v", "q"], tensors).save_pretrained(tmp_path / "adapter")

    found = read_adapter_config(tmp_path / "adapter", "the adapter")

    assert found == AdapterConfig(4, 6, "q,v", use_dora=True, base="Qwen/Qwen3-4B")
    assert len({file.stat().st_mode for file in (tmp_path / "adapter").iterdir()}) == 1  # as the umask says
    read = read_adapter(tmp_path / "adapter", "the adapter")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not an adapter in peft's format"),
        ("{", "is not an adapter in peft's format"),
        ('{"peft_type": "LORA"}', "KeyError: 'r'"),
        ('{"peft_type": "IA3"}', "has the type IA3; only LORA is supported"),
        (
            '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [], "rank_pattern": {"q": 2}}',
            r"`rank_pattern` \(\{'q': 2\}\)",
        ),
    ],
)
def test_an_unusable_config_is_an_error_that_names_the_adapter(tmp_path, content, message):
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)

    with pytest.raises(ValueError, match=message) as raised:
        read_adapter_config(tmp_path, "`lora.path` (x)")

    assert "`lora.path` (x)" in str(raised.value)


PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainable_token_indices", [1]), ("alora_invocation_tokens", [7, 8]), ("use_qalora", True),
        ("layer_replication", [[0, 2]]), ("arrow_config", {"top_k": 1}), ("a_method_of_tomorrow", {"x": 1}),
    ],
)  # fmt: skip
def test_a_key_that_may_change_the_adapter_is_refused_by_name(key, value, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN | {key: value}))

    with pytest.raises(ValueError, match=rf"x: `{key}` \(.*\) of adapter_config.json is not supported: use"):
        read_adapter_config(tmp_path, "x")


def changes_its_base(start):
    """Whether peft's layer replaces the weight that it wraps."""
    layer = torch.nn.Linear(8, 8, bias=False)
    before = layer.weight.detach().clone()
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=start)
    get_peft_model(torch.nn.Sequential(layer), config)
    return not torch.equal(layer.weight, before)


@pytest.mark.parametrize(
    "start", [True, False, "gaussian", "orthogonal", "eva", "mica", "pissa", "pissa_niter_2", "olora"]
)
def test_an_adapter_is_read_exactly_if_peft_leaves_its_base_alone(start, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN | {"init_lora_weights": start}))

    if changes_its_base(start):
        with pytest.raises(ValueError, match=rf"`init_lora_weights` \({start}\) .* changes the base weights"):
            read_adapter_config(tmp_path, "x")
    else:
        assert read_adapter_config(tmp_path, "x") == AdapterConfig(4, 8, "all-linear")


@pytest.mark.parametrize("start", ["corda", "loftq", "lora_ga"])
def test_an_adapter_whose_start_needs_data_or_quantization_is_refused(start, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN | {"init_lora_weights": start}))

    with pytest.raises(ValueError, match="changes the base weights"):
        read_adapter_config(tmp_path, "x")


def test_every_key_that_the_installed_peft_writes_is_read(tmp_path):
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), LoraConfig(r=4, target_modules=["0"]))
    model.save_pretrained(tmp_path)

    assert read_adapter_config(tmp_path, "x").rank == 4


def test_an_adapter_without_safetensors_is_an_error_with_the_remedy(tmp_path):
    (tmp_path / "adapter_model.bin").write_bytes(b"")

    with pytest.raises(ValueError, match="save the adapter as safetensors"):
        read_adapter(tmp_path, "`lora.path` (x)")


def test_neutral_values_of_unsupported_options_are_accepted(tmp_path):
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    neutral = {"bias": "none", "rank_pattern": {}, "modules_to_save": None, "layers_to_transform": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values | neutral))
    save_file({}, tmp_path / "adapter_model.safetensors")

    assert read_adapter_config(tmp_path, "it") == AdapterConfig(4, 8, "all-linear")
