# SPDX-License-Identifier: Apache-2.0
"""The families of models, and what the rules of options know of them without loading anything."""

import json

import pytest

from verl.config.data import DataConfig
from verl.config.rollout import RolloutConfig
from verl.config.rules.diffusion_rules import PIPELINES, pipeline_problems
from verl.config.worker import WorkerConfig
from verl.diffusion.families.registry import FAMILIES, family_of


def test_rules_know_the_pipelines_of_all_families():
    assert sorted(PIPELINES) == sorted(name for family in FAMILIES for name in family.pipelines)


def test_rules_and_family_agree_on_the_pixels_of_a_token(model, model_folder):
    family, pipeline = model
    step = family.size_step(pipeline)

    def problems(resolution):
        rollout = RolloutConfig(resolution=resolution, guidance_scale=1.0)
        data = DataConfig(max_prompt_length=1)
        return list(pipeline_problems(data, WorkerConfig(rollout=rollout), model_folder))

    assert not problems(3 * step)
    (problem,) = problems(3 * step + 1)
    assert f"must be a multiple of {step}," in problem


def test_a_folder_of_another_pipeline_has_no_family(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))

    with pytest.raises(ValueError, match=r"is a StableDiffusionPipeline, must be one of \['FluxPipeline'"):
        family_of(tmp_path)


def test_rules_know_the_longest_prompts_of_all_families():
    assert {name: family.longest_prompt for family in FAMILIES for name in family.pipelines} == {
        name: pipeline.longest_prompt for name, pipeline in PIPELINES.items()
    }
