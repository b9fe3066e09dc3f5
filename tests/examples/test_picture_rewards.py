# SPDX-License-Identifier: Apache-2.0
"""Shipped reward functions of pictures, on pictures and models that the tests make."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextConfig,
    CLIPTokenizer,
    CLIPVisionConfig,
)

from verl.diffusion.tiny import save_tiny_sd3
from verl.rewards.function import load_reward_function

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = EXAMPLES / "reward_function"
QUICKSTART = EXAMPLES / "quickstart"
CLIP_PATH = "CLIP_MODEL_PATH"
PROMPTS = ["a red picture", "the color blue", "a"]
SIZE = 32  # pixels of what the tiny CLIP sees


def load(name, **kwargs):
    return load_reward_function(f"{FOLDER / name}.py:compute_score", kwargs)


def pictures(count=1, size=SIZE):
    return list(torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0)))


def rows(images):
    return [
        {"response": "", "ground_truth": None, "prompt": prompt, "images": image, "response_length": 0}
        for prompt, image in zip(PROMPTS, images, strict=False)
    ]


def test_jpeg_size_is_minus_the_kilobytes_of_the_file_that_pillow_writes():
    (picture,) = pictures()
    array = (picture * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(array).save(file := io.BytesIO(), format="JPEG", quality=95)

    (scores,) = load("jpeg_size").score(rows([picture]))

    size = len(file.getvalue()) / 1000
    assert scores == pytest.approx({"overall": -size, "kilobytes": size})


def test_jpeg_size_prefers_what_compresses_well_and_the_opposite_with_a_negative_weight():
    images = [torch.full((3, SIZE, SIZE), 0.5), *pictures()]

    small, large = (
        [each["overall"] for each in load("jpeg_size", weight=weight).score(rows(images))]
        for weight in (1.0, -1.0)
    )

    assert small[0] > small[1]
    assert large == [-each for each in small]


def test_a_lower_quality_makes_a_smaller_jpeg():
    fine, coarse = (load("jpeg_size", quality=quality).score(rows(pictures()))[0] for quality in (95, 20))

    assert coarse["kilobytes"] < fine["kilobytes"]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """A CLIP with random weights, that reads the words of the tiny Stable Diffusion 3."""
    folder = tmp_path_factory.mktemp("clip")
    words = save_tiny_sd3(tmp_path_factory.mktemp("sd3")) / "tokenizer"
    tokenizer = CLIPTokenizer.from_pretrained(words)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes: dict[str, Any] = dict(zip(names, (32, 64, 2, 2), strict=True))
    text = CLIPTextConfig(
        vocab_size=len(tokenizer), max_position_embeddings=16, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **sizes,
    )  # fmt: skip
    vision = CLIPVisionConfig(image_size=SIZE, patch_size=8, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CLIPModel(
            CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=32)
        )
    size = {"shortest_edge": SIZE}
    processor = CLIPImageProcessor(size=size, crop_size={"height": SIZE, "width": SIZE})
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)
    return folder


def test_clip_score_is_the_cosine_of_the_models_own_embeddings(clip_folder, monkeypatch):
    monkeypatch.setenv(CLIP_PATH, str(clip_folder))
    images = pictures(3)
    model = CLIPModel.from_pretrained(clip_folder).eval()
    tokenizer, processor = CLIPTokenizer.from_pretrained(clip_folder), CLIPImageProcessor()
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (processor.image_mean, processor.image_std))

    scores = load("clip_score", weight=100.0).score(rows(images))

    for score, image, prompt in zip(scores, images, PROMPTS, strict=True):
        inputs: Any = ((image - mean) / std)[None]
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():  # one by one; the picture has the size that the model sees
            read: Any = model.get_text_features(ids)
            seen: Any = model.get_image_features(pixel_values=inputs)
        expected = float(torch.cosine_similarity(read.pooler_output, seen.pooler_output))
        assert score["cosine"] == pytest.approx(expected, abs=1e-5)
        assert score["overall"] == pytest.approx(100 * expected, abs=1e-3)


def test_clip_score_cuts_prompts_that_are_longer_than_the_model_reads(clip_folder, monkeypatch):
    monkeypatch.setenv(CLIP_PATH, str(clip_folder))
    (image,) = pictures()
    words = ["red"] * 14  # and the first and the last token

    scores = [load("clip_score").score([row | {"prompt": " ".join(words + more)}])[0]
              for row in rows([image]) for more in ([], ["blue"] * 9)]  # fmt: skip

    assert scores[0] == pytest.approx(scores[1], abs=1e-6)


def test_clip_score_without_a_model_names_the_variable(monkeypatch):
    monkeypatch.delenv(CLIP_PATH, raising=False)

    with pytest.raises(Exception, match=f"{CLIP_PATH} .not set. must name a folder"):
        load("clip_score").score(rows(pictures()))


def test_a_video_has_the_mean_score_of_its_frames(clip_folder, monkeypatch):
    monkeypatch.setenv(CLIP_PATH, str(clip_folder))
    frames = pictures(5)
    row = {"response": "", "ground_truth": None, "prompt": "a", "response_length": 0}
    chosen = {"jpeg_size": (0, 1, 2, 3, 4), "clip_score": (0, 2, 4)}

    for name, numbers in chosen.items():
        kwargs = {"num_frames": 3} if name == "clip_score" else {}
        (found,) = load(name, **kwargs).score([row | {"videos": torch.stack(frames)}])

        single = [load(name).score([row | {"images": frames[number]}])[0] for number in numbers]
        expected = {key: sum(each[key] for each in single) / len(single) for key in found}
        assert found == pytest.approx(expected, abs=1e-5)


def test_the_reward_of_the_quickstart_compares_each_frame_of_a_video():
    reward = load_reward_function(f"{QUICKSTART / 'painting_reward.py'}:compute_score", {})
    red, green = (torch.tensor(color).view(3, 1, 1) / 255 for color in ((220, 40, 40), (40, 170, 60)))
    video = torch.stack([red.expand(3, 4, 4)] * 3 + [green.expand(3, 4, 4)])

    (scores,) = reward.score([{"videos": video, "ground_truth": "red", "response": ""}])

    assert scores == pytest.approx({"overall": 1 - (180 + 130 + 20) / 3 / 255 / 4, "accuracy": 1.0}, abs=1e-6)


@pytest.mark.parametrize(
    ("color", "overall", "accuracy"),
    [
        ((220, 40, 40), 1.0, 1.0),  # the quickstart's red
        ((40, 170, 60), 1 - (180 + 130 + 20) / 3 / 255, 0.0),  # its green
        ((255, 255, 255), 1 - (35 + 215 + 215) / 3 / 255, 0.0),  # white is nearer to yellow
        ((255, 0, 0), 1 - (35 + 40 + 40) / 3 / 255, 1.0),
    ],
)
def test_the_reward_of_the_quickstart_is_the_nearness_of_the_mean_color(color, overall, accuracy):
    reward = load_reward_function(f"{QUICKSTART / 'painting_reward.py'}:compute_score", {})
    mean = torch.tensor(color).view(3, 1, 1) / 255
    stripes = torch.tensor([0.1, -0.1, 0.1, -0.1]).view(1, 1, 4).expand(3, 4, 4)  # leave the mean as it is

    (scores,) = reward.score([{"images": mean + stripes, "ground_truth": "red", "response": ""}])

    assert scores == pytest.approx({"overall": overall, "accuracy": accuracy}, abs=1e-6)
