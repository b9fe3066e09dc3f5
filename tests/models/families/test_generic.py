# SPDX-License-Identifier: Apache-2.0
"""Models that no file describes: what their processors and structures tell, and what is refused."""

import copy
import re
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.architecture.source import ROOT
from tests.helpers.families import (
    assert_features_are_the_models,
    assert_inputs_are_the_processors,
    assert_media_tokens_match,
    assert_positions_are_the_models,
    assert_tokens_are_the_processors,
    assert_units_make_the_whole,
    load_tiny,
    media_of,
    random_row,
)
from tests.helpers.family_table import ABILITIES
from tests.helpers.family_training import LARGEST, load_model
from tests.helpers.nightly import by_day
from tests.helpers.unnamed_families import (
    MROPE,
    NO_FEATURES,
    PAGE,
    REFUSED,
    SERVED,
    TABLE,
    UNNAMED,
    table,
)
from verl.config.model import ModelConfig
from verl.config.rollout import RolloutConfig
from verl.models import tiny as tiny_models
from verl.models.families import registry
from verl.models.families.generic import GenericFamily, join_padded
from verl.models.families.interface import MediaShape, is_part
from verl.models.families.registry import family_of, is_named
from verl.models.hub_names import HubNames
from verl.models.registry import check_model
from verl.models.trainable import select_trainable
from verl.workers.rollout.interface import EngineSetup
from verl.workers.rollout.vllm.llm_arguments import engine_arguments

SIZES = 30, 150
# Images of one size, tiles, and slices with text between them; the others are compared as a run starts.
USUAL = ("llava", "llava_next", "idefics3")
EXTENSIONS = ROOT / "docs" / "extensions.md"


@pytest.fixture(autouse=True, scope="module")
def recipes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "TINY_MODELS", tiny_models.TINY_MODELS | UNNAMED)
        yield


@pytest.fixture(scope="module", params=by_day(SERVED, *USUAL))
def tiny(request):
    return load_tiny(request.param)


@pytest.fixture
def row():
    return random_row(np.random.default_rng(3), *SIZES, kinds=["image"])


def test_three_families_and_more_are_served_without_a_file():
    assert len(SERVED) >= 3
    assert not any(is_named(AutoConfig.for_model(name)) for name in SERVED)


def test_tokens_are_those_that_the_processor_makes_of_the_whole_prompt(tiny, row):
    assert isinstance(tiny.family, GenericFamily)
    assert_tokens_are_the_processors(tiny, row)
    assert_media_tokens_match(tiny, row)
    assert_positions_are_the_models(tiny, row)


def test_features_of_one_call_are_those_of_each_image_alone(tiny, row):
    assert_features_are_the_models(tiny, [row, row[:2]])


def test_an_image_is_one_unit(tiny, row):
    assert_units_make_the_whole(tiny, media_of(tiny, row))


def test_the_models_own_forward_takes_the_joined_images(tiny, row):
    assert_inputs_are_the_processors(tiny, row)


def test_all_parameters_belong_to_the_encoder_or_to_the_language_model(tiny):
    decoder = {id(weight) for weight in tiny.model.get_decoder().parameters()}
    decoder |= {id(weight) for weight in tiny.model.get_output_embeddings().parameters()}
    encoder = {
        id(weight) for name, weight in tiny.model.named_parameters() if is_part(name, tiny.family.encoder)
    }

    assert decoder.isdisjoint(encoder)
    assert decoder | encoder == {id(weight) for weight in tiny.model.parameters()}
    assert type(tiny.model.get_submodule(tiny.family.encoder[0]).config) is type(tiny.config.vision_config)


def test_the_example_has_two_images_of_different_sizes_and_a_blank_one_features(tiny):
    blank = tiny.family.example(tiny.config, tiny.processor)
    row = tiny.family.example(tiny.config, tiny.processor, torch.Generator().manual_seed(0))

    assert (len(blank.media), len(row.media)) == (1, 2)
    for example in (blank, row):
        with torch.no_grad():
            features = tiny.family.encode(tiny.owner, example.media)
        places = tiny.family.media_tokens(tiny.config, example.input_ids)["image"]
        assert len(places) == sum(map(len, features)) > 0


def test_a_prompt_with_too_few_images_is_refused(tiny):
    token = next(iter(tiny.family.placeholders(tiny.processor)))
    shape = tiny.family.image_shape(tiny.processor, 50, 60)

    with pytest.raises(ValueError, match="2 image tokens for 1 images"):
        tiny.family.expand(tiny.processor, [token, token], MediaShape(images=[shape]))


def test_a_video_is_refused_with_what_to_write(tiny):
    with pytest.raises(ValueError, match=r"reads no videos.*`worker\.actor\.model\.family="):
        tiny.family.video_shape(tiny.processor, 2, 40, 40, {})


@pytest.mark.parametrize("name", MROPE)
def test_three_dimensional_positions_are_refused(name):
    with pytest.raises(NotImplementedError, match=rf"{name}\) has positions in time, height and width"):
        _ = GenericFamily(AutoConfig.for_model(name)).encoders


@pytest.mark.parametrize(("name", "reason"), NO_FEATURES.items())
def test_a_model_without_image_features_is_refused(name, reason):
    with pytest.raises(NotImplementedError, match=f"{name}.* {reason}"):
        _ = GenericFamily(AutoConfig.for_model(name)).media_owner


def test_a_processor_whose_tokens_depend_on_other_images_is_refused():
    processor = load_tiny("idefics2").processor
    with pytest.raises(NotImplementedError, match="Idefics2Processor makes other tokens for two images"):
        GenericFamily().image_shape(processor, 40, 40)


def test_a_model_whose_package_is_missing_is_refused(monkeypatch):
    config = AutoConfig.for_model("perception_lm")
    missing = ImportError("\nit requires the timm library\n")
    monkeypatch.setattr(AutoModelForImageTextToText, "from_config", Mock(side_effect=missing))
    with pytest.raises(
        NotImplementedError, match=r"perception_lm cannot be built.*: it requires the timm library$"
    ):
        _ = GenericFamily(config).encoders


def test_features_that_do_not_fit_the_tokens_are_refused():
    tiny = load_tiny("llama4")
    row = tiny.family.example(tiny.config, tiny.processor)
    with pytest.raises(NotImplementedError, match=r"returns 0 features for images with \d+ tokens"):
        tiny.family.encode(tiny.owner, row.media)


def test_tensors_joined_in_an_unknown_way_are_refused(monkeypatch):
    processor = copy.copy(load_tiny("llava").processor)  # what is known of the other is kept
    own = processor.image_processor
    monkeypatch.setattr(
        processor, "image_processor", lambda images, **options: own(images[0][::-1], **options)
    )
    processor.image_processor.fetch_images = own.fetch_images
    with pytest.raises(NotImplementedError, match=r"joins `pixel_values` of two images.* in an unknown way"):
        GenericFamily().image_shape(processor, 40, 40)


def test_joined_tensors_are_padded_with_zeros():
    joined = join_padded([torch.ones(1, 2, 3), torch.ones(2, 4, 1)], 0)

    assert joined.shape == (3, 4, 3)
    assert joined.sum() == 6 + 8
    assert joined[0, :2].eq(1).all() and joined[1:, :, 0].eq(1).all()


def test_text_models_are_not_tried():
    assert not isinstance(family_of(AutoConfig.for_model("llama")), GenericFamily)


@pytest.mark.parametrize("ability", ABILITIES)
@pytest.mark.parametrize(
    "kind", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in SERVED]
)
def test_every_ability_computes_what_the_models_own_forward_does(kind, ability):
    assert ABILITIES[ability](kind) < LARGEST


def test_the_start_compares_with_the_models_own_forward(tiny):
    assert check_model(load_model(tiny, prepared=True), tiny.processor) < 1e-5


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_right_is_refused_before_training(kind):
    tiny = load_tiny(kind)

    with pytest.raises(NotImplementedError, match=REFUSED[kind][1]):
        check_model(load_model(tiny, prepared=True), tiny.processor)
        HubNames(tiny.config)


def test_the_page_has_the_table_of_what_was_tried():
    (written,) = TABLE.findall(PAGE.read_text())

    assert written == table(), "python -m tests.helpers.unnamed_families writes it"


def test_each_recipe_is_served_or_refused():
    assert sorted([*SERVED, *REFUSED]) == sorted(UNNAMED)


def test_a_frozen_tower_freezes_the_parameter_after_each_row_of_features():
    """It is part of the features, which are computed once with a frozen tower."""
    tiny = load_tiny("llava_next")
    model = load_model(tiny, prepared=True)

    select_trainable(model, ModelConfig(freeze_vision_tower=True), "worker.actor.model")

    assert tiny.family.encoder[-1] == "model.image_newline"
    assert not model.get_parameter("model.image_newline").requires_grad
    assert model.get_output_embeddings().weight.requires_grad


def test_features_that_depend_on_other_images_are_refused():
    tiny = load_tiny("llava")
    model = load_model(tiny, prepared=True)
    projector = model.get_submodule(tiny.family.encoder[1])
    projector.register_forward_hook(lambda module, args, output: output + output.mean(0, keepdim=True))

    with pytest.raises(NotImplementedError, match=r"llava\) computes other features of an image together"):
        check_model(model, tiny.processor)


def test_the_refusal_of_a_difference_says_what_to_write():
    tiny = load_tiny("ovis2")

    with pytest.raises(NotImplementedError, match=r"`worker\.actor\.model\.family=my_family\.py:family`"):
        check_model(load_model(tiny, prepared=True), tiny.processor)


def test_the_file_of_the_page_adds_the_projector_that_llama_4_leaves_out(tmp_path, monkeypatch):
    (content,) = re.findall(r"```python\n(# llama4\.py\n.*?)```", EXTENSIONS.read_text(), flags=re.DOTALL)
    (tmp_path / "llama4.py").write_text(content)
    monkeypatch.setattr(registry, "TYPES", dict(registry.TYPES))
    registry.register_family(f"{tmp_path}/llama4.py:family")
    tiny = load_tiny("llama4", num_hidden_layers=3)

    assert check_model(load_model(tiny, prepared=True), tiny.processor) < 1e-5
    assert not is_named(tiny.config), "it is still compared with the engine"


def test_vllm_gets_a_window_of_one_token_less_however_often_it_asks():
    """vLLM 0.32 adds the token again; with a window of 16 its log-probs differed by 0.02 without this."""
    tiny = load_tiny("cohere2_vision")
    setup = EngineSetup(str(tiny.folder), max_length=64, device="cpu")
    config = copy.deepcopy(tiny.config)
    change = engine_arguments(RolloutConfig(dtype="fp32"), setup, tiny.config)["hf_overrides"]

    for _ in range(2):
        config = change(config)

    assert tiny.config.get_text_config().sliding_window == 16
    assert config.get_text_config().sliding_window == 15
    aya = load_tiny("aya_vision")
    assert aya.family.engine_overrides(aya.config) == {}


@pytest.mark.parametrize("kind", ["aya_vision", "cohere2_vision"])
def test_logits_have_the_scale_of_their_text_model(kind):
    tiny = load_tiny(kind, logit_scale=0.5)
    text, model = tiny.config.get_text_config(), load_model(tiny, prepared=True)
    alone = AutoModelForCausalLM.from_config(text, attn_implementation="eager").eval()
    alone.model.load_state_dict(tiny.model.model.language_model.state_dict())
    alone.lm_head.load_state_dict(tiny.model.lm_head.state_dict())
    ids = torch.arange(40, 52)

    with torch.no_grad():
        expected = alone(ids[None]).logits[0]
        own = tiny.model(ids[None]).logits[0]
        packed = model(
            input_ids=ids[None],
            position_ids=torch.arange(len(ids))[None],
            cu_seqlens=torch.tensor([0, len(ids)]),
            read=lambda logits: logits.log_probs(ids.roll(-1), torch.arange(len(ids)), 1.0).log_probs,
        )

    assert torch.allclose(own, expected, atol=1e-5)
    log_probs = expected.log_softmax(-1).gather(-1, ids.roll(-1)[:, None])[:, 0]
    assert (packed - log_probs).abs().max() < 1e-5
