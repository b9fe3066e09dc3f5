# SPDX-License-Identifier: Apache-2.0
"""Every family can be planned: its pipeline runs on the meta device, from its configs alone."""

import pytest

from examples.quickstart.tiny_pipelines import save_tiny_wan
from tests.diffusion.models import MODELS
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig
from verl.config.rollout import RolloutConfig
from verl.diffusion.families.registry import FAMILIES
from verl.planning.diffusion.shapes import READS, read_pictures


def test_what_a_transformer_reads_of_prompts_is_known_for_all_families():
    assert set(READS) == {pipeline for family in FAMILIES for pipeline in family.pipelines}


@pytest.mark.nightly("verl/diffusion")
@pytest.mark.parametrize("name", [*MODELS, "wan"])
def test_a_pipeline_has_sizes_and_work_without_its_weights(name, tmp_path):
    (MODELS | {"wan": save_tiny_wan})[name](tmp_path)
    for weights in tmp_path.rglob("*.safetensors"):
        weights.unlink()
    rollout = RolloutConfig(resolution=16, height=16, width=16, num_frames=5, guidance_scale=1.0)
    model = ModelConfig(model_path=str(tmp_path), lora=LoraConfig(rank=4))

    shape = read_pictures(model, FSDPConfig(), rollout, 16)

    assert shape.transformer.params > shape.transformer.trained > 0 and shape.text_encoders > 0
    assert shape.update.products > 2 * shape.velocity.products > 0
    assert shape.decoding.products > 0 and shape.latent > 0
    assert shape.pixels == 3 * 16 * 16 * (5 if name == "wan" else 1)
