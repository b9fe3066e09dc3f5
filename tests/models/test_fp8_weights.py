# SPDX-License-Identifier: Apache-2.0
"""Weights that are released in FP8 are read as products of numbers and scales, however they are read."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.causal_families import FAMILIES, build_family
from tests.helpers.fp8_files import change_weights, save_in_fp8, set_quantization
from verl.models.fp8_weights import drop_quantization, stored_block, weights_in_fp8
from verl.models.hub_names import HubNames
from verl.models.tiny import save_tiny_model
from verl.workers.stored_weights import stored_rows, stored_value, weights_in_files

UP = "model.layers.1.mlp.up_proj.weight"
# Widths that no block divides, as the 576 rows of DeepSeek-V3's `kv_a_proj_with_mqa`.
BLOCKS = {
    "qwen3": ("qwen3", (128, 128), torch.bfloat16),
    "deepseek_v3": ("deepseek_v3", (20, 28), torch.float32),
    "one scale": ("qwen3", None, torch.bfloat16),
}


def save(folder, kind):
    if kind == "qwen3":
        return save_tiny_model(folder, kind, hidden_size=256, intermediate_size=192, num_attention_heads=8)
    build_family(kind, FAMILIES[kind]).save_pretrained(folder)
    return folder


def read(folder, *, lazily, dtype=torch.float32, casts=False):
    config = AutoConfig.from_pretrained(folder)
    drop_quantization(config)
    with weights_in_fp8(str(folder)):
        if not lazily:
            return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
        with weights_in_files(casts=casts):
            return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)


@pytest.mark.parametrize("name", BLOCKS)
def test_weights_are_bit_for_bit_the_products_of_numbers_and_scales(name, tmp_path):
    kind, block, scales = BLOCKS[name]
    expected = save_in_fp8(save(tmp_path, kind), block, scales)

    for lazily, casts in ((False, False), (True, False), (True, True)):
        model = read(tmp_path, lazily=lazily, casts=casts)
        values = {key: stored_value(each) for key, each in model.state_dict(keep_vars=True).items()}
        found = dict(HubNames(model.config).convert(values.items()))
        assert expected.keys() <= found.keys()
        for key, value in expected.items():
            assert torch.equal(found[key].float(), value.float()), key
    assert "quantization_config" not in model.config.to_dict()


def test_rows_are_those_of_the_whole_weight(tmp_path):
    save_in_fp8(save(tmp_path, "deepseek_v3"), (20, 28))

    for name, param in read(tmp_path, lazily=True).named_parameters():
        value, start = stored_value(param), len(param) // 3
        assert torch.equal(stored_rows(param, start, start + 1), value[start : start + 1]), name
        assert torch.equal(stored_rows(param, start, len(param)), value[start:]), name


def test_weights_in_bf16_are_rounded_once(tmp_path):
    expected = save_in_fp8(save(tmp_path, "qwen3"))

    model = read(tmp_path, lazily=False, dtype=torch.bfloat16)

    assert torch.equal(model.get_parameter(UP), expected[UP].bfloat16())


def test_values_that_were_not_read_are_not_taken_for_weights(tmp_path):
    save_in_fp8(save(tmp_path, "qwen3"))

    assert read(tmp_path, lazily=True).get_parameter(UP).isnan().all()


def test_weights_without_fitting_scales_are_refused_by_name(tmp_path):
    save_in_fp8(save(tmp_path, "qwen3"))

    change_weights(tmp_path, {f"{UP}_scale_inv": torch.ones(3, 2)})
    with pytest.raises(ValueError, match=rf"{UP}_scale_inv has shape \(3, 2\), and must have \(2, 2\)"):
        read(tmp_path, lazily=True)
    change_weights(tmp_path, {f"{UP}_scale_inv": None})
    with pytest.raises(ValueError, match=rf"its scales {UP}_scale_inv are missing: download"):
        read(tmp_path, lazily=True)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
def test_scales_that_are_no_factors_are_refused_by_name(number, tmp_path):
    save_in_fp8(save(tmp_path, "qwen3"))

    change_weights(tmp_path, {f"{UP}_scale_inv": torch.tensor([[1.0, number], [1.0, 1.0]])})
    with pytest.raises(ValueError, match=rf"{UP}_scale_inv has negative or infinite numbers, or none"):
        read(tmp_path, lazily=True)


def test_another_way_of_quantizing_is_refused(tmp_path):
    folder = save(tmp_path, "qwen3")
    assert stored_block(str(folder)) is None

    set_quantization(folder, quant_method="gptq", bits=4)
    with pytest.raises(ValueError, match=r"`quant_method` 'gptq', and only 'fp8' can be read: use a release"):
        stored_block(str(folder))
