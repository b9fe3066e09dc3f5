# SPDX-License-Identifier: Apache-2.0
"""Sizes from headers, pixels, features and tokens of media, against the models' real processors."""

import io
import os
import pickle
from dataclasses import replace

import av
import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.grids import grids_in, inputs_of
from tests.helpers.media import image_bytes, noise, save_image, save_video
from verl.config.data import DataConfig
from verl.data.media.cache import MediaCache
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions, process_image, resized_size, with_item_options
from verl.data.media.video import SizeOptions, VideoOptions, choose_frames, probe_video, read_video
from verl.data.messages import references
from verl.data.readers import load_processor
from verl.models.tiny import save_tiny_model

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
OPTIONS = MediaOptions(min_pixels=40 * 40, max_pixels=150 * 150, video_fps=2.0)
BY_NUMBER = replace(OPTIONS, max_pixels=10**6, num_video_frames=6, tokens_per_frame=16)
IMAGE_SIZES = [(20, 20), (64, 48), (300, 37), (151, 152), (500, 333), (28, 900)]
VIDEOS = [(64, 48, 16), (200, 100, 9), (330, 32, 40), (48, 48, 1), (32, 64, 3)]


@pytest.fixture(scope="module")
def processors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: load_processor(save_tiny_model(folder / family, family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    images = [save_image(folder / f"{w}x{h}.png", w, h) for w, h in IMAGE_SIZES]
    videos = [save_video(folder / f"{w}x{h}x{n}.mp4", w, h, n) for w, h, n in VIDEOS]
    return {"images": images, "videos": videos}


def prompt_of(processor, media, words="compare"):
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    return words + image * len(media["images"]) + " with " + video * len(media["videos"]) + "?"


def processor_inputs(processor, loader, media):
    """What the whole processor makes of the decoded media: the reference for everything below."""
    decoded = loader.decode(media)
    given = {}
    if decoded.images:
        given["images"] = decoded.images
    if decoded.videos:
        given["videos"] = [frames for frames, _ in decoded.videos]
        given["video_metadata"] = [
            {**meta, "frames_indices": list(meta["frames_indices"])} for _, meta in decoded.videos
        ]
        for meta in given["video_metadata"]:
            del meta["do_sample_frames"]
        given["do_sample_frames"] = False
    text = prompt_of(processor, media)
    return text, processor(text=[text], return_tensors="pt", **given)


@pytest.mark.parametrize("options", [OPTIONS, BY_NUMBER], ids=["fps", "number"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_counted_from_headers_equal_the_processors(family, options, processors, media):
    processor = processors[family]
    loader = MediaLoader(processor, options)

    for one in [{"images": [i], "videos": []} for i in media["images"]] + [
        {"images": [], "videos": [v]} for v in media["videos"]
    ]:
        text, expected = processor_inputs(processor, loader, one)
        raw = processor.tokenizer.encode(text, add_special_tokens=False)
        shape = loader.measure(one)

        assert loader.expand(raw, shape) == expected["input_ids"][0].tolist()
        for kind, shapes in (("image", shape.images), ("video", shape.videos)):
            if shapes:
                assert grids_in(shapes).tolist() == expected[f"{kind}_grid_thw"].tolist()


@pytest.mark.parametrize("options", [OPTIONS, BY_NUMBER], ids=["fps", "number"])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_tokens_of_a_mixed_row_equal_the_whole_processors(family, options, processors, media):
    processor = processors[family]
    loader = MediaLoader(processor, options)
    text, expected = processor_inputs(processor, loader, media)

    shape = loader.shape_of(loader.decode(media))
    features = inputs_of(loader, media)

    raw = processor.tokenizer.encode(text, add_special_tokens=False)
    assert loader.expand(raw, shape) == expected["input_ids"][0].tolist()
    names = {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"}
    assert set(features) == (names | {"second_per_grid_ts"} if family == "qwen2_5_vl" else names)
    for name, value in features.items():
        torch.testing.assert_close(value, torch.as_tensor(expected[name]).to(value.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("options", [OPTIONS, BY_NUMBER], ids=["fps", "number"])
@pytest.mark.parametrize("family", FAMILIES)
def test_options_of_single_items_reach_sizes_pixels_tokens_and_features(family, options, processors, media):
    processor, loader = processors[family], MediaLoader(processors[family], options)
    images = [
        {"path": media["images"][4], "max_pixels": 9000},
        {"path": media["images"][0], "min_pixels": 30000},
        {"bytes": image_bytes(90, 50), "resized_height": 64, "resized_width": 130},
        media["images"][1],
    ]
    videos = [
        {"path": media["videos"][2], "nframes": 4, "max_pixels": 6000},
        {"path": media["videos"][2], "fps": 1.0, "min_frames": 8, "max_frames": 12},
        {"path": media["videos"][0], "video_start": 0.5, "video_end": 1.5, "fps": 4.0},
        {"path": media["videos"][1], "resized_height": 64, "resized_width": 96},
        media["videos"][2],
    ]
    row = {"images": images, "videos": videos}
    text, expected = processor_inputs(processor, loader, row)

    shape, features, decoded = loader.measure(row), inputs_of(loader, row), loader.decode(row)

    raw = processor.tokenizer.encode(text, add_special_tokens=False)
    assert loader.expand(raw, shape) == expected["input_ids"][0].tolist()
    for name, value in features.items():
        torch.testing.assert_close(value, torch.as_tensor(expected[name]).to(value.dtype), rtol=0, atol=0)
    for taken, (frames, meta) in zip((4, 8, 4, None, None), decoded.videos, strict=True):
        assert taken is None or len(frames) == len(meta["frames_indices"]) == taken
    small, large, *_ = (image.width * image.height for image in decoded.images)
    assert small <= 9000 and large >= 0.9 * 30000


def test_a_part_of_a_video_has_its_own_frames_and_rate(processors, tmp_path):
    # At 8 frames a second, 0.5 s to 1.5 s are frames 4 to 12: 9 of 16. Four a second take 4.5 of them, so 4,
    # and a temporal patch of two lasts 2 / (4 / 9 * 8) = 0.5625 s.
    loader = MediaLoader(processors["qwen2_5_vl"], OPTIONS)
    part = {
        "path": save_video(tmp_path / "a.mp4", 64, 48, 16),
        "video_start": 0.5,
        "video_end": 1.5,
        "fps": 4.0,
    }

    ((_, meta),) = loader.decode({"videos": [part]}).videos

    assert (meta["frames_indices"], meta["total_num_frames"]) == ([4, 7, 9, 12], 9)
    assert loader.measure({"videos": [part]}).videos[0].facts["second_per_grid_ts"] == 0.5625
    with pytest.raises(ValueError, match=r"a.mp4 cannot be read: ValueError: Invalid time range"):
        loader.measure({"videos": [part | {"video_start": 9.0, "video_end": 10.0}]})


def test_the_bound_of_an_item_moves_the_other_bound_of_the_run():
    run = SizeOptions(min_pixels=1000, max_pixels=5000)

    def bounds(**item):
        options = with_item_options(run, {"path": "a.png"} | item)
        return options.min_pixels, options.max_pixels

    assert with_item_options(run, "a.png") is run
    assert bounds(max_pixels=400) == (400, 400)
    assert bounds(max_pixels=9000) == (1000, 9000)
    assert bounds(min_pixels=8000) == (8000, 8000)
    assert bounds(min_pixels=10, max_pixels=20) == (10, 20)


def test_an_image_of_a_given_size_is_that_of_qwen_vl_utils(processors, tmp_path):
    from qwen_vl_utils import fetch_image

    path = save_image(tmp_path / "a.png", 151, 152)
    size = {"resized_height": 100, "resized_width": 250}
    loader = MediaLoader(processors["qwen2_vl"], OPTIONS)

    (image,) = loader.decode({"images": [{"path": path} | size]}).images

    expected = fetch_image({"image": path} | size, image_patch_size=14)
    assert image.size == expected.size == (252, 112)  # 9 x 4 merged patches of 28 pixels
    assert np.array_equal(np.asarray(image), np.asarray(expected))


def test_media_without_pixel_bounds_keep_their_size_up_to_the_models_own_bounds(processors, tmp_path):
    # Merged patches are 28 x 28 pixels in Qwen2-VL: 300 x 37 becomes 308 x 28, and 64 x 48 becomes 56 x 56.
    data = DataConfig(min_pixels=None, max_pixels=None)
    loader = MediaLoader(processors["qwen2_vl"], MediaOptions.from_data(data))
    image, video = save_image(tmp_path / "a.png", 300, 37), save_video(tmp_path / "a.mp4", 64, 48, 16)

    decoded = loader.decode({"images": [image], "videos": [video]})

    assert decoded.images[0].size == (300, 37)
    assert decoded.videos[0][0].shape[1:3] == (56, 56)
    shape = loader.measure({"images": [image], "videos": [video]})
    assert grids_in(shape.images).tolist() == [[1, 2, 22]]
    assert grids_in(shape.videos).tolist()[0][1:] == [4, 4]


def test_seconds_of_a_temporal_patch_follow_from_the_sampled_frames(processors, tmp_path):
    # 40 frames at 8 per second are 5 seconds; 2 a second take 10, so a patch of 2 frames lasts 1 second.
    loader = MediaLoader(processors["qwen2_5_vl"], OPTIONS)
    media = {"videos": [save_video(tmp_path / "a.mp4", 64, 48, 40)]}

    assert loader.measure(media).videos[0].facts["second_per_grid_ts"] == 1.0
    assert inputs_of(loader, media)["second_per_grid_ts"].tolist() == [1.0]
    assert loader.measure(media).videos[0].facts["grid_thw"][0] == 5


@pytest.mark.parametrize("family", FAMILIES)
def test_times_follow_from_a_given_number_of_frames_too(family, processors, tmp_path):
    # 40 frames at 8 per second, 4 of them: 0, 13, 26, 39. They are 0.8 a second, so that a patch of 2 lasts
    # 2.5 s; the middles of the patches are (0 + 13) / 2 / 8 = 0.8125 s and (26 + 39) / 2 / 8 = 4.0625 s.
    loader = MediaLoader(processors[family], replace(OPTIONS, num_video_frames=4))
    media = {"videos": [save_video(tmp_path / "a.mp4", 64, 48, 40)]}

    for shape in (loader.measure(media), loader.shape_of(loader.decode(media))):
        assert shape.videos[0].facts["second_per_grid_ts"] == 2.5
        assert shape.videos[0].facts["timestamps"] == [0.8125, 4.0625]
        assert shape.videos[0].facts["grid_thw"][0] == 2


@pytest.mark.parametrize("tokens", [16, 24, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_frame_takes_more_tokens_than_its_budget(family, tokens, processors, tmp_path):
    merged = processors[family].video_processor.merge_size ** 2
    for least in (1, 10**6):
        options = MediaOptions(least, 10**6, num_video_frames=4, tokens_per_frame=tokens)
        loader = MediaLoader(processors[family], options)
        for width, height in [(16, 16), (64, 48), (330, 32), (20, 400), (640, 360)]:
            path = save_video(tmp_path / "a.mp4", width, height, 4)

            ((_, rows, columns),) = grids_in(loader.measure({"videos": [path]}).videos).tolist()
            features = inputs_of(loader, {"videos": [path]})

            assert rows * columns // merged <= tokens, (width, height, least)
            assert features["video_grid_thw"].tolist() == [[2, rows, columns]]


def test_a_budget_that_the_processor_would_exceed_is_refused(processors):
    with pytest.raises(ValueError, match="`tokens_per_frame` must be at least 16 for this model, got 15"):
        MediaLoader(processors["qwen3_vl"], replace(OPTIONS, tokens_per_frame=15))


def test_frames_are_sampled_evenly_with_the_right_content(processors, tmp_path):
    # 16 frames at 8 per second, 2 a second: 4 frames, at 0, 5, 10, 15; frame i is grey 7 i.
    loader = MediaLoader(processors["qwen2_vl"], OPTIONS)

    ((frames, meta),) = loader.decode({"videos": [save_video(tmp_path / "a.mkv", 64, 48, 16)]}).videos

    assert meta["frames_indices"] == [0, 5, 10, 15]
    assert (meta["total_num_frames"], meta["fps"], meta["duration"]) == (16, 8.0, 2.0)
    assert frames.dtype == "uint8" and frames.shape[0] == 4 and frames.shape[3] == 3
    assert [round(float(frame.mean())) for frame in frames] == pytest.approx([0, 35, 70, 105], abs=2)


def test_a_video_in_memory_equals_the_video_on_disk(processors, tmp_path):
    loader = MediaLoader(processors["qwen3_vl"], OPTIONS)
    path = save_video(tmp_path / "a.mp4", 64, 48, 16)
    content = (tmp_path / "a.mp4").read_bytes()

    videos = loader.decode({"videos": [path, {"bytes": content}]}).videos
    from_disk, from_memory = videos

    assert (from_disk[0] == from_memory[0]).all() and from_disk[1] == from_memory[1]


def test_a_container_without_a_frame_count_has_its_packets_counted(tmp_path):
    info = probe_video(save_video(tmp_path / "a.mkv", 64, 48, 11))  # Matroska does not say it

    assert info == (11, 8.0, 64, 48)
    assert choose_frames(info, VideoOptions(1600, 22500, 28)) == [0, 3, 7, 10]


@pytest.mark.parametrize(
    "item",
    [
        {"fps": 2.0},
        {"fps": 1.0, "min_frames": 6},
        {"fps": 8.0, "max_frames": 7},
        {"nframes": 6},
        {"fps": 2.0, "resized_height": 100, "resized_width": 60},
        {"fps": 2.0, "max_pixels": 12000},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(("width", "height", "num_frames"), VIDEOS[:3])
def test_frames_and_their_size_equal_those_of_qwen_vl_utils(
    item, width, height, num_frames, tmp_path, monkeypatch
):
    from qwen_vl_utils import fetch_video

    def read_every_frame(path, **options):
        with av.open(path) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2), None, {"video_fps": 8.0}

    # qwen-vl-utils reads videos by torchcodec, decord, or this function, which torchvision 0.28 has dropped.
    monkeypatch.setattr("torchvision.io.read_video", read_every_frame, raising=False)
    path = save_video(tmp_path / "a.mp4", width, height, num_frames)
    given = {"video": path, "min_pixels": 1600, "max_pixels": 22500} | item

    expected, meta = fetch_video(given, image_patch_size=14, return_video_metadata=True)
    video = read_video(path, with_item_options(VideoOptions(1600, 22500, 28), {"path": path} | item))

    assert video.meta["frames_indices"] == meta["frames_indices"].tolist()
    assert torch.equal(torch.from_numpy(video.frames).permute(0, 3, 1, 2).float(), expected)


def test_images_are_scaled_between_the_limits_and_keep_their_aspect():
    # 200 x 100 has 20,000 pixels; 5,000 is a quarter: half of each side. 10 x 40 to 1,600: twice each side.
    assert resized_size(200, 100, 100, 5000) == (100, 50)
    assert resized_size(10, 40, 1600, 5000) == (20, 80)
    assert resized_size(50, 50, 100, 5000) == (50, 50)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "RGB"])
def test_every_image_becomes_rgb(mode):
    image = process_image(Image.fromarray(noise(50, 40)).convert(mode), resized_size(50, 40, 100, 500))

    assert image.mode == "RGB" and image.width * image.height <= 500


@pytest.mark.parametrize(
    ("dtype", "pixels", "gray"),
    [
        # 16 bits: 65535 / 255 = 257, so that 32896 = 128 * 257 is 128 and 128 rounds to 0, 129 to 1.
        (np.uint16, [0, 128, 129, 257, 32896, 65535], [0, 0, 1, 1, 128, 255]),
        (np.uint16, [0, 100, 200, 200, 200, 200], [0, 0, 1, 1, 1, 1]),
        # Integers: 0 to 255 and 0 to 65535, else from the smallest to the largest: here 20000.
        (np.int32, [0, 1, 2, 254, 255, 255], [0, 1, 2, 254, 255, 255]),
        (np.int32, [0, 1, 257, 256, 32896, 65535], [0, 0, 1, 1, 128, 255]),
        (np.int32, [-10000, 0, 10000, 10000, 5000, 5000], [0, 128, 255, 255, 191, 191]),
        (np.int32, [70000] * 6, [0] * 6),
        # Floats: 0 to 1 too, so that 0.5 is 127.5 and rounds to 128; NaN and inf count as 0.
        (np.float32, [0, 0.5, 1, 0.2, 0, 0], [0, 128, 255, 51, 0, 0]),
        (np.float32, [0, 1.5, 254, 255, 0, 0], [0, 2, 254, 255, 0, 0]),
        (np.float32, [-1, 0, 1, 0.5, np.nan, np.inf], [0, 128, 255, 191, 128, 128]),
    ],
)
def test_images_of_more_than_8_bits_keep_their_range(dtype, pixels, gray, tmp_path):
    image = Image.fromarray(np.array([pixels, pixels], dtype=dtype))
    image.save(tmp_path / "a.tiff")

    with Image.open(tmp_path / "a.tiff") as opened:
        read = process_image(opened, opened.size)
    (png,) = references(image, "image", None)

    assert read.mode == "RGB" and read.size == (6, 2)
    for shown in (read, process_image(Image.open(io.BytesIO(png)), (6, 2))):
        assert np.asarray(shown).tolist() == [[[value] * 3 for value in gray]] * 2


def test_media_are_decoded_once_for_all_processes_that_share_a_cache(processors, tmp_path, monkeypatch):
    path = save_image(tmp_path / "a.png", 64, 48)
    video = save_video(tmp_path / "a.mp4", 64, 48, 8)
    media = {"images": [path, image_bytes(30, 30)], "videos": [video]}
    with pytest.MonkeyPatch.context() as patch:
        cache = MediaCache("decoded-once", owner=True, root=tmp_path)
        first = MediaLoader(processors["qwen2_5_vl"], OPTIONS, cache)
        expected, features = first.decode(media), inputs_of(first, media)
        second = MediaLoader(processors["qwen2_5_vl"], OPTIONS, pickle.loads(pickle.dumps(cache)))
        patch.setattr("verl.data.media.loader.process_image", None)  # decoding again would fail
        patch.setattr("verl.data.media.loader.read_video", None)
        patch.setattr(type(first.processor.image_processor), "__call__", None)

        decoded = second.decode(media)
        for name, value in inputs_of(second, media).items():
            assert torch.equal(value, features[name])

        assert [list(i.getdata()) for i in decoded.images] == [list(i.getdata()) for i in expected.images]
        assert (decoded.videos[0][0] == expected.videos[0][0]).all()
        assert decoded.videos[0][1] == expected.videos[0][1]
    cache.close()


def test_a_file_that_changed_is_decoded_again(processors, tmp_path):
    loader = MediaLoader(processors["qwen2_vl"], OPTIONS)
    path = save_image(tmp_path / "a.png", 64, 48, seed=1)
    before = loader.decode({"images": [path]}).images[0]
    save_image(tmp_path / "a.png", 48, 64, seed=2)

    after = loader.decode({"images": [path]}).images[0]

    assert before.size == (64, 48) and after.size == (48, 64)


def test_decoded_videos_outlive_the_run_in_their_folder(processors, tmp_path):
    options = replace(OPTIONS, cache_dir=str(tmp_path / "frames"))
    media = {"videos": [save_video(tmp_path / "a.mp4", 64, 48, 16)]}
    first = MediaLoader(processors["qwen2_5_vl"], options)
    (frames, meta), shape = first.decode(media).videos[0], first.measure(media)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.data.media.loader.read_video", None)  # decoding again would fail
        patch.setattr("verl.data.media.loader.probe_video", None)

        again = MediaLoader(processors["qwen2_5_vl"], options)

        assert (again.decode(media).videos[0][0] == frames).all() and again.decode(media).videos[0][1] == meta
        assert grids_in(again.measure(media).videos).tolist() == grids_in(shape.videos).tolist()
        others = [
            replace(options, video_fps=4.0),
            replace(options, num_video_frames=4),
            replace(options, tokens_per_frame=16),
            replace(options, max_pixels=10**4),
        ]
        for other in others:
            with pytest.raises(ValueError, match="NoneType"):
                MediaLoader(processors["qwen2_5_vl"], other).decode(media)


def test_a_video_that_changed_on_disk_is_decoded_again_in_a_later_run(processors, tmp_path):
    options = replace(OPTIONS, cache_dir=str(tmp_path / "frames"))
    path = save_video(tmp_path / "a.mp4", 64, 48, 16)
    before = MediaLoader(processors["qwen2_vl"], options).decode({"videos": [path]}).videos[0][0]
    content = (tmp_path / "a.mp4").read_bytes()
    save_video(tmp_path / "a.mp4", 64, 48, 16, seed=1)

    loader = MediaLoader(processors["qwen2_vl"], options)
    after = loader.decode({"videos": [path]}).videos[0][0]
    of_bytes = loader.decode({"videos": [content]}).videos[0][0]

    assert (after != before).any() and (of_bytes == before).all()


def test_a_video_that_changes_while_it_is_read_is_an_error_and_is_not_kept(processors, tmp_path):
    loader = MediaLoader(processors["qwen2_vl"], replace(OPTIONS, cache_dir=str(tmp_path / "frames")))
    path = save_video(tmp_path / "a.mp4", 64, 48, 16)

    def read_and_change(*args):
        os.utime(path, ns=(1, 1))
        return read_video(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.data.media.loader.read_video", read_and_change)
        with pytest.raises(ValueError, match=r"a\.mp4 cannot be read: ValueError: it changed while"):
            loader.decode({"videos": [path]})

    assert not list((tmp_path / "frames").rglob("*.safetensors"))


@pytest.mark.parametrize("method", ["decode", "measure"])
def test_an_unreadable_file_is_named_in_the_error(method, processors, tmp_path):
    loader = MediaLoader(processors["qwen2_vl"], OPTIONS)
    broken = tmp_path / "broken.bin"
    broken.write_bytes(b"no picture at all" * 100)

    for kind, ref, name in (
        ("images", str(broken), "broken.bin"),
        ("videos", str(broken), "broken.bin"),
        ("images", str(tmp_path / "absent.png"), "absent.png"),
        ("videos", str(tmp_path / "absent.mp4"), "absent.mp4"),
        ("images", b"xx", "of 2 bytes"),
    ):
        with pytest.raises(ValueError, match=name):
            getattr(loader, method)({kind: [ref]})


def test_truncated_images_and_videos_do_not_decode(processors, tmp_path):
    loader = MediaLoader(processors["qwen2_vl"], OPTIONS)
    image = tmp_path / "a.png"
    image.write_bytes(image_bytes(200, 200)[:2000])
    video = tmp_path / "a.mkv"
    content = (tmp_path / save_video(tmp_path / "whole.mkv", 64, 48, 40)).read_bytes()
    video.write_bytes(content[: len(content) // 3])

    with pytest.raises(ValueError, match=r"a\.png cannot be read"):
        loader.decode({"images": [str(image)]})
    shorter = loader.decode({"videos": [str(video)]}).videos[0][1]["total_num_frames"]
    assert shorter < 40  # a container that does not announce its length is as long as what is left
