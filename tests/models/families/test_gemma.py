# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 and Gemma 4: newlines around images, token types, names and scalars of weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from tests.helpers.families import (
    assert_inputs_are_the_processors,
    assert_tokens_are_the_processors,
    expanded,
    load_tiny,
    open_tiny,
    own_inputs_of,
    random_clip,
    random_image,
    random_row,
)
from tests.helpers.family_training import assert_small, training_errors
from verl.distributed.weights.gathering import full_named_tensors
from verl.models.families.gemma import join_newlines
from verl.models.hub_names import HubNames
from verl.models.tiny import TINY_MODELS, save_tiny_model

BOTH = ("image", "video")
KINDS_OF = {"gemma3_vl": ("image",), "gemma4": BOTH, "gemma4_moe": BOTH}
SIZES = 30, 300
RNG = np.random.default_rng(0)
IMAGES = [random_image(RNG, *size) for size in [(60, 90), (30, 30)]]
CLIP = random_clip(RNG, 3, 40, 60)
# Two images of different sizes, one image, text.
GROUPS = [
    (["What colour?\n", IMAGES[0], " or ", IMAGES[1]], (5, 8, 3)),
    ([IMAGES[1], "How many?"], (4, 1)),
    (["What colour is the shape?"], (6,)),
]
WITH_VIDEO = [*GROUPS, (["How many? ", CLIP, " and ", IMAGES[0]], (3, 5))]


@pytest.fixture(params=list(KINDS_OF))
def kind(request):
    return request.param


@pytest.fixture
def tiny(kind):
    return load_tiny(kind)


@pytest.fixture(params=range(3))
def row(request, kind):
    return random_row(np.random.default_rng(request.param), *SIZES, kinds=KINDS_OF[kind])


@pytest.mark.parametrize("before", ["", "\n", "a\n\n", "\n\n\n", "a\n\n\n\n\n"])
@pytest.mark.parametrize("after", ["", "\n", "\n\nb", " \n"])
def test_newlines_around_an_image_join_its_own(before, after):
    tiny = load_tiny("gemma3_vl")

    assert_tokens_are_the_processors(tiny, [before, IMAGES[0], after, IMAGES[1], "\n"])


def test_newlines_that_touch_no_other_newlines_stay():
    tokenizer = load_tiny("gemma3_vl").processor.tokenizer
    tokens = tokenizer.encode("red\n\n\n\nblue\n", add_special_tokens=False)

    assert join_newlines(tokenizer, tokens) == tokens


def test_an_image_processor_that_pans_is_told_not_to_as_in_the_processors_own_call(tmp_path):
    tiny, image = load_tiny("gemma3_vl"), random_image(np.random.default_rng(0), 300, 1200)
    processor = AutoProcessor.from_pretrained(tiny.folder)
    processor.image_processor.do_pan_and_scan = True
    processor.save_pretrained(tmp_path)
    panning = tiny._replace(processor=AutoProcessor.from_pretrained(tmp_path))

    assert panning.processor.image_processor.do_pan_and_scan
    assert_tokens_are_the_processors(panning, ["wide:", image])
    assert_inputs_are_the_processors(panning, ["wide:", image])
    assert panning.family.image_inputs(panning.processor, image)["pixel_values"].shape[0] == 1


def test_token_types_are_the_processors(tiny, row):
    ids = expanded(tiny, row)[None]
    theirs = own_inputs_of(tiny, row)

    for name, values in tiny.family.own_arguments(tiny.config, ids).items():
        assert values.tolist() == theirs[name].tolist()


def test_images_that_see_their_later_tokens_change_the_numbers():
    # Comparisons of training would pass without blocks if they had no effect.
    for kind in ("gemma3_vl", "gemma4_moe"):
        tiny, row = load_tiny(kind), GROUPS[0][0]
        inputs = own_inputs_of(tiny, row)
        types = next(name for name in inputs if name.endswith("token_type_ids"))
        with torch.no_grad():
            whole = tiny.model(**inputs).logits
            causal = tiny.model(**{name: inputs[name] for name in inputs if name != types}).logits
        assert (whole - causal).abs().max() > 0.1


def test_scalars_of_layers_that_are_no_parameters_are_synced(kind):
    tiny = load_tiny(kind)
    written = dict(HubNames(tiny.config).convert(full_named_tensors(tiny.model)))

    scalars = [tensor.item() for name, tensor in written.items() if name.endswith("layer_scalar")]

    layers = tiny.config.get_text_config().num_hidden_layers
    assert scalars == pytest.approx([] if kind == "gemma3_vl" else [0.9] * layers)


def test_towers_keep_the_prefix_that_they_have_on_the_hub():
    tiny = load_tiny("gemma3_vl")

    written = dict(HubNames(tiny.config).convert(full_named_tensors(tiny.model)))

    tower = {name for name in written if name.startswith("vision_tower.")}
    assert tower and all(name.startswith("vision_tower.vision_model.") for name in tower)


def test_a_model_that_hears_as_well_trains_without_sound(tmp_path, monkeypatch):
    recipe = TINY_MODELS["gemma4"]
    audio = dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, subsampling_conv_channels=[8, 4],
        output_proj_dims=32,
    )  # fmt: skip
    monkeypatch.setitem(TINY_MODELS, "gemma4", replace(recipe, options={"audio_config": audio}))
    tiny = open_tiny(save_tiny_model(tmp_path, "gemma4"))

    assert any(name.startswith("model.audio_tower.") for name in tiny.model.state_dict())
    assert_small(training_errors(tiny, WITH_VIDEO, share_prompt=True))
