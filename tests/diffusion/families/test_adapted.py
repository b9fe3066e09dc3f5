# SPDX-License-Identifier: Apache-2.0
"""LoRA adapts, by default, modules that the full-size transformers have in every block."""

import pytest
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, SD3Transformer2DModel

from verl.diffusion.families.registry import FAMILIES

TRANSFORMERS = {
    "StableDiffusion3Pipeline": (SD3Transformer2DModel, {"num_layers": 24}),  # 3.5 medium
    "FluxPipeline": (FluxTransformer2DModel, {}),
    "QwenImagePipeline": (QwenImageTransformer2DModel, {}),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_every_block_of_the_full_size_transformer_has_the_adapted_modules(name):
    (family,) = (each for each in FAMILIES if name in each.pipelines)
    kind, config = TRANSFORMERS[name]
    with torch.device("meta"):
        transformer = kind(**config)
    modules = dict(transformer.named_modules())
    last = transformer.config.num_layers - 1

    for end in family.adapted:
        missing = {
            number for number in range(last + 1) if f"transformer_blocks.{number}.{end}" not in modules
        }
        # the last block of Stable Diffusion 3 needs no text after its attention
        assert missing == (
            {last} if (name, end) == ("StableDiffusion3Pipeline", "attn.to_add_out") else set()
        )
        found = [module for path, module in modules.items() if path.endswith(f".{end}")]
        assert all(isinstance(module, torch.nn.Linear) for module in found)


def test_flux_adapts_attention_of_the_blocks_that_join_text_and_image():
    with torch.device("meta"):
        names = [name for name, _ in FluxTransformer2DModel().named_modules()]
    (family,) = (each for each in FAMILIES if "FluxPipeline" in each.pipelines)

    ends = tuple(f".{end}" for end in family.adapted)
    found = {name.split(".", 2)[2] for name in names if name.startswith("single") and name.endswith(ends)}

    assert found == {"attn.to_q", "attn.to_k", "attn.to_v"}
