# SPDX-License-Identifier: Apache-2.0
"""Every family expands prompts as vLLM's own processor does, and gives tokens vLLM's own positions."""

from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.families import Part, Tiny, expanded, load_tiny, media_shape_of, random_row
from tests.helpers.family_engines import requests_of
from tests.helpers.family_table import EVERY_TIME, KINDS
from tests.helpers.nightly import by_day
from tests.workers.rollout.reference import rollout_config, setup_of
from verl.models.families.registry import all_families, trained_part
from verl.workers.rollout.generation_rng import preserved_rng
from verl.workers.rollout.vllm.engine_requests import vllm_prompt
from verl.workers.rollout.vllm.family_patches import apply_family_patches
from verl.workers.rollout.vllm.llm_arguments import engine_arguments
from verl.workers.rollout.vllm.vllm_import import import_vllm

pytestmark = pytest.mark.usefixtures("single_process")

UNKNOWN = {
    name for family in all_families() if getattr(family, "embeds_prompts", False) for name in family.tiny
}
KNOWN = [kind for kind in KINDS if kind not in UNKNOWN]
SEEDS = 2, 4, 7, 9, 10, 13  # images alone, videos alone, both in either order
SIZES = 30, 300


class Engine(NamedTuple):
    """The part of vLLM that reads prompts; it has no weights."""

    config: Any
    processor: Any
    model: Any  # without layers


class Prompt(NamedTuple):
    """A prompt in vLLM."""

    token_ids: Tensor  # (L,) expanded
    takes_features: Tensor  # (L,) bool
    media: list[Any]  # in the order of the prompt


@cache
def engine_of(kind: str) -> Engine:
    import_vllm("cpu")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_architecture
    from vllm.multimodal import MULTIMODAL_REGISTRY

    tiny = load_tiny(kind)
    apply_family_patches(tiny.family)
    arguments = engine_arguments(rollout_config(limit_images=4), setup_of(tiny.folder), tiny.config)
    with preserved_rng("cpu"):
        config = EngineArgs(**arguments).create_model_config()
    architecture, _ = get_model_architecture(config)
    model: Any = architecture.__new__(architecture)
    torch.nn.Module.__init__(model)
    model.config, model.model = (
        trained_part(config.hf_config),
        tiny.owner,
    )  # the Transformers backend asks the model
    if hasattr(model, "_init_canvas_mrope"):
        model._init_canvas_mrope(SimpleNamespace(model_config=config))
    return Engine(config, MULTIMODAL_REGISTRY.create_processor(config), model)


@cache
def row_of(kind: str, seed: int) -> list[Part]:
    return random_row(np.random.default_rng(seed), *SIZES, kinds=load_tiny(kind).family.kinds)


@cache
def prompt_of(kind: str, seed: int) -> Prompt:
    """Return what vLLM makes of a row as the rollout engine sends it."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    tiny, processor = load_tiny(kind), engine_of(kind).processor
    (request,) = requests_of(tiny, [row_of(kind, seed)])
    given = vllm_prompt(request, tiny.config)
    items = processor.info.parse_mm_data(given["multi_modal_data"])
    made = processor(given["prompt_token_ids"], items, None, given.get("mm_processor_kwargs"))
    media = [
        MultiModalFeatureSpec(data, modality, "", place)
        for modality, places in made["mm_placeholders"].items()
        for data, place in zip(made["mm_kwargs"][modality], places, strict=True)
    ]
    takes = torch.zeros(len(made["prompt_token_ids"]), dtype=torch.bool)
    for place in (medium.mm_position for medium in media):
        taken = slice(place.offset, place.offset + place.length)  # a video and its sound have the same
        takes[taken] |= True if place.is_embed is None else place.is_embed
    media.sort(key=lambda medium: medium.mm_position.offset)
    return Prompt(torch.tensor(made["prompt_token_ids"]), takes, media)


def positions_in_vllm(engine: Engine, prompt: Prompt) -> Tensor:
    """Return positions (3, L); a model without M-RoPE counts from 0."""
    if not engine.config.uses_mrope:
        return torch.arange(len(prompt.token_ids)).expand(3, -1)
    return engine.model.get_mrope_input_positions(prompt.token_ids.tolist(), prompt.media)[0]


def own_positions(tiny: Tiny, row: list[Part]) -> Tensor:
    input_ids = expanded(tiny, row)
    found = tiny.family.positions(tiny.config, input_ids, media_shape_of(tiny, row))
    return torch.arange(len(input_ids)).expand(4, -1) if found is None else found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", by_day(KNOWN, *EVERY_TIME))
def test_tokens_and_those_that_features_replace_are_vllms(kind, seed):
    tiny = load_tiny(kind)
    ours, theirs = expanded(tiny, row_of(kind, seed)), prompt_of(kind, seed)

    replaced = torch.cat([*tiny.family.media_tokens(tiny.config, ours).values()]).sort().values

    assert len(ours) == len(theirs.token_ids)
    assert replaced.tolist() == theirs.takes_features.nonzero()[:, 0].tolist()
    text = ~theirs.takes_features  # what features replace has the token of videos in vLLM's InternVL
    assert ours[text].tolist() == theirs.token_ids[text].tolist()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KNOWN)
def test_positions_are_vllms(kind, seed):
    ours = own_positions(load_tiny(kind), row_of(kind, seed))

    assert ours[0].tolist() == list(range(ours.shape[1]))
    assert ours[1:].tolist() == positions_in_vllm(engine_of(kind), prompt_of(kind, seed)).tolist()
