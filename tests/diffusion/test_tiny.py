# SPDX-License-Identifier: Apache-2.0
"""Tiny diffusion models: parts that work like large ones, and can learn what a demo asks for."""

import pytest
import torch
from diffusers import DiffusionPipeline

from examples.quickstart.tiny_pipelines import WORDS
from tests.diffusion.models import MODELS, save


def statistics(config):
    """Return the mean and the deviation of the latents that a VAE decodes."""
    if config.get("latents_mean"):
        return torch.tensor(config.latents_mean), torch.tensor(config.latents_std)
    return torch.tensor(config.shift_factor), torch.tensor(1 / config.scaling_factor)


@pytest.mark.parametrize(
    ("latent", "color"),
    [
        ([1, -1, -1, 1], [1, 0, 0]),  # root mean square 1: red at full strength
        ([3, -3, -3, 3], [1, 0, 0]),  # of any size
        ([0, 0, 0, 2], [0.5, 0.5, 0.5]),
        ([1, 1, -1, -1], [1, 1, 0]),
        ([0.6, 0, 0, 0.8], [0.5 + 0.5 * 0.6 / 0.5, 0.5, 0.5]),  # root mean square 1 / 2, clamped below
    ],
)
def test_the_decoder_paints_three_channels_over_the_root_mean_square_of_all(model, latent, color):
    family, pipeline = model
    mean, std = statistics(pipeline.vae.config)
    latents = ((torch.tensor(latent) - mean) / std).view(1, 4, 1, 1).expand(1, 4, 8, 8)

    with torch.no_grad():
        (picture,) = family.decode(pipeline.vae, latents)

    expected = torch.tensor(color, dtype=torch.float32).clamp(0, 1).view(3, 1, 1).expand(3, 16, 16)
    torch.testing.assert_close(picture, expected, atol=1e-4, rtol=0)


def test_each_word_is_one_token_of_every_text_encoder(model):
    _, pipeline = model
    tokenizers = [part for name, part in pipeline.components.items() if name.startswith("tokenizer")]

    assert tokenizers
    for tokenizer in tokenizers:
        assert {word: len(tokenizer.tokenize(word)) for word in WORDS} == dict.fromkeys(WORDS, 1)
        assert len(tokenizer.tokenize("zebra")) > 1


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_gives_the_same_weights_again_and_another_one_others(name, tmp_path):
    folders = [save(name, tmp_path / "one"), save(name, tmp_path / "same")]
    folders.append(MODELS[name](tmp_path / "other", seed=1))

    weights = [DiffusionPipeline.from_pretrained(folder).transformer.proj_out.weight for folder in folders]

    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_others_may_read_its_weights_as_its_index(model_folder):
    files = [model_folder / "model_index.json", *model_folder.rglob("*.safetensors")]

    assert len(files) > 3 and len({file.stat().st_mode for file in files}) == 1
