# SPDX-License-Identifier: Apache-2.0
"""VILA's tiles, scales, pooling and folders, worked out by hand or in a second way; its rollout engine."""

import json
import shutil
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.families import load_own, load_tiny, random_clip, random_image
from tests.helpers.family_engines import engine_error
from tests.workers.rollout.reference import rollout_config, setup_of
from verl.data.readers import load_processor, load_tokenizer
from verl.models.families.registry import load_config
from verl.models.families.tiny_sizes import TEXT
from verl.models.families.vila import TINY_PARTS
from verl.models.tiny import train_tokenizer
from verl.models.vila.config import PARTS, VilaConfig
from verl.models.vila.model import Downsample, VilaForConditionalGeneration, chessboard, pooled
from verl.models.vila.processor import VilaProcessor, closest_grid, grids
from verl.workers.rollout.engines import build_rollout_engine

SETTINGS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@pytest.mark.nightly("verl/workers/rollout")
@pytest.mark.heavy
def test_the_language_model_in_vllm_has_the_models_log_probs_after_prompts_as_embeddings(single_process):
    tiny, rng = load_tiny("vila"), np.random.default_rng(0)
    rows = [
        ["What colour is the shape?"],
        ["look:\n", random_image(rng, 80, 160), " or\n", random_image(rng, 64, 64), "?"],
        [random_clip(rng, 4, 64, 64), "What moves?"],
        ["first\n", random_clip(rng, 3, 40, 80), "then\n", random_image(rng, 200, 60)],
    ]
    engine = build_rollout_engine(rollout_config(), setup_of(tiny.folder))

    error = engine_error(tiny, engine, rows, as_features=True)
    engine.close()

    assert error < 1e-4


def tiny_config(**options):
    text = {"text_config": TEXT | {"vocab_size": 64}}
    return VilaConfig(**TINY_PARTS | text, image_token_id=8, video_token_id=9, **options)


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (100, 100, (1, 1)),
        (800, 400, (1, 2)),  # it covers 0.27 of two by four tiles
        (3000, 1500, (2, 4)),
        (300, 1200, (4, 1)),
        (1200, 800, (2, 3)),
    ],
)
def test_an_image_is_cut_into_the_largest_grid_of_its_shape_that_it_covers_half_of(width, height, grid):
    assert closest_grid(height, width, 384, 1, 12) == grid


def test_the_copies_of_an_image_are_square_but_for_the_last():
    config = tiny_config(
        image_aspect_ratio="dynamic_s2", dynamic_s2=True, s2_scales="56,112,168", max_tiles=12,
    )  # fmt: skip

    assert grids(config, 100, 100) == [(1, 1), (2, 2), (3, 3)]
    assert grids(config, 100, 133) == [(1, 1), (2, 2), (3, 4)]  # at least the nine tiles of the largest scale


def test_squares_of_patches_are_joined_row_by_row_and_padded_with_zeros():
    patches = torch.arange(25.0).view(1, 25, 1)  # five by five

    joined = Downsample(2)(patches)[0]

    assert joined.shape == (9, 4)
    assert joined[0].tolist() == [0, 1, 5, 6]
    assert joined[2].tolist() == [4, 0, 9, 0]  # beyond the right edge
    assert joined[8].tolist() == [24, 0, 0, 0]


def test_tiles_become_rows_of_the_whole_image():
    tiles = torch.arange(8.0).view(2, 4, 1)  # two tiles side by side, of two by two

    assert chessboard(tiles, (1, 2))[..., 0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert chessboard(tiles, (2, 1))[..., 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_features_of_all_scales_are_joined_at_each_place_before_they_are_projected():
    config = tiny_config(
        image_aspect_ratio="dynamic_s2", dynamic_s2=True, s2_scales=[56, 112], max_tiles=6,
        s2_resize_output_to_scale_idx=-1,
    )  # fmt: skip
    model = VilaForConditionalGeneration(config).eval()
    shape = grids(config, 100, 150)
    assert shape == [(1, 1), (2, 3)]
    patches = torch.randn(7, 16, 64)

    with torch.no_grad():
        found = model.image_features(patches, shape)

        # The whole image has four by four patches, each of which covers two by three of the other copy.
        whole = patches[0].view(4, 4, 64)
        other = [[patches[1 + 3 * row + column].view(4, 4, 64) for column in range(3)] for row in range(2)]
        expected = torch.empty(4, 6, config.text_config.hidden_size)
        for row, column in product(range(2), range(3)):
            tile = torch.empty(4, 4, 128)
            for y, x in product(range(4), range(4)):
                place = int((4 * row + y) / 2), int((4 * column + x) / 3)
                tile[y, x] = torch.cat([whole[place], other[row][column][y, x]])
            projected = model.mm_projector(tile.view(1, 16, 128)).view(2, 2, -1)
            expected[2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = projected
    assert torch.allclose(found, expected.flatten(0, 1), atol=1e-5)


def test_pooled_videos_have_the_means_of_boxes_in_every_pass():
    encoder = {"_target_": "llava.TSPVideoEncoder", "pool_sizes": [[2, 1, 1], [4, 2, 2]], "sep_tokens": "\n"}
    tiny = load_tiny("vila")
    processor = VilaProcessor(tiny.processor.tokenizer, SETTINGS, tiny_config(video_encoder=encoder))
    [newline] = processor.encode("\n")
    frames = torch.randn(4, 4, 8)  # two by two features each

    assert processor.video_tokens(4) == [9, 9, 9, 9, newline] * 2 + [newline] + [9, newline] + [newline]
    with pytest.raises(ValueError, match="averages 2 frames, 5 of a video do not divide"):
        processor.video_tokens(5)
    assert torch.allclose(pooled(frames, (2, 1, 1)), torch.cat([frames[:2].mean(0), frames[2:].mean(0)]))
    assert torch.allclose(pooled(frames, (4, 2, 2)), frames.mean((0, 1))[None], atol=1e-6)


def test_each_part_is_in_its_folder_under_the_names_of_the_hub_and_the_folders_alone_load(tmp_path):
    tiny, folder = load_tiny("vila"), tmp_path / "hub"
    shutil.copytree(tiny.folder, folder)
    for file in folder.glob("*.json*"):  # the hub has the tokenizer of the language model only
        if file.name != "config.json":
            file.unlink()
    config = json.loads((folder / "config.json").read_text())
    assert {
        "llm_cfg",
        "vision_tower_cfg",
        "mm_projector_cfg",
    } <= config.keys() and "text_config" not in config
    config.pop("image_token_id"), config.pop("video_token_id")  # nor does it have them
    (folder / "config.json").write_text(json.dumps(config))

    starts = {part: load_file(folder / part / "model.safetensors").keys() for part in PARTS}
    loaded = load_own(folder)

    assert [{name.partition(".")[0] for name in names} for names in starts.values()] == [
        {"model"}, {"vision_model"}, {"layers"},
    ]  # fmt: skip
    assert (loaded.config.image_token_id, loaded.config.video_token_id) == (8, 9)
    assert all(torch.equal(one, tiny.model.state_dict()[name]) for name, one in loaded.state_dict().items())
    assert load_tokenizer(folder).encode("<image>") == [8]
    assert load_processor(folder).image_processor.values == tiny.processor.image_processor.values


def test_a_tokenizer_without_tokens_of_media_is_refused_with_the_remedy(tmp_path):
    folder = tmp_path / "hub"
    shutil.copytree(load_tiny("vila").folder, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["image_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    train_tokenizer().save_pretrained(folder / "llm")

    with pytest.raises(ValueError, match=r"no tokens .*<image>.*convert the checkpoint"):
        load_config(folder)
