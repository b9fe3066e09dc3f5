# SPDX-License-Identifier: Apache-2.0
"""Prompts are encoded once, and batches of them are what the pipeline would encode."""

import pytest
import torch

from tests.diffusion.models import LENGTH, PROMPTS
from verl.diffusion.prompts import PromptEncoder

CPU = torch.device("cpu")
END = 5  # tokens of Qwen-Image's template after the prompt


def test_a_prompt_is_encoded_once(model):
    encoder = PromptEncoder(*model, CPU, LENGTH)

    first = encoder.encode(PROMPTS)
    again = encoder.encode([PROMPTS[1], PROMPTS[0], PROMPTS[1]])

    assert encoder.num_encoded == 2
    for name, values in first.items():
        assert torch.equal(again[name], values[[1, 0, 1]]), name


@pytest.mark.parametrize("model_folder", ["qwen_image"], indirect=True)
def test_prompts_of_qwen_image_have_their_own_length_until_they_are_batched(model):
    family, pipeline = model
    encoder = PromptEncoder(family, pipeline, CPU, LENGTH)
    short, long = "red", "a red picture of the wall"  # 1 and 6 tokens

    alone, together = encoder.encode([short]), encoder.encode([short, long])

    assert alone["encoder_hidden_states"].shape[1] == 1 + END
    assert together["encoder_hidden_states_mask"].sum(1).tolist() == [1 + END, 6 + END]
    states, mask = pipeline.encode_prompt([short, long])
    assert torch.equal(together["encoder_hidden_states_mask"], mask.bool())
    torch.testing.assert_close(together["encoder_hidden_states"], states, atol=1e-6, rtol=0)


@pytest.mark.parametrize("model_folder", ["qwen_image"], indirect=True)
def test_the_longest_prompt_of_qwen_image_keeps_the_end_of_its_template(model):
    family, pipeline = model
    prompt = "a red picture of the wall"

    found = family.encode(pipeline, [prompt], 6)

    states, _ = pipeline.encode_prompt(prompt)
    assert torch.equal(found["encoder_hidden_states"], states)
