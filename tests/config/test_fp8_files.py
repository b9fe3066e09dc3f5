# SPDX-License-Identifier: Apache-2.0
"""What is wrong with quantized weights is found from config and headers, before a model is read."""

import re

import pytest
import torch

from tests.helpers.fp8_files import change_weights, save_in_fp8, set_quantization
from verl.config.files.fp8_files import WHOLE, Block, block_of, fp8_problem
from verl.models.tiny import save_tiny_model

UP = "model.layers.1.mlp.up_proj.weight"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


@pytest.fixture
def folder(tmp_path):
    save_in_fp8(save_tiny_model(tmp_path, "qwen3", hidden_size=256, intermediate_size=192))
    return tmp_path


def test_a_block_is_what_the_config_says():
    assert block_of({}) is None
    assert block_of({"quantization_config": FP8 | {"weight_block_size": [128, 64]}}) == Block(128, 64)
    assert block_of({"text_config": {"quantization_config": FP8 | {"weight_block_size": None}}}) == WHOLE
    assert Block(128, 64).grid((576, 7168)) == (5, 112)


@pytest.mark.parametrize("size", [[128], [0, 128], 128, [128, 1.5]])
def test_a_block_of_another_kind_is_refused(size):
    with pytest.raises(ValueError, match="only 'e4m3' and two positive numbers"):
        block_of({"quantization_config": FP8 | {"weight_block_size": size}})


@pytest.mark.parametrize("found", ["fp8", ["fp8"], 8])
def test_quantization_that_is_not_a_mapping_is_refused(found):
    with pytest.raises(ValueError, match=r"`quantization_config` in config.json is .*must be a mapping"):
        block_of({"quantization_config": found})
    assert block_of({"text_config": found}) is None


def test_a_complete_model_has_no_problem(folder, tmp_path_factory):
    assert fp8_problem(str(folder)) is None
    assert fp8_problem(str(save_tiny_model(tmp_path_factory.mktemp("plain")))) is None
    assert fp8_problem(str(folder / "missing")) is None


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "mxfp4", "compressed-tensors"])
def test_another_method_is_named_with_a_remedy(folder, method):
    set_quantization(folder, quant_method=method)

    problem = fp8_problem(str(folder))
    assert problem is not None and f"`quant_method` {method!r}, and only 'fp8' can be read" in problem
    assert problem.endswith("use a release of the model in bfloat16")


WRONG = {
    "are missing": None,
    r"has shape \(2, 3\), and must have \(2, 2\), as .* has \(192, 256\) in blocks of 128 x 128": (2, 3),
}


@pytest.mark.parametrize("text", WRONG)
def test_scales_that_do_not_fit_are_named_with_their_file(folder, text):
    shape = WRONG[text]
    change_weights(folder, {f"{UP}_scale_inv": None if shape is None else torch.ones(shape)})

    problem = fp8_problem(str(folder))
    assert problem is not None and problem.startswith(f"({folder}): model.safetensors: {UP}")
    assert re.search(text, problem)
    assert problem.endswith("download the model again, or use a release of the model in bfloat16")


def test_scales_and_weights_of_other_types_are_named(folder):
    change_weights(folder, {f"{UP}_scale_inv": torch.ones(2, 2, dtype=torch.float16)})
    assert f"{UP}_scale_inv is F16, and must be F32 or BF16" in (fp8_problem(str(folder)) or "")

    change_weights(folder, {UP: torch.ones(192, 256).to(torch.float8_e5m2)})
    assert f"{UP} is F8_E5M2 with shape (192, 256), and only" in (fp8_problem(str(folder)) or "")


def test_weights_in_fp8_without_the_config_of_their_blocks_are_named(folder):
    set_quantization(folder)

    assert "config.json has no `quantization_config`, which gives the size" in (
        fp8_problem(str(folder)) or ""
    )


def test_scales_of_blocks_without_their_size_are_named_with_the_key_that_lacks(folder):
    set_quantization(folder, **FP8)

    assert (
        "_scale_inv has shape (2, 2), and must have one number, as `quantization_config` in config.json"
        in (fp8_problem(str(folder)) or "")
    )


@pytest.mark.parametrize("weight", [None, torch.ones(192, 256)])
def test_scales_that_no_weight_uses_are_named(folder, weight):
    change_weights(folder, {UP: weight})

    problem = fp8_problem(str(folder))
    assert problem is not None and f"{UP}_scale_inv is there, and no {UP} in FP8: download" in problem
