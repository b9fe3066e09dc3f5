# SPDX-License-Identifier: Apache-2.0
"""Options of single images and videos: every family honors them, or refuses them by name."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.families import pixel_limits
from tests.helpers.families import load_tiny
from tests.helpers.family_table import EVERY_TIME
from tests.helpers.media import save_image, save_video
from tests.helpers.nightly import by_day
from verl.config.data import DataConfig
from verl.config.sft import SFTDataConfig
from verl.data.bad_rows import BadRowError
from verl.data.media.cache import MediaCache
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.models.families.generic import GenericFamily
from verl.models.families.interface import MediumShape, VisionFamily
from verl.models.families.registry import all_families

NAMES = [
    name for family in all_families() if isinstance(family, VisionFamily) for name in family.tiny
]  # of `verl-tiny-model --kind`
READ_VIDEOS = [
    name
    for family in all_families()
    if isinstance(family, VisionFamily) and "video" in family.kinds
    for name in family.tiny
]


def loader_of(kind, **options):
    tiny = load_tiny(kind)
    options = MediaOptions(1, 2**24, **options)
    return MediaLoader(tiny.processor, options, MediaCache(None), tiny.family)


def tokens_of(loader, kind, ref):
    shape = loader.measure({f"{kind}s": [ref]})
    (medium,) = shape.images if kind == "image" else shape.videos
    return len(medium.tokens)


@pytest.mark.parametrize("name", by_day(NAMES, *EVERY_TIME))
def test_a_limit_of_an_images_pixels_has_an_effect_or_is_refused(name, tmp_path):
    loader = loader_of(name)
    path = save_image(tmp_path / "a.png", 360, 240)
    limited = {"path": path, "max_pixels": 96 * 64}
    sized_by = loader.family.sized_by(loader.processor, "image")

    if not sized_by:
        assert tokens_of(loader, "image", limited) < tokens_of(loader, "image", path)
        return
    for read in (loader.measure, loader.decode, loader.media):
        with pytest.raises(BadRowError, match=f"the image has `max_pixels`, without .*`{sized_by[0]}`"):
            read({"images": [limited]})


@pytest.mark.parametrize("name", READ_VIDEOS)
def test_a_limit_of_a_videos_pixels_has_an_effect_or_is_refused(name, tmp_path):
    loader = loader_of(name)
    path = save_video(tmp_path / "a.mp4", 192, 128, 4, fps=2)
    limited = {"path": path, "max_pixels": 96 * 64}

    if not loader.family.sized_by(loader.processor, "video"):
        assert tokens_of(loader, "video", limited) < tokens_of(loader, "video", path)
        return
    for read in (loader.measure, loader.decode, loader.media):
        with pytest.raises(BadRowError, match="the video has `max_pixels`, without effect on this model"):
            read({"videos": [limited]})
    tokens = loader.family.smallest_frame(loader.processor)
    if tokens > 1:  # the limit holds
        assert loader_of(name, tokens_per_frame=tokens).measure({"videos": [path]}) == loader.measure(
            {"videos": [path]}
        )
        return
    with pytest.raises(ValueError, match="`tokens_per_frame`, without effect on this model"):
        loader_of(name, tokens_per_frame=64)


@pytest.mark.parametrize("name", NAMES)
def test_a_runs_limits_of_pixels_have_an_effect_or_are_refused_at_the_start(name):
    tiny = load_tiny(name)
    data = replace(DataConfig(), min_pixels=784, max_pixels=50176)
    sized_by = [tiny.family.sized_by(tiny.processor, kind) for kind in tiny.family.kinds]

    def open_loader(data):
        return MediaLoader(tiny.processor, MediaOptions.from_data(data), MediaCache(None), tiny.family)

    open_loader(replace(data, min_pixels=None, max_pixels=None))
    open_loader(DataConfig())
    if not all(sized_by):
        assert pixel_limits(tiny.folder) == []
        open_loader(data)
        return
    assert pixel_limits(tiny.folder) == ["data.min_pixels=null", "data.max_pixels=null"]
    for limited, named in (
        (data, "`data.min_pixels`, `data.max_pixels`"),
        (replace(data, min_pixels=None), "`data.max_pixels`"),
        (replace(data, max_pixels=DataConfig().max_pixels), "`data.min_pixels`"),
        (SFTDataConfig(min_pixels=784), "`data.min_pixels`"),
    ):
        with pytest.raises(ValueError, match=f"^{named}, without effect on this .*`{sized_by[0][0]}` decide"):
            open_loader(limited)


def test_families_of_one_size_are_refused_a_runs_limits():
    sized = {
        name
        for name in NAMES
        for tiny in [load_tiny(name)]
        if all(tiny.family.sized_by(tiny.processor, kind) for kind in tiny.family.kinds)
    }

    assert sized == {"gemma3_vl", "gemma4", "gemma4_moe"}


def test_limits_have_an_effect_if_they_change_the_tokens_of_images_of_any_shape():
    """With tiles of 448 pixels, only one grid of up to 12 has the shape 2:3, but three are square."""
    tiny = load_tiny("internvl")
    processor = copy.deepcopy(tiny.processor)
    processor.image_processor = type(processor.image_processor)(
        size={"height": 448, "width": 448}, max_patches=12
    )
    tokens = {
        size: len(tiny.family.image_shape(processor, *size).tokens)
        for size in ((64, 96), (1024, 1536), (64, 64), (1024, 1024))
    }

    assert tokens[64, 96] == tokens[1024, 1536]
    assert tokens[64, 64] < tokens[1024, 1024]
    assert tiny.family.sized_by(processor, "image") == ()


@pytest.mark.parametrize("name", READ_VIDEOS)
def test_frames_and_parts_of_a_video_have_an_effect_in_every_family(name, tmp_path):
    loader = loader_of(name)
    path = save_video(tmp_path / "a.mp4", 96, 64, 16, fps=2)  # 8 seconds

    def frames(**options):
        (video,) = loader.decode({"videos": [{"path": path, **options}]}).videos
        return video[1]["frames_indices"]

    assert frames(nframes=4) == [0, 5, 10, 15]
    assert len(frames(fps=1.0)) == 8
    assert frames(nframes=2, video_start=2.0, video_end=4.0) == [4, 8]
    assert tokens_of(loader, "video", {"path": path, "nframes": 4}) < tokens_of(loader, "video", path)


# The tokens of a frame of the tiny models whose frames are tiles.
@pytest.mark.parametrize(("name", "tokens"), [("internvl", 4), ("llava_onevision", 9), ("vila", 4)])
def test_a_frame_of_one_size_takes_no_limit_below_its_tokens(name, tokens):
    loader = loader_of(name)

    assert loader.family.smallest_frame(loader.processor) == tokens
    with pytest.raises(ValueError, match=f"`tokens_per_frame` must be at least {tokens}"):
        loader_of(name, tokens_per_frame=tokens - 1)


class FixedSize(GenericFamily):
    """Images of any size have two tokens."""

    def image_shape(self, processor, height, width):
        return MediumShape([7, 7], {})


def test_what_sets_the_size_is_found_among_the_processors_options():
    images = SimpleNamespace(size={"height": 28, "width": 28}, max_patches=4)

    found = FixedSize().sized_by(SimpleNamespace(image_processor=images), "image")

    assert found == ("max_patches", "size")
