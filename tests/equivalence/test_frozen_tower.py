# SPDX-License-Identifier: Apache-2.0
"""Features computed once against the vision tower run in every pass, in float32."""

import os
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.equivalence.test_packed_forward import as_batch, load
from tests.equivalence.test_packed_forward_fsdp import sharded
from tests.helpers.distributed import run_distributed
from tests.helpers.media import save_image, save_video
from tests.helpers.nightly import by_day
from verl.data.media.cache import MediaCache
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.readers import load_processor
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.families.mrope import continue_positions
from verl.models.families.registry import family_of
from verl.models.tiny import TINY_MODELS, save_tiny_model
from verl.workers.packing import vision_features as frozen_tower
from verl.workers.packing.forward import PackedForward
from verl.workers.packing.vision_features import FrozenTower, UnitRange, _tower_calls

pytestmark = pytest.mark.heavy

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "glm46v"]
ROWS = [  # media, responses
    (("small.png", "film.mp4"), (3, 5)),
    ((), (2,)),
    (("wide.png", "small.png"), (4, 1)),
    (("long.mp4",), (2,)),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("tower")
    for family in FAMILIES:
        save_tiny_model(root / family, family)
    save_image(root / "small.png", 60, 70, seed=1)
    save_image(root / "wide.png", 140, 60, seed=2)
    save_video(root / "film.mp4", 64, 64, 8, seed=3)
    save_video(root / "long.mp4", 96, 64, 16, seed=4)
    return root


def loader_for(folder, cache=None):
    processor = load_processor(str(folder))
    return MediaLoader(processor, MediaOptions(28 * 28, 84 * 84, video_fps=2.0), cache or MediaCache(None))


def row_of(root, loader, config, names, response, seed):
    media = {"images": [str(root / name) for name in names if name.endswith("png")]}
    media["videos"] = [str(root / name) for name in names if name.endswith("mp4")]
    tokenizer, shape = loader.processor.tokenizer, loader.measure(media)
    recipe = TINY_MODELS[config.model_type]
    marks = "".join(getattr(recipe, kind) for kind in kinds_of(media))
    prompt = loader.expand(tokenizer.encode(f"{marks}What colour?"), shape)
    positions = family_of(config).positions(config, torch.tensor(prompt), shape)  # (4, P)
    positions = torch.cat([positions, continue_positions(positions[:, -1], response)], 1)
    answer = torch.randint(8, 300, (response,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(prompt), answer, positions, {}, media


def kinds_of(media):
    return ["image"] * len(media["images"]) + ["video"] * len(media["videos"])


def batch_of(root, family, config, loader):
    """Responses to four prompts: with an image and a video, text alone, two images, a longer video."""
    rows, media, uids = [], [], []
    for number, (names, lengths) in enumerate(ROWS):
        for index, length in enumerate(lengths):
            *row, own = row_of(root, loader, config, names, length, seed=10 * number + index)
            rows.append(tuple(row))
            media.append(own)
            uids.append(f"u{number}")
    batch = as_batch(rows, prompt=max(len(row[0]) for row in rows), response=5)
    return type(batch)(
        batch.batch, {"multi_modal_data": np.array(media, object), "uid": np.array(uids, object)}, {}
    )


def patches_seen(model):
    """A list that gets the number of patches of each call of the vision tower."""
    seen = []

    def count(module, args, kwargs):
        seen.append(len(args[0] if args else kwargs["hidden_states"]))

    model.model.visual.register_forward_pre_hook(count, with_kwargs=True)
    return seen


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def tower_of(model, loader, **options):
    return FrozenTower(model, loader, "cpu", torch.float32, **options)


@pytest.mark.parametrize("family", by_day(FAMILIES, "qwen2_5_vl", paths=["verl/models", "verl/workers"]))
@pytest.mark.parametrize("share_prompt", [False, True], ids=["apart", "shared"])
def test_log_probs_and_gradients_are_those_of_a_tower_run_in_every_pass(root, family, share_prompt):
    model, loader = load(root / family, True), loader_for(root / family)
    model.model.visual.requires_grad_(False)
    batch = batch_of(root, family, model.config, loader)
    tower = tower_of(model, loader)
    media = batch.non_tensor_batch["multi_modal_data"]
    found = {}
    for name, held in (("every pass", None), ("once", tower)):
        forward = PackedForward(model, loader, share_prompt=share_prompt, tower=held)
        model.zero_grad()
        if held is None:
            result = forward.log_probs(batch, 0.8).log_probs
        else:
            with held.holding(media):
                seen = patches_seen(model)
                result = forward.log_probs(batch, 0.8).log_probs
                assert not seen
        result.square().sum().backward()
        found[name] = result.detach(), gradients(model)
    (expected, expected_gradients), (log_probs, own_gradients) = found.values()
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
    assert own_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert (own_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


def test_a_medium_is_encoded_once(root):
    model, loader = load(root / "qwen3_vl", True), loader_for(root / "qwen3_vl")
    tower, seen = tower_of(model, loader), patches_seen(model)
    rows = batch_of(root, "qwen3_vl", model.config, loader).non_tensor_batch["multi_modal_data"]

    assert tower.known(rows[0]) is None
    first = tower.encode(rows)
    again = tower.encode(rows)

    assert tower.known(rows[0]) is not None
    assert tower.num_encoded == 4, "small.png is in two prompts"
    assert len(seen) == 1, "all four in one call"
    assert first.keys() == again.keys()
    other = tower_of(load(root / "qwen3_vl", True), loader)
    other.encode(rows)
    assert other.num_encoded == 0, "a model with the same tower finds what this one computed"


def test_features_depend_on_the_tower_the_file_and_the_options(root, tmp_path):
    model, loader = load(root / "qwen2_5_vl", True), loader_for(root / "qwen2_5_vl")
    path = save_image(tmp_path / "image.png", 60, 60, seed=1)
    tower = tower_of(model, loader, folder=str(tmp_path / "features"))
    (before,) = tower.encode([{"images": [path]}]).values()

    save_image(tmp_path / "image.png", 60, 60, seed=2)
    os.utime(path, ns=(1, 1))
    (changed,) = tower.encode([{"images": [path]}]).values()
    assert not torch.equal(before.tensors["features"], changed.tensors["features"])

    with torch.no_grad():
        model.model.visual.patch_embed.proj.weight.mul_(1.5)
    tower.forget()
    (trained,) = tower.encode([{"images": [path]}]).values()
    assert not torch.equal(changed.tensors["features"], trained.tensors["features"])
    assert tower.num_encoded == 3


def test_features_in_a_folder_are_found_by_a_later_run(root, tmp_path):
    model, rows = load(root / "qwen3_vl", True), [{"images": [str(root / "wide.png")]}]
    runs = [tower_of(model, loader_for(root / "qwen3_vl"), folder=str(tmp_path)) for _ in range(2)]
    first, second = (run.encode(rows) for run in runs)

    assert [run.num_encoded for run in runs] == [1, 0]
    for key, entry in first.items():
        for name, tensor in entry.tensors.items():
            assert torch.equal(tensor, second[key].tensors[name])


def test_long_videos_are_encoded_in_several_calls(root, monkeypatch):
    model = load(root / "qwen2_5_vl", True)
    rows = [{"images": [str(root / "small.png")], "videos": [str(root / "long.mp4")]}]
    (whole, whole_video) = tower_of(model, loader_for(root / "qwen2_5_vl")).encode(rows).values()
    monkeypatch.setattr(frozen_tower, "FEATURES_AT_ONCE", 8)
    seen = patches_seen(model)
    (parts, video_parts) = tower_of(model, loader_for(root / "qwen2_5_vl")).encode(rows).values()

    assert len(seen) > 2 and max(seen) <= 32
    torch.testing.assert_close(parts.tensors["features"], whole.tensors["features"], atol=1e-6, rtol=0)
    torch.testing.assert_close(
        video_parts.tensors["features"], whole_video.tensors["features"], atol=1e-6, rtol=0
    )


def test_calls_of_the_tower_take_whole_frames_up_to_the_limit():
    # An image of 4 features, 3 frames of 5, an image of 20 that alone is over the limit of 10, one of 2.
    units = {"a": [4], "b": [5, 5, 5], "c": [20], "d": [2]}

    assert _tower_calls(units, 10) == [
        [UnitRange("a", 0, 1, True), UnitRange("b", 0, 1, False)],
        [UnitRange("b", 1, 3, True)],
        [UnitRange("c", 0, 1, True)],
        [UnitRange("d", 0, 1, True)],
    ]
    assert _tower_calls({}, 10) == []


def on_ranks(rank, world_size, root, run_id, sp_size):
    """Two FSDP ranks: with other rows, or with the same rows whose work they share."""
    sp = SequenceParallel.build(sp_size, 1)
    family = "qwen3_vl"
    plain, model = load(root / family, True), sharded(root / family)
    loader = loader_for(root / family, MediaCache(run_id))
    batch = batch_of(root, family, plain.config, loader)
    rows = list(range(len(batch))) if sp_size > 1 else [[2], [0, 1, 3, 4, 5]][rank]
    own = batch[rows]
    media = own.non_tensor_batch["multi_modal_data"]
    tower = tower_of(model, loader, sp=sp)
    forward = PackedForward(model, loader, sp=sp, tower=tower, share_prompt=True)
    with torch.no_grad():
        expected = PackedForward(plain, loader).log_probs(own, 1.0).log_probs
        seen = patches_seen(model)
        tower.encode(media)
        encoding = list(seen)
        with tower.holding(media):
            found = forward.log_probs(own, 1.0).log_probs
    dist.barrier()
    return (found - expected).abs().max().item(), encoding, seen[len(encoding) :], tower.num_encoded


@pytest.mark.parametrize("sp_size", by_day([1, 2], 1), ids=["other rows", "the same rows"])
def test_two_ranks_encode_missing_media_and_then_run_no_tower(root, sp_size, tmp_path):
    cache = MediaCache(f"frozen-tower-{os.getpid()}-{sp_size}", owner=True)
    try:
        ranks = run_distributed(partial(on_ranks), 2, root, cache.run_id, sp_size)
    finally:
        cache.close()
    for error, encoding, later, _ in ranks:
        assert error < 1e-5
        assert len(encoding) == 1, "a rank without media runs the tower too"
        assert not later
    assert [num_encoded for *_, num_encoded in ranks] == ([0, 4] if sp_size == 1 else [4, 4])
    if sp_size == 2:
        patches = [sum(encoding) for _, encoding, *_ in ranks]
        assert max(patches) < 0.75 * sum(patches), "the frames are spread"
