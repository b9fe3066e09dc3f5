# SPDX-License-Identifier: Apache-2.0
"""vLLM's names of the modules that make features, by which it knows a frozen tower again."""

import pytest

from tests.helpers.families import load_tiny
from verl.models.families.interface import is_part
from verl.models.families.registry import engine_encoder_of
from verl.models.hub_names import HubNames

CLASSES = {
    "mistral3": "mistral3.Mistral3ForConditionalGeneration",
    "minicpmv4_6": "minicpmv4_6.MiniCPMV4_6ForConditionalGeneration",
    "minicpmv4_7": "minicpmv4_7.MiniCPMV4_7ForConditionalGeneration",
}


@pytest.mark.parametrize("kind", CLASSES)
def test_exactly_the_weights_of_the_encoder_have_these_names_in_vllm(kind):
    module, name = CLASSES[kind].split(".")
    model = getattr(pytest.importorskip(f"vllm.model_executor.models.{module}"), name)
    tiny, names = load_tiny(kind), HubNames(load_tiny(kind).config)

    for memory_name in dict(tiny.model.named_parameters()):
        (engine_name,) = model.hf_to_vllm_mapper.apply_list(list(names.of(memory_name)))
        is_encoder = is_part(memory_name, tiny.family.encoder)
        assert is_part(engine_name, engine_encoder_of(tiny.config)) == is_encoder, engine_name
