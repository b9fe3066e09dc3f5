# SPDX-License-Identifier: Apache-2.0
"""Conversations with images and videos, for the processors of several families."""

import io

import numpy as np
import pytest
import torch

from tests.helpers.conversations import CALL, begin, encode, rules_of, say
from tests.helpers.families import load_tiny, random_image
from tests.helpers.tool_templates import TEMPLATES
from verl.agents.interface import Observation
from verl.agents.media import ConversationMedia, join_media
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.models.tiny import TINY_MODELS

END = "<|im_end|>"
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "gemma3_vl", "internvl", "minicpmv4_6")
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]


def rules_with_media(kind, template=None, **options):
    """Return rules for a tiny model, with its own template or one of `TEMPLATES` with its image tokens."""
    tiny, recipe = load_tiny(kind), TINY_MODELS[kind]
    if template is not None:
        source = TEMPLATES[template].replace("<|vision_start|><|image_pad|><|vision_end|>", recipe.image)
        source = source.replace("<|vision_start|><|video_pad|><|vision_end|>", recipe.video)
        tiny.processor.chat_template = source
    else:
        tiny.processor.chat_template = tiny.processor.tokenizer.chat_template
    loader = MediaLoader(tiny.processor, MediaOptions(0, 1 << 20))
    media = ConversationMedia(loader, lambda ids, shape: tiny.family.positions(tiny.config, ids, shape))
    return rules_of(tokenizer=tiny.processor.tokenizer, media=media, max_tokens=5000, **options)


def pictures(*sizes):
    rng = np.random.default_rng(0)
    return [random_image(rng, *size) for size in sizes]


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def whole_of(rules, conversation, prompt, finished):
    """The row as the family expands it at once, its media and their shapes."""
    media = join_media(prompt.media, finished.trajectory.media)
    shape = rules.media.loader.measure(media)
    unexpanded = conversation._row.token_ids
    return rules.media.loader.expand(unexpanded, shape), media, shape


def talk(rules, images):
    """Three turns: an image in the prompt, two images in the first answers, one in the second."""
    conversation = begin(rules, QUESTION, {"images": [png(images[0])]})
    say(conversation, f"{CALL}\n{CALL}{END}")
    conversation.observe([Observation("one", images=[images[1]]), Observation(images=[png(images[2])])])
    say(conversation, f"Again.\n{CALL}{END}")
    conversation.observe([Observation("two", images=[images[3]])])
    say(conversation, f"5{END}")
    return conversation


@pytest.mark.parametrize("template", [None, "hermes"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_pieces_are_expanded_as_the_whole_is(kind, template):
    rules = rules_with_media(kind, template, max_parallel_calls=2)
    images = pictures((40, 60), (64, 64), (100, 30), (56, 84))

    conversation = talk(rules, images)

    finished = conversation.finish()
    whole, media, shape = whole_of(rules, conversation, conversation._row.prompt, finished)
    assert finished.stop_reason == "stop" and len(media["images"]) == 4
    prompt = len(whole) - len(finished.token_ids)
    assert finished.token_ids == whole[prompt:]
    assert len(finished.trajectory.is_sampled) == len(finished.log_probs) == len(finished.token_ids)
    positions = load_tiny(kind).family.positions(load_tiny(kind).config, torch.tensor(whole), shape)
    if positions is None:
        assert finished.trajectory.position_ids is None
    else:
        assert torch.equal(finished.trajectory.position_ids, positions[:, prompt:])


@pytest.mark.parametrize("template", [None, "hermes"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_tokens_of_the_engine_are_the_rendering_of_the_messages(kind, template):
    rules = rules_with_media(kind, template, max_parallel_calls=2)

    conversation = talk(rules, pictures((40, 60), (64, 64), (100, 30), (56, 84)))

    processor = rules.media.loader.processor
    text = processor.tokenizer.apply_chat_template(
        conversation.messages, chat_template=processor.chat_template, tokenize=False
    )
    assert conversation._row.token_ids == encode(rules, text.removesuffix("\n"))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_template_passes_the_check(kind):
    for template in (None, "hermes"):
        rules_with_media(kind, template).renderer.check(max_parallel_calls=2)
