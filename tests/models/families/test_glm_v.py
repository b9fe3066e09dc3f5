# SPDX-License-Identifier: Apache-2.0
"""GLM-4.xV: videos that share the token of images, times of frames as text, sizes of patches, thinking."""

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.closeness import assert_values_close
from tests.helpers.families import (
    assert_tokens_are_the_processors,
    expanded,
    features_of,
    load_tiny,
    media_of,
    media_shape_of,
    random_clip,
    random_image,
)
from tests.helpers.media import save_image
from verl.config.ppo import DataConfig
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.readers import load_processor, load_tokenizer
from verl.data.rl_dataset import RLHFDataset
from verl.models.families.glm_v import GlmV, _with_sizes_on_device


@pytest.fixture(params=["glm4v", "glm4v_moe", "glm46v"])
def tiny(request):
    return load_tiny(request.param)


def some_row():
    rng = np.random.default_rng(7)
    clip = random_clip(rng, 5, 64, 96, fps=5.3, step=4)
    return ["red", random_image(rng, 60, 90), clip, "blue", random_image(rng, 120, 60)]


def test_rows_with_both_kinds_run_through_the_models_own_forward(tiny):
    # transformers' forward takes the processor's inputs of one kind only, as both share a token
    row = some_row()
    input_ids, media = expanded(tiny, row), media_of(tiny, row)
    positions = tiny.family.positions(tiny.config, input_ids, media_shape_of(tiny, row))
    embeddings = tiny.model.get_input_embeddings()(input_ids).detach()
    features = dict.fromkeys(("image", "video"), torch.empty(0))
    for medium, part in zip(media, features_of(tiny, media), strict=True):
        features[medium.kind] = torch.cat([features[medium.kind], part])
    for kind, at in tiny.family.media_tokens(tiny.config, input_ids).items():
        embeddings[at] = features[kind]

    with torch.no_grad():
        inputs = tiny.family.own_inputs(media)
        found = tiny.model(input_ids=input_ids[None], position_ids=positions[:, None], **inputs).logits
        expected = tiny.model(inputs_embeds=embeddings[None], position_ids=positions[:, None]).logits

    assert_values_close(found, expected)


def test_each_frame_has_a_grid_of_positions_and_its_time_as_text_after_it():
    # 2 x 2 tokens for each of 2 frames: 4 tokens share a square of 2 positions
    tiny = load_tiny("glm4v")
    rng = np.random.default_rng(0)
    row = [random_clip(rng, 4, 56, 56, fps=2.0, step=2)]  # frames 0, 2, 4, 6 at 0, 1, 2, 3 s

    shape = media_shape_of(tiny, row)

    names = tiny.processor.tokenizer.convert_ids_to_tokens(shape.videos[0].tokens)
    frame = ["<|begin_of_image|>", *["<|image|>"] * 4, "<|end_of_image|>"]
    assert names == [*frame, "0", *frame, "2"]
    begin, end = (getattr(tiny.config, f"video_{edge}_token_id") for edge in ("start", "end"))
    ids = torch.tensor([begin, *shape.videos[0].tokens, end])
    positions = tiny.family.positions(tiny.config, ids, shape)
    assert positions is not None
    _, time, height, width = positions.tolist()
    assert time == [0, 1, 2, 2, 2, 2, 4, 5, 6, 7, 7, 7, 7, 9, 10, 11]
    assert height == [0, 1, 2, 2, 3, 3, 4, 5, 6, 7, 7, 8, 8, 9, 10, 11]
    assert width == [0, 1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9, 10, 11]


def test_sampled_begins_and_ends_of_videos_do_not_make_images_of_later_rows_videos(tiny):
    config = tiny.config
    begin, end = config.video_start_token_id, config.video_end_token_id
    row = expanded(tiny, some_row())
    alone = {kind: len(at) for kind, at in tiny.family.media_tokens(config, row).items()}
    sampled = torch.tensor([end, 1, begin, end, begin])

    packed = torch.cat([sampled, row, sampled, row])

    found = tiny.family.media_tokens(config, packed)
    assert {kind: len(at) for kind, at in found.items()} == {kind: 2 * n for kind, n in alone.items()}
    offset = len(sampled) + len(row)
    for at in found.values():
        first, second = at.chunk(2)
        assert (second - first).unique().tolist() == [offset]


def test_the_processor_and_not_the_type_of_the_model_writes_times():
    # checkpoints of GLM-4.6V have the model of GLM-4.5V and tenths of seconds
    tiny = load_tiny("glm4v_moe")
    other = tiny._replace(processor=GlmV.tiny["glm46v"].processor(tiny.processor.tokenizer))
    other.processor.chat_template = tiny.processor.chat_template
    row = some_row()

    assert_tokens_are_the_processors(other, row)
    assert len(expanded(other, row)) > len(expanded(tiny, row))


def test_positions_of_patches_are_interpolated_to_the_size_of_each_frame(tiny, monkeypatch):
    seen = []
    own = tiny.owner.visual.embeddings.forward

    def embed(patches, lengths, sizes, *coordinates):
        seen.append((lengths.tolist(), sizes.tolist()))
        return own(patches, lengths, sizes, *coordinates)

    monkeypatch.setattr(tiny.owner.visual.embeddings, "forward", embed)
    tiny.family.encode(tiny.owner, media_of(tiny, some_row()))

    # an image of 4 x 6 patches, 3 frames of 4 x 6, an image of 8 x 4
    assert seen == [([24, 24, 24, 24, 32], [*[[1, 4, 6]] * 4, [1, 8, 4]])]


def test_sizes_of_frames_follow_the_patches_to_their_device():
    patches, numbers = torch.empty(4, 8, device="meta"), torch.ones(1)

    moved = _with_sizes_on_device(torch.nn.Identity(), (patches, numbers, numbers, numbers))

    assert moved[0] is patches
    assert [tensor.device.type for tensor in moved] == ["meta", "meta", "meta", "cpu"]


THINKING = """{%- for m in messages -%}
<|{{ m.role }}|>
{% for part in m.content %}{% if part.type == 'image' %}<|begin_of_image|><|image|><|end_of_image|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}
{%- if m.role == 'user' and enable_thinking is defined and not enable_thinking %}/nothink{% endif %}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>
{% if enable_thinking is defined and not enable_thinking %}<think></think>
{% endif %}{% endif -%}"""  # in the form of GLM-4.5V's


def test_thinking_is_turned_off_in_prompts_with_images(tmp_path):
    tiny = load_tiny("glm4v_moe")
    image = save_image(tmp_path / "a.png", 84, 56)  # 6 tokens
    files = tmp_path / "rows.jsonl"
    files.write_text(json.dumps({"problem": "<image>How many?", "answer": "2", "images": [image]}) + "\n")
    (tmp_path / "glm.jinja").write_text(THINKING)
    template = str(tmp_path / "glm.jinja")
    found = {}

    for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        config = DataConfig(
            max_prompt_length=64, min_pixels=1, max_pixels=2**20, apply_chat_template_kwargs=variables,
            prompt_key="problem", override_chat_template=template, filter_overlong_prompts_workers=1,
        )  # fmt: skip
        processor = load_processor(str(tiny.folder), override_chat_template=template)
        media = MediaLoader(processor, MediaOptions.from_data(config))
        positions = partial(tiny.family.positions, tiny.config)
        dataset = RLHFDataset(
            str(files), load_tokenizer(str(tiny.folder), override_chat_template=template), processor, config,
            media=media, position_ids=positions,
        )  # fmt: skip
        row: Any = dataset[0]
        found[str(variables)] = row["prompt_text"], int(row["prompt_mask"].sum())

    asked = "<|user|>\n<|begin_of_image|><|image|><|end_of_image|>How many?"
    thinks, on, off = found.values()
    assert thinks == on
    assert thinks[0] == f"{asked}<|assistant|>\n"
    assert off[0] == f"{asked}/nothink<|assistant|>\n<think></think>\n"
    count = len(tiny.processor.tokenizer.encode(off[0], add_special_tokens=False))
    assert off[1] == count + 5  # an image of 2 x 3 tokens in place of one
