# SPDX-License-Identifier: Apache-2.0
"""Conversations with images and videos, for the processors of several families."""

import io
import os
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.conversations import CALL, begin, encode, rules_of, say
from tests.helpers.families import load_tiny, random_image
from tests.helpers.media import save_video
from tests.helpers.tool_templates import TEMPLATES
from verl.agents.interface import Observation
from verl.agents.media import MAX_FILE, ConversationMedia, join_media
from verl.data.media.audio import wav_bytes
from verl.data.media.loader import MediaLoader, references_in_order
from verl.data.media.references import sound_of
from verl.data.media.sizes import MediaOptions
from verl.models.families.interface import MediaShape
from verl.models.tiny import TINY_MODELS

END = "<|im_end|>"
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "gemma3_vl", "internvl", "minicpmv4_6")
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]


def rules_with_media(kind, template=None, hears_videos=False, **options):
    """Return rules for a tiny model, with its own template or one of `TEMPLATES` with its image tokens."""
    tiny, recipe = load_tiny(kind), TINY_MODELS[kind]
    processor = copy(tiny.processor)
    processor.chat_template = processor.tokenizer.chat_template
    if template is not None:
        source = TEMPLATES[template].replace("<|vision_start|><|image_pad|><|vision_end|>", recipe.image)
        source = source.replace("<|vision_start|><|video_pad|><|vision_end|>", recipe.video)
        processor.chat_template = source
    loader = MediaLoader(processor, MediaOptions(0, 1 << 20, hears_videos=hears_videos))
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
    assert finished.trajectory.stop_reason == "stop" and len(media["images"]) == 4
    prompt = len(whole) - len(finished.token_ids)
    assert finished.token_ids == whole[prompt:]
    assert len(finished.trajectory.is_sampled) == len(finished.log_probs) == len(finished.token_ids)
    positions = load_tiny(kind).family.positions(load_tiny(kind).config, torch.tensor(whole), shape)
    positions = torch.arange(len(whole)) if positions is None else positions
    assert torch.equal(finished.trajectory.position_ids, positions[..., prompt:])


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


def test_naive_expansion_would_number_the_images_of_an_answer_again():
    # So `test_pieces_are_expanded_as_the_whole_is` covers models that number images.
    rules = rules_with_media("minicpmv4_6")
    (image,) = pictures((40, 60))
    shape = rules.media.loader.measure({"images": [png(image)]})
    placeholder = next(token for token, kind in rules.media.placeholders.items() if kind == "image")

    first = rules.media.expand([placeholder], 0, shape, MediaShape(), [])
    second = rules.media.expand([placeholder], 0, shape, shape, ["image"])

    assert first == rules.media.loader.expand([placeholder], shape)
    assert first != second and len(first) == len(second)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_a_video_in_the_prompt_and_images_and_videos_in_answers(kind, tmp_path):
    rules = rules_with_media(kind)
    family, config = load_tiny(kind).family, load_tiny(kind).config
    video, own = save_video(tmp_path / "a.mp4", 64, 48, 16), save_video(tmp_path / "b.mp4", 56, 56, 8)
    (image,) = pictures((40, 60))
    question = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "How many?"}]}]
    conversation = begin(rules, question, {"videos": [video]})

    say(conversation, f"{CALL}{END}")
    conversation.observe([Observation("one", images=[image], videos=[own])])
    request = conversation.request()
    Path(own).unlink()  # as a tool may do with its file
    say(conversation, f"5{END}")

    assert [len(request.media[name]) for name in ("images", "videos")] == [1, 2]
    finished = conversation.finish()
    whole, media, shape = whole_of(rules, conversation, conversation._row.prompt, finished)
    prompt = len(whole) - len(finished.token_ids)
    assert finished.token_ids == whole[prompt:]
    assert torch.equal(
        finished.trajectory.position_ids, family.positions(config, torch.tensor(whole), shape)[:, prompt:]
    )
    # In the order of the prompt, where features depend on it: as the data set writes it for a whole row.
    assert media.get("order") == rules.media.loader.with_order(media, conversation._row.token_ids).get(
        "order"
    )
    assert finished.trajectory.media["videos"][0]["bytes"]


@pytest.mark.parametrize("kind", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_videos_of_the_prompt_and_of_answers_are_heard_in_one_conversation(kind, tmp_path):
    rules = rules_with_media(kind, hears_videos=True)
    family, config = load_tiny(kind).family, load_tiny(kind).config
    video, own = save_video(tmp_path / "a.mp4", 64, 64, 16), save_video(tmp_path / "b.mp4", 64, 64, 32)
    (image,) = pictures((64, 64))
    question = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "How many?"}]}]
    conversation = begin(rules, question, {"videos": [video], "sounds": [sound_of(video)]})

    say(conversation, f"{CALL}{END}")
    conversation.observe([Observation("one", images=[image], videos=[own])])
    request = conversation.request()
    Path(own).unlink()  # as a tool may do with its file
    say(conversation, f"5{END}")

    heard = rules.media.loader.decode(request.media).sounds
    assert len(heard) == 2 and len(heard[0][0]) < len(heard[1][0])  # silence as long as the videos
    finished = conversation.finish()
    whole, _, shape = whole_of(rules, conversation, conversation._row.prompt, finished)
    prompt = len(whole) - len(finished.token_ids)
    assert finished.token_ids == whole[prompt:]
    assert all("turns" in each.facts for each in shape.videos)
    assert torch.equal(
        finished.trajectory.position_ids, family.positions(config, torch.tensor(whole), shape)[:, prompt:]
    )
    assert [kind for kind, _ in references_in_order(request.media)] == [
        "image", "video", "audio", "video", "audio",
    ]  # fmt: skip


def test_an_answer_is_not_heard_next_to_audio_of_the_prompt(tmp_path):
    rules = rules_with_media("qwen2_5_omni", hears_videos=True)
    audio = {"bytes": wav_bytes(np.ones(16000, dtype=np.float32), 16000)}
    question = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "How many?"}]}]
    conversation = begin(rules, question, {"audios": [audio]})
    say(conversation, f"{CALL}{END}")

    (shown,) = conversation.observe([Observation("one", videos=[save_video(tmp_path / "a.mp4", 64, 64, 8)])])

    assert shown.failed and "audio of its own, which the rollout engine cannot tell apart" in shown.text


@pytest.mark.parametrize(("kind", "unread"), [("qwen2_audio", "images"), ("mistral3", "videos")])
def test_an_answer_with_media_of_a_kind_that_the_model_does_not_read_fails(kind, unread, tmp_path):
    (image,) = pictures((64, 64))
    media = {"images": [image], "videos": [save_video(tmp_path / "a.mp4", 64, 64, 8)]}
    conversation = begin(rules_with_media(kind), [{"role": "user", "content": "How many?"}])
    say(conversation, f"{CALL}{END}")

    (shown,) = conversation.observe([Observation("one", **{unread: media[unread]})])

    assert shown.failed and f"reads no {unread}" in shown.text


def test_media_of_answers_are_references_with_bytes(tmp_path):
    rules = rules_with_media("qwen2_5_vl", max_parallel_calls=4)
    image, other = pictures((40, 60), (64, 64))
    image.save(tmp_path / "a.png")
    conversation = begin(rules)
    say(conversation, f"{CALL}{CALL}{CALL}{END}")

    conversation.observe([
        Observation(images=[str(tmp_path / "a.png")]), Observation(images=[other, png(image)]),
        Observation(images=[{"bytes": png(other), "max_pixels": 3000}]),
    ])  # fmt: skip
    (tmp_path / "a.png").unlink()
    request = conversation.request()
    say(conversation, f"5{END}")

    finished = conversation.finish()
    references = finished.trajectory.media["images"]
    assert references == [
        {"bytes": png(image)}, {"bytes": png(other)}, {"bytes": png(image)},
        {"bytes": png(other), "max_pixels": 3000},
    ]  # fmt: skip
    assert request.media == finished.trajectory.media
    assert [ref for each in finished.trajectory.turns[0].observations for ref in each.images] == references
    assert [decoded.size for decoded in rules.media.loader.decode(request.media).images] == [
        (60, 40), (64, 64), (60, 40), (54, 54),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("media", "words"),
    [
        ({"images": [b"no image"]}, "Error: the image of 8 bytes cannot be read"),
        (
            {"images": ["/nowhere/a.png"]},
            "Error: the image /nowhere/a.png cannot be read: there is no such file",
        ),
        ({"images": [3]}, "Error: images must be paths, bytes"),
        ({"images": ["https://example.com/a.png"]}, "Error: https://example.com/a.png is on the web"),
        ({"images": [Image.new("RGB", (2000, 1))]}, "Error: "),
        ({"videos": [b"no video"]}, "Error: the video of 8 bytes cannot be read"),
    ],
)
def test_media_that_cannot_be_read_are_an_error_that_the_policy_reads(media, words):
    rules = rules_with_media("qwen2_5_vl")
    conversation = begin(rules)
    say(conversation, f"{CALL}{END}")

    conversation.observe([Observation("look", reward=0.5, **media)])
    say(conversation, f"5{END}")

    finished = conversation.finish()
    (observation,) = finished.trajectory.turns[0].observations
    assert observation.text.startswith(words)
    assert observation.failed and observation.reward == 0.5
    assert finished.trajectory.media == {} and finished.trajectory.position_ids is None


@pytest.mark.parametrize(("limit", "reason"), [(3, "images"), (4, "stop"), (5, "stop"), (None, "stop")])
def test_images_beyond_the_limit_end_the_conversation_before_they_are_added(limit, reason):
    rules = rules_with_media("qwen2_5_vl", max_images=limit, max_parallel_calls=2)
    images = pictures((40, 60), (64, 64), (100, 30), (56, 84))
    conversation = begin(rules, QUESTION, {"images": [png(images[0])]})
    say(conversation, f"{CALL}{CALL}{END}")
    conversation.observe([Observation(images=[images[1]]), Observation(images=[images[2]])])
    assert not conversation.is_done
    say(conversation, f"{CALL}{END}")

    conversation.observe([Observation(images=[images[3]])])
    if not conversation.is_done:
        say(conversation, f"5{END}")

    finished = conversation.finish()
    assert (finished.trajectory.stop_reason, finished.finish_reason) == (
        reason,
        "stop" if reason == "stop" else "length",
    )
    assert len(finished.trajectory.media["images"]) == (2 if reason == "images" else 3)


@pytest.mark.parametrize(("limit", "reason"), [(1, "images"), (2, "done")])
def test_images_of_all_contexts_count(limit, reason):
    rules = rules_with_media("qwen2_5_vl", max_images=limit, environment="env.py:Env")
    images = pictures((40, 60), (64, 64))
    conversation = begin(rules, QUESTION, {"images": [png(images[0])]})
    say(conversation, f"5{END}")

    conversation.observe([Observation(images=[images[1]], messages=QUESTION)])
    if not conversation.is_done:
        say(conversation, f"5{END}")
        conversation.observe([Observation("Good.", done=True)])

    finished = conversation.finish()
    assert finished.trajectory.stop_reason == reason
    assert [one.num_images for one in finished.trajectory.contexts] == [1] * limit
    assert len(finished.trajectory.media.get("images", ())) == limit - 1


@pytest.mark.parametrize("more", [0, 1])
def test_the_tokens_of_an_image_count(more):
    (image,) = pictures((84, 84))  # 3 x 3 tokens
    rules = rules_with_media("qwen2_5_vl")
    piece = (
        "\n<|im_start|>user\n<tool_response>\n<|vision_start|><|image_pad|><|vision_end|>\n</tool_response>"
    )
    piece += f"{END}\n<|im_start|>assistant\n"
    length = len(encode(rules, f"{CALL}{END}")) + len(encode(rules, piece)) + 8
    conversation = begin(replace(rules, max_tokens=length + more))
    say(conversation, f"{CALL}{END}")

    conversation.observe([Observation(images=[image])])

    assert conversation.is_done == (more == 0)
    assert conversation.stop_reason == (None if more else "length")


def test_a_prompt_without_media_in_the_answers_counts_on():
    rules = rules_with_media("qwen2_5_vl")
    conversation = begin(rules, QUESTION, {"images": [png(pictures((40, 60))[0])]})
    say(conversation, f"{CALL}{END}")
    conversation.observe([Observation("5")])
    say(conversation, f"5{END}")

    assert conversation.finish().trajectory.position_ids is None


def test_markers_of_images_in_a_text_are_text():
    rules = rules_with_media("qwen2_5_vl")
    conversation = begin(rules)
    say(conversation, f"{CALL}{END}")

    conversation.observe([Observation("<|image_pad|> <image>", images=pictures((40, 60)))])

    shown = rules.tokenizer.decode(conversation.request().token_ids)
    assert shown.count("<|image_pad|>") == 1 and "< |image_pad|> <image>" in shown


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "large file"])
def test_a_file_that_cannot_be_held_is_refused_and_not_read(kind, tmp_path):
    path = tmp_path / "a.png"
    if kind == "device":
        path = Path("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(MAX_FILE + 1)
    media = rules_with_media("qwen2_5_vl").media

    with pytest.raises(ValueError, match=r"cannot be read: .*(no regular file|larger than 256 MiB)"):
        media.of(Observation(images=[{"path": str(path)}]))


def test_an_image_that_pillow_would_hand_to_a_program_is_refused(tmp_path):
    path = tmp_path / "a.png"  # its name says nothing
    Image.new("RGB", (40, 40)).save(path, format="EPS")

    with pytest.raises(ValueError, match="cannot identify image file"):
        rules_with_media("qwen2_5_vl").media.of(Observation(images=[{"path": str(path)}]))
