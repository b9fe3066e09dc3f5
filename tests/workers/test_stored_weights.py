# SPDX-License-Identifier: Apache-2.0
"""Weights that are read from their files one after another are those that transformers reads at once."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.causal_families import FAMILIES, build_family
from tests.helpers.nightly import by_day
from verl.workers.stored_weights import stored_value, weights_in_files

MIB = 1 << 20


def read(folder, dtype, *, casts=False):
    with weights_in_files(casts=casts):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model, dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.parametrize("name", by_day(list(FAMILIES), "qwen3_moe", "phi3", "qwen3_next"))
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("casts", [False, True])
def test_values_are_bit_for_bit_those_of_a_model_that_is_read_whole(name, stored, casts, tmp_path):
    build_family(name, FAMILIES[name]).to(stored).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = dict(whole.named_parameters()) | dict(whole.named_buffers())

    _, tensors = read(tmp_path, torch.float32, casts=casts)
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        value = stored_value(tensor)
        assert value.shape == expected[key].shape and torch.equal(
            value.to(expected[key].dtype), expected[key]
        ), key


def anonymous():
    """Bytes of this process that are no pages of files."""
    found = re.search(r"Anonymous:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(found[1]) * 1024


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_a_model_takes_the_memory_of_what_is_read(stored, tmp_path):
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=256, moe_intermediate_size=256, num_experts=16, num_hidden_layers=24,
        num_attention_heads=2, num_key_value_heads=2, intermediate_size=256, vocab_size=1000,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=stored).save_pretrained(tmp_path)
    before = anonymous()

    _, tensors = read(tmp_path, torch.float32)
    opened = anonymous() - before
    largest, size = 0, 0
    for tensor in tensors.values():
        value = stored_value(tensor)
        largest, size = max(largest, anonymous() - before), size + value.nbytes

    assert size > 140 * MIB
    assert opened < 4 * MIB
    assert largest < size / 6
