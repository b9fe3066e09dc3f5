# SPDX-License-Identifier: Apache-2.0
"""M-RoPE positions: worked out by hand, and equal to vLLM's own on random mixtures."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.grids import positions_of
from verl.models.families.mrope import continue_positions
from verl.models.families.registry import TEXT, family_of

IMAGE, VIDEO, START, END = 501, 502, 503, 504
VISION = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)


def positions(model_type, ids, **grids):
    config = SimpleNamespace(
        model_type=model_type, image_token_id=IMAGE, video_token_id=VIDEO, vision_config=VISION
    )
    return positions_of(config, torch.tensor(ids), **grids)


def test_text_counts_up_in_all_rows():
    assert positions("qwen2_vl", [1, 2, 3]).tolist() == [[0, 1, 2]] * 4


def test_an_image_is_a_grid_and_text_continues_after_its_largest_position():
    # A grid of 1 x 4 x 6 patches merges to 2 x 3 tokens. They start at 1; the largest position is 1 + 2 = 3.
    ids = [7, *[IMAGE] * 6, 8]

    text, time, height, width = positions("qwen2_5_vl", ids, image_grid_thw=[[1, 4, 6]]).tolist()

    assert text == [0, 1, 2, 3, 4, 5, 6, 7]
    assert time == [0, 1, 1, 1, 1, 1, 1, 4]
    assert height == [0, 1, 1, 1, 2, 2, 2, 4]
    assert width == [0, 1, 2, 3, 1, 2, 3, 4]


def test_qwen2_5_vl_scales_time_by_seconds_and_continues_after_the_last_patch():
    # 3 patches of 1.5 seconds at 2 positions a second: 0, 3, 6; text goes on at 1 + 6 + 1 = 8.
    ids = [7, *[VIDEO] * 3, 8]

    rows = positions("qwen2_5_vl", ids, video_grid_thw=[[3, 2, 2]], second_per_grid_ts=[1.5]).tolist()

    assert rows[1] == [0, 1, 4, 7, 8]
    assert rows[2] == rows[3] == [0, 1, 1, 1, 8]


def test_qwen2_vl_counts_temporal_patches():
    rows = positions("qwen2_vl", [7, *[VIDEO] * 3, 8], video_grid_thw=[[3, 2, 2]], second_per_grid_ts=[1.5])

    assert rows[1].tolist() == [0, 1, 2, 3, 4]


def test_qwen3_vl_gives_each_frame_its_own_grid_after_its_timestamp():
    # Two frames of 1 x 2 tokens (2 x 4 patches), each after a timestamp and a start, before an end.
    ids = [9, START, VIDEO, VIDEO, END, 9, START, VIDEO, VIDEO, END]

    _, time, height, width = positions("qwen3_vl", ids, video_grid_thw=[[2, 2, 4]]).tolist()

    assert time == [0, 1, 2, 2, 4, 5, 6, 7, 7, 9]
    assert height == time
    assert width == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_responses_continue_from_the_last_position_of_each_row():
    last = positions("qwen2_vl", [7, *[IMAGE] * 6, 8], image_grid_thw=[[1, 4, 6]])[:, -1]  # (4,)

    assert continue_positions(last, 3).tolist() == [[8, 9, 10], [5, 6, 7], [5, 6, 7], [5, 6, 7]]


def test_a_text_model_belongs_to_the_family_of_text():
    assert family_of(SimpleNamespace(model_type="qwen2")) is TEXT


@pytest.mark.parametrize(
    ("ids", "grids"), [([IMAGE], [[1, 4, 4]]), ([IMAGE] * 5, [[1, 4, 4]]), ([1, 2], [[1, 4, 4]])]
)
def test_media_tokens_that_do_not_fit_the_grids_are_refused(ids, grids):
    with pytest.raises(ValueError, match="media token"):
        positions("qwen2_vl", ids, image_grid_thw=grids)


def random_prompt(rng, model_type):
    """Ids, grids, and what vLLM is told about where the media stand."""
    ids, images, videos, seconds, places = [], [], [], [], []
    for _ in range(rng.randint(0, 6)):
        ids += [rng.randint(0, 400) for _ in range(rng.randint(0, 9))]
        kind = rng.choice(["text", "image", "video"])
        height, width = 2 * rng.randint(1, 6), 2 * rng.randint(1, 6)
        tokens = height * width // 4
        if kind == "image":
            ids.append(START)
            places.append(("image", len(ids), [1, height, width], None))
            images.append([1, height, width])
            ids += [IMAGE] * tokens + [END]
        elif kind == "video":
            time = rng.randint(1, 7)
            seconds.append(rng.choice([0.25, 0.5, 1.0, 0.7333, 2.9999]))
            videos.append([time, height, width])
            ids.append(START)
            places.append(("video", len(ids), [time, height, width], seconds[-1]))
            if model_type.startswith("qwen3"):
                for frame in range(time):
                    ids += [rng.randint(0, 400), frame, START, *[VIDEO] * tokens, END]
            else:
                ids += [VIDEO] * (time * tokens)
            ids.append(END)
    ids += [rng.randint(0, 400) for _ in range(rng.randint(1, 5))]
    return ids, images, videos, seconds, places


def vllm_positions(model_type, ids, places):
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
    from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

    vision = SimpleNamespace(spatial_merge_size=2)
    if model_type == "qwen2_5_vl":
        vision.tokens_per_second = VISION.tokens_per_second
    config = SimpleNamespace(
        vision_config=vision, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END
    )
    features = []
    for kind, offset, grid, seconds in places:
        data = {f"{kind}_grid_thw": SimpleNamespace(data=torch.tensor(grid))}
        if model_type == "qwen2_5_vl" and kind == "video":
            data["second_per_grid_ts"] = SimpleNamespace(data=torch.tensor(seconds, dtype=torch.float32))
        features.append(SimpleNamespace(modality=kind, data=data, mm_position=SimpleNamespace(offset=offset)))
    if model_type.startswith("qwen3"):
        return Qwen3VLForConditionalGeneration._get_mrope_input_positions(ids, features, config)[0]
    model = {"qwen2_vl": Qwen2VLForConditionalGeneration, "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration}[
        model_type
    ]
    model_like = SimpleNamespace(config=config)
    model_like.iter_mm_grid_thw = partial(model.iter_mm_grid_thw, model_like)
    return model.get_mrope_input_positions(model_like, ids, features)[0]


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_positions_equal_vllms_on_random_mixes_of_text_images_and_videos(model_type):
    rng = random.Random(model_type)
    for _ in range(150):
        ids, images, videos, seconds, places = random_prompt(rng, model_type)
        grids = {"image_grid_thw": images} if images else {}
        grids |= {"video_grid_thw": videos, "second_per_grid_ts": seconds} if videos else {}

        ours = positions(model_type, ids, **grids)

        assert ours[0].tolist() == list(range(len(ids)))
        assert ours[1:].tolist() == vllm_positions(model_type, ids, places).tolist()
