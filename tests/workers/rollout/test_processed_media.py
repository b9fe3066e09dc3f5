# SPDX-License-Identifier: Apache-2.0
"""Images and videos that are processed once for the engine and the trainer."""

import gc
from pathlib import Path

import pytest
import torch
from transformers.video_utils import VideoMetadata

from tests.helpers.families import load_tiny
from tests.helpers.films import save_film
from tests.workers.rollout.media import picture
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.models.auto import AutoProcessor
from verl.workers.rollout.processed_media import ProcessedMedia

KINDS = ("qwen2_5_vl", "qwen3_vl", "internvl", "gemma3_vl", "llava_onevision", "mistral3", "glm4v")


def new_loader(tiny):
    return MediaLoader(AutoProcessor.from_pretrained(tiny.folder), MediaOptions(1, 1 << 20))


def saved(folder, seed, height=60, width=90):
    path = folder / f"{seed}.png"
    picture(seed, height, width).save(path)
    return str(path)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == found[name].dtype and torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_and_the_engine_get_what_each_would_have_processed(kind, counts, tmp_path):
    tiny, plain = load_tiny(kind), AutoProcessor.from_pretrained(load_tiny(kind).folder)
    loader = new_loader(tiny)
    media = ProcessedMedia(loader)
    row = {"images": [saved(tmp_path, 1), saved(tmp_path, 2), saved(tmp_path, 3, 120, 60)]}

    images = media.decode(row).images
    for given in (images[:1], images[:2], images):
        found = loader.processor.image_processor(images=given, return_tensors="pt")
        assert_equal(found, plain.image_processor(given, return_tensors="pt"))

    expected = new_loader(tiny).media(row)
    counts.clear()
    for found, each in zip(loader.media(row), expected, strict=True):
        assert found.kind == each.kind and found.facts == each.facts
        assert_equal(found.tensors, each.tensors)
    assert not counts


def test_an_image_is_processed_once_while_it_is_held_within_the_bytes(counts, tmp_path):
    loader = new_loader(load_tiny("qwen2_5_vl"))
    rows = [{"images": [saved(tmp_path, seed)]} for seed in range(3)]
    one = 24 * 1176 * 4 + 3 * 8  # bytes: 4 x 6 patches of 3 x 2 x 14 x 14 float32, a grid of three int64
    media = ProcessedMedia(loader, max_bytes=2 * one)

    held = [media.decode(row) for row in rows[:2]]
    assert media.outputs.size == 2 * one
    media.decode(rows[0])
    assert counts["images"] == 2
    held.append(media.decode(rows[2]))  # the second has not been read for longest
    assert media.outputs.size == 2 * one and counts["images"] == 3
    media.decode(rows[0])
    assert counts["images"] == 3
    media.decode(rows[1])
    assert counts["images"] == 4

    del held
    gc.collect()
    assert media.outputs.size == 0


def test_parts_of_an_image_have_their_own_outputs(tmp_path):
    loader, plain = (
        new_loader(load_tiny("qwen2_5_vl")),
        AutoProcessor.from_pretrained(load_tiny("qwen2_5_vl").folder),
    )
    [image] = ProcessedMedia(loader).decode({"images": [saved(tmp_path, 1, 56, 112)]}).images
    parts = [image.crop((left, 0, left + 56, 56)) for left in (0, 56)]
    assert not torch.equal(*(torch.tensor(list(part.getdata())) for part in parts))

    for given in ([part] for part in parts):
        found = loader.processor.image_processor(images=given, return_tensors="pt")
        assert_equal(found, plain.image_processor(given, return_tensors="pt"))


def test_threads_that_ask_at_once_share_one_call(counts, tmp_path):
    media = ProcessedMedia(new_loader(load_tiny("qwen2_5_vl")))
    row = {"images": [saved(tmp_path, 1)]}

    pending = [media.begin(row) for _ in range(4)]
    started = [each.start() for each in pending]
    images = [each.result().images[0] for each in started]

    assert all(image is images[0] for image in images)
    assert counts["images"] == 1


def test_a_video_is_processed_once_for_the_engine_with_its_metadata(counts, tmp_path):
    loader = new_loader(load_tiny("qwen2_5_vl"))
    plain = AutoProcessor.from_pretrained(load_tiny("qwen2_5_vl").folder).video_processor
    row = {"videos": [save_film(tmp_path / "film.mp4", "mpeg4", 24, 12)]}
    [(frames, meta)] = ProcessedMedia(loader).decode(row).videos
    known = {name: value for name, value in meta.items() if name != "do_sample_frames"}
    options = {"video_metadata": [VideoMetadata(**known)], "do_sample_frames": False, "return_tensors": "pt"}
    options["return_metadata"] = True
    counts.clear()

    found = loader.processor.video_processor([frames], **options)

    assert not counts
    assert_equal(found, plain([frames], **options))


def test_an_error_names_the_file_and_is_not_kept(tmp_path):
    media = ProcessedMedia(new_loader(load_tiny("qwen2_5_vl")))
    path = Path(saved(tmp_path, 1, 2, 1000))  # too narrow for the model
    with pytest.raises(ValueError, match=r"the image .*1\.png cannot be read"):
        media.decode({"images": [str(path)]})

    saved(tmp_path, 1)
    assert len(media.decode({"images": [str(path)]}).images) == 1
