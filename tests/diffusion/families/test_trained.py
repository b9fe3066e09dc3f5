# SPDX-License-Identifier: Apache-2.0
"""Trained models of every family: exports draw what they draw; in bfloat16 they compute as diffusers does."""

import pytest
import torch
from diffusers import DiffusionPipeline

from tests.diffusion import models
from tests.diffusion.conftest import load
from tests.diffusion.training import KINDS, TIMES, build, images, save, update, velocities
from tests.helpers.distributed import run_distributed
from verl.checkpoint.merger import merge_checkpoint
from verl.diffusion.families.interface import guided

pytestmark = [pytest.mark.heavy, pytest.mark.slow]  # the same of Stable Diffusion 3 in every suite
EXPORTED = ("full", "lora")


def train(rank, world_size, base, target):
    """Return what each kind of trained model draws, and velocities of a model in bfloat16."""
    drawn = {}
    for kind in EXPORTED:
        policy = build(base, KINDS[kind], world_size)
        for seed in range(3):
            update(policy, seed)
        save(policy, target / kind, is_first=rank == 0)
        drawn[kind] = images(policy).numpy()
    rounded = build(base, KINDS["lora"], world_size, torch_dtype="bf16", computes_in="bf16")
    with torch.no_grad():
        return drawn, velocities(rounded, 0).float().numpy()


@pytest.fixture(scope="module", params=["flux", "qwen_image"])
def trained(request, tmp_path_factory):
    """The folders of the model and of its checkpoints, and what `train` returns."""
    folder = tmp_path_factory.mktemp("trained")
    base = models.save(request.param, folder / "base")
    ((drawn, rounded),) = run_distributed(train, 1, base, folder)
    found = {kind: torch.from_numpy(values) for kind, values in drawn.items()}
    return base, folder, found, torch.from_numpy(rounded)


@pytest.mark.parametrize("kind", EXPORTED)
def test_an_exported_pipeline_draws_what_the_trained_model_draws(trained, kind):
    base, folder, drawn, _ = trained

    exported = merge_checkpoint(folder / kind / "actor")

    assert (drawn[kind] - models.draw(load(base))).abs().max() > 0.05
    torch.testing.assert_close(models.draw(load(exported)), drawn[kind], atol=1e-5, rtol=0)


def test_lora_weights_load_into_the_base_pipeline(trained):
    base, folder, drawn, _ = trained
    family, pipeline = load(base)

    pipeline.load_lora_weights(folder / "lora" / "actor" / "lora_adapter")

    torch.testing.assert_close(models.draw((family, pipeline)), drawn["lora"], atol=1e-5, rtol=0)


@torch.no_grad()
def test_computation_in_bfloat16_is_that_of_diffusers(trained):
    base, _, _, rounded = trained
    family, pipeline = load(base)
    half = DiffusionPipeline.from_pretrained(base, dtype=torch.bfloat16)
    conditions = family.encode(half, models.PROMPTS, models.LENGTH)
    latents = models.noise((family, pipeline), 0).bfloat16()

    expected = guided(family, half.transformer, latents, torch.tensor(TIMES), conditions, None, 1.0)

    assert torch.equal(rounded, expected.float())
