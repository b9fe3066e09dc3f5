# SPDX-License-Identifier: Apache-2.0
"""The packed forward and the fused head against the model's own padded forward, in float32."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoProcessor

from tests.helpers.grids import media_in
from verl.models.hub_names import auto_class
from verl.models.registry import check_model, prepare_model
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto
from verl.workers.packing.forward import PackedForward

TEXT = ["llama", "mistral", "gemma2", "gemma3", "qwen2", "qwen3", "qwen3_moe", "deepseek"]
VISION = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
PROMPT, RESPONSE = 24, 20  # rows of up to 44 tokens: past the tiny models' sliding window of 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return lru_cache(lambda family: save_tiny_model(root / family, family))


def load(folder, prepared):
    """The model on its own, or prepared for packing."""
    config = AutoConfig.from_pretrained(folder)
    model = auto_class(config).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa" if prepared else "eager"
    )
    if prepared:
        prepare_model(model)
    return model


class Features:
    """Stands for the media loader: rows hold their model inputs."""

    processor = None

    def media(self, multi_modal_data):
        return media_in(dict(multi_modal_data["inputs"]))


def as_batch(rows, prompt=PROMPT, response=RESPONSE):
    """Rows of (prompt ids, response ids, positions (4, L) or None, media) as the collector has them."""
    columns = {name: [] for name in ("input_ids", "attention_mask", "position_ids", "responses", "loss_mask")}
    media = np.empty(len(rows), dtype=object)
    for index, (prompt_ids, response_ids, positions, inputs) in enumerate(rows):
        left, right = prompt - len(prompt_ids), response - len(response_ids)
        ids = torch.cat([torch.zeros(left), prompt_ids, response_ids, torch.zeros(right)]).long()
        mask = torch.cat(
            [torch.zeros(left), torch.ones(len(prompt_ids) + len(response_ids)), torch.zeros(right)]
        ).long()
        if positions is None:
            positions = torch.arange(len(prompt_ids) + len(response_ids))
        columns["input_ids"].append(ids)
        columns["attention_mask"].append(mask)
        columns["position_ids"].append(torch.nn.functional.pad(positions, (left, right)))
        columns["responses"].append(ids[prompt:])
        columns["loss_mask"].append(mask[prompt:])
        media[index] = {"inputs": list(inputs.items())} if inputs else None
    return DataProto.from_dict(
        {name: torch.stack(values) for name, values in columns.items()}, {"multi_modal_data": media}
    )


def text_rows(sizes=((24, 20), (3, 7), (9, 1), (10, 20)), vocabulary=300):
    generator = torch.Generator().manual_seed(1)
    return [
        (*(torch.randint(8, vocabulary, (size,), generator=generator) for size in pair), None, None)
        for pair in sizes
    ]


def reference(model, batch, temperature):
    """The model's own forward on padded rows, all logits: log-probs and entropy (B, R)."""
    keys = batch.batch
    positions = keys["position_ids"]
    if positions.ndim == 3:
        positions = positions.transpose(0, 1)
    inputs = {}
    for row in batch.non_tensor_batch["multi_modal_data"]:
        for name, value in row["inputs"] if row else ():
            inputs.setdefault(name, []).append(value)
    logits = model(
        input_ids=keys["input_ids"], attention_mask=keys["attention_mask"], position_ids=positions,
        use_cache=False, **{name: torch.cat(values) for name, values in inputs.items()},
    ).logits  # fmt: skip
    response = keys["responses"].shape[1]
    log_p = torch.log_softmax(logits[:, -response - 1 : -1].float() / temperature, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    mask = keys["loss_mask"]
    return log_p.gather(-1, keys["responses"][..., None])[..., 0] * mask, entropy * mask


def assert_same(folder, batch, temperature=0.8, parts=None):
    """Log-probabilities, entropies and all gradients agree; the packed batch may run in parts."""
    plain, packed = load(folder, False), load(folder, True)
    forward = PackedForward(packed, Features())
    weights = torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))

    expected = reference(plain, batch, temperature)
    (expected[0] * weights + 0.1 * expected[1]).sum().backward()
    for rows in parts or [list(range(len(batch)))]:
        result = forward.log_probs(batch[rows], temperature, with_entropy=True)
        for ours, theirs in zip((result.log_probs, result.entropy), expected, strict=True):
            torch.testing.assert_close(ours, theirs[rows], atol=1e-5, rtol=0)
        (result.log_probs * weights[rows] + 0.1 * result.entropy).sum().backward()
    assert_same_gradients(packed, plain)


def assert_same_gradients(model, other):
    gradients = dict(model.named_parameters())
    difference = size = 0.0
    for name, parameter in other.named_parameters():
        theirs = parameter.grad
        ours = gradients[name].grad
        if theirs is None:
            assert ours is None or not ours.any(), name
            continue
        difference += (ours - theirs).double().square().sum().item()
        size += theirs.double().square().sum().item()
    assert (difference / size) ** 0.5 < 1e-5


def media_row(processor, config, content, response, seed):
    """A row with media: positions by the model's own rule, model inputs by the processor."""
    generator = np.random.default_rng(seed)
    images = [
        Image.fromarray(generator.integers(0, 255, (*size, 3), dtype=np.uint8))
        for kind, size in content
        if kind == "image"
    ]
    videos = [
        generator.integers(0, 255, (*size, 3), dtype=np.uint8) for kind, size in content if kind == "video"
    ]
    marks = {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    }
    text = "".join(marks[kind] for kind, _ in content) + "What colour?"
    options = {}
    if videos:
        options["videos_kwargs"] = {"do_sample_frames": False}
        options["video_metadata"] = [
            {
                "total_num_frames": len(v),
                "fps": 2.0,
                "duration": len(v) / 2,
                "frames_indices": list(range(len(v))),
            }
            for v in videos
        ]
    inputs = processor(
        text=[text], images=images or None, videos=videos or None, return_tensors="pt", **options
    )
    prompt = inputs["input_ids"][0]
    answer = torch.randint(8, 300, (response,), generator=torch.Generator().manual_seed(seed))
    grid = torch.cat([inputs[key] for key in ("image_grid_thw", "video_grid_thw") if key in inputs])
    positions = toy_positions(torch.cat([prompt, answer]), config, grid)
    keys = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    return prompt, answer, positions, {key: inputs[key] for key in keys if key in inputs}


def toy_positions(ids, config, grid):
    """Four rows of positions that differ from each other over media, as M-RoPE's do."""
    text = torch.arange(len(ids))
    is_media = (ids == config.image_token_id) | (ids == config.video_token_id)
    return torch.stack([text, text, text + is_media * (text % 3), text + is_media * (text % 2)])


def vision_batch(folder, contents, prompt=96):
    config, processor = AutoConfig.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    rows = []
    for seed, (content, response) in enumerate(contents):
        if content:
            rows.append(media_row(processor, config, content, response, seed))
        else:
            ids, answer, _, _ = text_rows(((11, response),))[0]
            positions = torch.arange(len(ids) + len(answer)).expand(4, -1)
            rows.append((ids, answer, positions, None))
    return as_batch(rows, prompt=max(prompt, *(len(row[0]) for row in rows)))


IMAGE, WIDE, CLIP = ("image", (64, 64)), ("image", (64, 120)), ("video", (4, 64, 64))


@pytest.mark.parametrize("family", TEXT)
def test_text_models_equal_their_own_padded_forward(folders, family):
    assert_same(folders(family), as_batch(text_rows()))


def test_equally_long_rows_share_one_attention_and_stay_apart(folders):
    assert_same(folders("qwen2"), as_batch(text_rows(((5, 9), (9, 5), (7, 7), (3, 4)))))


def test_gradients_do_not_depend_on_the_split_into_micro_batches(folders):
    assert_same(folders("qwen2"), as_batch(text_rows()), parts=[[2], [0, 3], [], [1]])


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize(
    "contents",
    [
        [((), 5), ((), 9)],
        [((IMAGE,), 5), ((WIDE, IMAGE), 9), ((), 4)],
        [((CLIP,), 5), ((IMAGE, CLIP), 3), ((), 2)],
    ],
    ids=["text", "images", "videos"],
)
def test_vision_models_equal_their_own_padded_forward(folders, family, contents):
    assert_same(folders(family), vision_batch(folders(family), contents))


@pytest.mark.parametrize("family", VISION)
def test_media_and_text_rows_may_be_split_into_any_micro_batches(folders, family):
    batch = vision_batch(folders(family), [((IMAGE,), 5), ((), 4), ((WIDE, CLIP), 3), ((IMAGE,), 6)])

    assert_same(folders(family), batch, parts=[[1], [3, 0], [], [2]])


def test_rows_that_share_an_image_encode_it_once(folders):
    folder = folders("qwen2_5_vl")
    batch = vision_batch(folder, [((IMAGE, WIDE), 5), ((IMAGE,), 4)])
    batch = DataProto.concat([batch, batch])
    model = load(folder, True)
    patches = []
    model.model.visual.register_forward_pre_hook(lambda module, args: patches.append(len(args[0])))
    once, twice = Sharing(), Features()

    shared = PackedForward(model, once).log_probs(batch, 1.0).log_probs
    separate = [PackedForward(model, twice).log_probs(batch[[row]], 1.0).log_probs for row in range(4)]

    assert patches[0] == sum(patches[1:]) // 2
    torch.testing.assert_close(shared, torch.cat(separate), atol=1e-5, rtol=0)


class Sharing(Features):
    """Fails when it is asked twice for the same row."""

    def __init__(self):
        self.seen = []

    def media(self, multi_modal_data):
        assert not any(multi_modal_data is row for row in self.seen)
        self.seen.append(multi_modal_data)
        return super().media(multi_modal_data)


@pytest.mark.parametrize("family", TEXT + VISION)
def test_the_self_check_accepts_the_supported_families(folders, family):
    assert check_model(load(folders(family), True)) < 1e-4


def test_gradient_checkpointing_changes_nothing(folders):
    folder = folders("qwen2_5_vl")
    batch = vision_batch(folder, [((IMAGE,), 5), ((), 4)])
    plain, packed = load(folder, False), load(folder, True)
    packed.gradient_checkpointing_enable({"use_reentrant": False})
    packed.train()

    expected = reference(plain, batch, 1.0)[0]
    expected.sum().backward()
    result = PackedForward(packed, Features()).log_probs(batch, 1.0).log_probs
    result.sum().backward()

    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
    assert_same_gradients(packed, plain)
