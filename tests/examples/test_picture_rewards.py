# SPDX-License-Identifier: Apache-2.0
"""Shipped reward functions of pictures, on pictures and models that the tests make."""

import asyncio
import base64
import importlib.util
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
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

from examples.quickstart.tiny_pipelines import save_tiny_sd3
from tests.helpers.chat_server import ChatServer, Reply, image_of
from verl.config.reward_servers import RewardServerConfig
from verl.rewards.function import load_reward_function
from verl.rewards.servers import specs_of

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


def module_of(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("shown", "prompt", "expected"),
    [
        ("OPEN\n", 'A door with "open" on it', 1.0),
        ("we are o p e n today", 'A door with "open" on it', 1.0),  # anywhere, without spaces
        ("opan", 'A door with "open" on it', 0.75),  # one of four letters is wrong
        ("open", 'A door with "open late"', 4 / 8),
        ("nothing of it at all", 'A door with "open"', 0.0),
        ("sesame", "A door", 1.0),  # the ground truth
    ],
)
def test_ocr_is_one_minus_the_share_of_wrong_letters(monkeypatch, shown, prompt, expected):
    module = module_of("ocr")
    monkeypatch.setattr(module, "read_text", lambda image: shown)
    row = rows(pictures())[0] | {"prompt": prompt, "ground_truth": "Sesame"}

    assert module.compute_score(row) == {"overall": expected, "accuracy": expected}


def test_ocr_needs_a_text_to_look_for(monkeypatch):
    with pytest.raises(ValueError, match="must have the wanted text in double quotes"):
        module_of("ocr").compute_score(rows(pictures())[0])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "abc", 0), ("ab", "ba", 2)],
)
def test_an_edit_distance_counts_letters_inserted_deleted_and_replaced(one, other, expected):
    assert module_of("ocr").distance(one, other) == module_of("ocr").distance(other, one) == expected


def test_a_judge_sees_the_picture_and_the_prompt(monkeypatch):
    (picture,) = pictures()

    def reply(body):
        seen, question = body["messages"][0]["content"]
        assert image_of(seen).size == (SIZE, SIZE) and "a red picture" in question["text"]
        return Reply("Fine.\nScore: 7")

    with ChatServer(reply) as server:
        servers = specs_of({"judge": RewardServerConfig(url=server.url)})
        function = load_reward_function(f"{FOLDER / 'picture_judge'}.py:compute_score", {}, servers=servers)
        (scores,) = function.score(rows([picture]))

    assert scores == pytest.approx({"overall": 0.7, "score": 0.7, "verdict": 1.0})


class Detector(BaseHTTPRequestHandler):
    """Meets half of the checks of every picture, and all if none is wanted."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        results = []
        for each in body["pictures"]:
            assert Image.open(io.BytesIO(base64.b64decode(each["image"]))).size == (SIZE, SIZE)
            wanted = each["metadata"]["include"]
            results.append({"score": 0.5 if wanted else 1.0, "strict": not wanted})
        answer = json.dumps({"results": results}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def detector(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Detector) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("GENEVAL_URL", f"http://127.0.0.1:{server.server_address[1]}/")
        yield
        server.shutdown()


@pytest.mark.parametrize(("is_strict", "overall"), [(False, [0.5, 1.0]), (True, [0.0, 1.0])])
def test_geneval_asks_an_endpoint_about_the_objects_of_the_rows(detector, is_strict, overall):
    asked = [row | {"metadata": {"tag": "single_object", "include": wanted}} for row, wanted in
             zip(rows(pictures(2)), ([{"class": "dog", "count": 1}], []), strict=True)]  # fmt: skip
    asked[1]["metadata"] = json.dumps(asked[1]["metadata"])  # as some tables have it

    scores = asyncio.run(module_of("geneval").compute_score(asked, is_strict=is_strict))

    assert [one["overall"] for one in scores] == overall
    assert scores[0] == {"overall": overall[0], "score": 0.5, "strict": 0.0}


def test_geneval_names_what_is_missing(detector, monkeypatch):
    with pytest.raises(ValueError, match="a row needs a column `metadata`"):
        asyncio.run(module_of("geneval").compute_score(rows(pictures())))
    monkeypatch.delenv("GENEVAL_URL")
    with pytest.raises(ValueError, match="GENEVAL_URL must be the URL"):
        asyncio.run(module_of("geneval").compute_score(rows(pictures())))


def test_the_aesthetic_rating_is_that_of_the_published_layers(clip_folder, tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    widths, places = (32, 1024, 128, 64, 16, 1), (0, 2, 4, 6, 7)
    weights = {
        f"layers.{place}.{kind}": torch.randn(*size, generator=generator) / size[-1] ** 0.5
        for place, (few, many) in zip(places, pairwise(widths), strict=True)
        for kind, size in (("weight", (many, few)), ("bias", (many,)))
    }
    torch.save(weights, tmp_path / "rating.pth")
    monkeypatch.setenv(CLIP_PATH, str(clip_folder))
    monkeypatch.setenv("AESTHETIC_MODEL_PATH", str(tmp_path / "rating.pth"))
    images = pictures(2)

    scores = load("aesthetic", weight=0.1).score(rows(images))

    model, processor = CLIPModel.from_pretrained(clip_folder), CLIPImageProcessor.from_pretrained(clip_folder)
    whole = [(image * 255).round().byte() for image in images]
    embeds = model.get_image_features(**processor(whole, return_tensors="pt"))
    state = getattr(embeds, "pooler_output", embeds)
    state = state / state.norm(dim=-1, keepdim=True)
    for place in places:
        state = state @ weights[f"layers.{place}.weight"].T + weights[f"layers.{place}.bias"]
    assert [one["rating"] for one in scores] == pytest.approx(state[:, 0].tolist(), rel=1e-4)
    assert [one["overall"] for one in scores] == pytest.approx((0.1 * state[:, 0]).tolist(), rel=1e-4)


def test_the_aesthetic_rating_without_its_files_names_the_variable(clip_folder, monkeypatch):
    monkeypatch.setenv(CLIP_PATH, str(clip_folder))
    monkeypatch.delenv("AESTHETIC_MODEL_PATH", raising=False)
    with pytest.raises(FileNotFoundError, match=r"AESTHETIC_MODEL_PATH .not set. must name a file"):
        load("aesthetic").score(rows(pictures()))
