# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from tests.helpers.grids import media_in
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.families import qwen_vl
from verl.models.families.registry import family_of
from verl.models.hub_names import auto_class
from verl.models.tiny import save_tiny_model
from verl.models.vision import share_media

CONFIG = SimpleNamespace(
    model_type="qwen2_vl",
    vision_config=SimpleNamespace(spatial_merge_size=2, temporal_patch_size=2, patch_size=4, in_channels=3),
    vision_start_token_id=1, image_token_id=2, vision_end_token_id=3,
)  # fmt: skip
PATCH = 3 * 2 * 4 * 4


def patches(numbers):
    """Patches whose every value is their number."""
    return torch.tensor(list(numbers), dtype=torch.float32)[:, None].expand(-1, PATCH)


FAMILY = family_of(CONFIG)
BLANK = FAMILY.example(CONFIG, None).media


def share(media, sp):
    return share_media(FAMILY, CONFIG, media_in(media), sp, BLANK)


def grids(media):
    return [medium.facts["grid_thw"] for medium in media]


def pixels(media):
    return torch.cat([tensor for medium in media for tensor in medium.tensors.values()])


# Two images of 16 and 8 patches, then a clip of 5 frames of 8 patches, numbered through.
MEDIA = {
    "pixel_values": patches(range(24)),
    "image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]]),
    "pixel_values_videos": patches(range(24, 64)),
    "video_grid_thw": torch.tensor([[5, 2, 4]]),
}


def test_frames_are_divided_into_equal_numbers_of_patches():
    # 16 + 8 + 8 patches and 4 x 8: the clip is cut behind its first frame.
    (first, division), (second, _) = (share(MEDIA, SequenceParallel(2, 1, i)) for i in range(2))

    assert grids(first) == [[1, 4, 4], [1, 2, 4], [1, 2, 4]]
    assert grids(second) == [[4, 2, 4]]
    assert division.features == (4, 2, 10)
    assert division.counts == (8, 8)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 9])
def test_every_patch_is_on_one_rank_in_order(size):
    shares = [share(MEDIA, SequenceParallel(size, 1, index)) for index in range(size)]

    counts = shares[0][1].counts
    held = [own for (own, _), count in zip(shares, counts, strict=True) if count]
    assert torch.cat([pixels(own) for own in held])[:, 0].tolist() == list(range(64))
    for own, count in zip(held, filter(None, counts), strict=True):
        assert torch.tensor(grids(own)).prod(-1).sum() == len(pixels(own)) == 4 * count


def test_a_rank_without_frames_gets_a_blank_image():
    one = {"pixel_values_videos": patches(range(8)), "video_grid_thw": torch.tensor([[1, 2, 4]])}

    media, division = share(one, SequenceParallel(1, 2, 1))

    assert division.counts == (2, 0)
    assert grids(media) == [[1, 2, 2]]
    assert pixels(media).shape == (4, PATCH)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_features_are_those_of_a_tower_that_reads_its_grids_itself(family, tmp_path, monkeypatch):
    config = AutoConfig.from_pretrained(save_tiny_model(tmp_path, family))
    owner = auto_class(config).from_config(config).model
    edge = config.vision_config.patch_size**2 * config.vision_config.temporal_patch_size * 3
    grids = {"image_grid_thw": [[1, 4, 6], [1, 8, 2]], "video_grid_thw": [[3, 4, 4]]}
    counts = {"pixel_values": 40, "pixel_values_videos": 48}
    media = {name: torch.randn(count, edge) for name, count in counts.items()} | grids

    ours = family_of(config).encode(owner, media_in(media))
    monkeypatch.setattr(qwen_vl, "tower_inputs", lambda *_: {})
    theirs = family_of(config).encode(owner, media_in(media))

    assert [len(features) for features in ours] == [6, 4, 12]
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own, other)
