# SPDX-License-Identifier: Apache-2.0
"""Rows packed behind one copy of their prompt against the model's own padded forward, in float32."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoProcessor

from tests.equivalence.test_packed_forward import (
    CLIP,
    IMAGE,
    PROMPT,
    WIDE,
    Features,
    as_batch,
    assert_same_gradients,
    load,
    media_row,
    reference,
    text_rows,
    toy_positions,
)
from tests.equivalence.test_scalar_forward import load_scalar
from tests.helpers.closeness import assert_values_close
from verl.models.families.interface import Medium
from verl.models.flops import FlopsCounter, PackedWork
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto
from verl.workers.packing.forward import PackedForward

FAMILIES = ["qwen2", "qwen3", "llama", "qwen3_moe", "mistral", "gemma2", "gemma3"]
VISION = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return lru_cache(lambda family: save_tiny_model(root / family, family))


def responses_to(row, lengths, config=None, seed=0):
    """The prompt of a row with other responses; positions continue the prompt's."""
    prompt, _, positions, media = row
    generator = torch.Generator().manual_seed(100 + seed)
    rows = []
    for length in lengths:
        answer = torch.randint(8, 300, (length,), generator=generator)
        own = None
        if positions is not None:
            grid = [value for name, value in (media or {}).items() if name.endswith("grid_thw")]
            own = toy_positions(torch.cat([prompt, answer]), config, grid)
        rows.append((prompt, answer, own, media))
    return rows


def group_batch(rows_of_groups, prompt=PROMPT):
    """A batch of groups with their uids, rows of different prompts taking turns."""
    rows = [(row, f"u{number}") for number, rows in enumerate(rows_of_groups) for row in rows]
    order = np.random.default_rng(0).permutation(len(rows))
    widest = max(prompt, *(len(row[0]) for row, _ in rows))
    batch = as_batch([rows[index][0] for index in order], prompt=widest)
    uids = np.array([rows[index][1] for index in order], dtype=object)
    return batch.merge(DataProto.from_dict({}, {"uid": uids}))


def text_batch(sizes=((9, (7, 20, 1)), (24, (3,)), (5, (4, 4, 4, 9))), seed=1):
    groups = []
    for number, (prompt, responses) in enumerate(sizes):
        row = text_rows(((prompt, 1),), 300)[0]
        ids = torch.randint(8, 300, (prompt,), generator=torch.Generator().manual_seed(seed + number))
        groups.append(responses_to((ids, *row[1:]), responses, seed=number))
    return group_batch(groups)


def media_batch(folder, contents):
    config, processor = AutoConfig.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    groups = []
    for number, (content, responses) in enumerate(contents):
        if content:
            row = media_row(processor, config, content, 1, number)
        else:
            ids = torch.randint(8, 300, (7,), generator=torch.Generator().manual_seed(number))
            row = (ids, None, torch.zeros(4, 1), None)
        groups.append(responses_to(row, responses, config, seed=number))
    return group_batch(groups, prompt=96)


def assert_same(folder, batch, *, checkpointed=False, parts=None, temperature=0.8):
    """Log-probs, entropies and all gradients of shared prompts are those of the padded forward."""
    plain, packed = load(folder, False), load(folder, True)
    if checkpointed:
        packed.gradient_checkpointing_enable({"use_reentrant": False})
        packed.train()
    forward = PackedForward(packed, Features(), share_prompt=True)
    assert forward.shares_prompts
    lengths = []
    packed.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: lengths.append(args[0].shape[1])
    )
    weights = torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))

    expected = reference(plain, batch, temperature)
    (expected[0] * weights + 0.1 * expected[1]).sum().backward()
    for rows in parts or [list(range(len(batch)))]:
        result = forward.log_probs(batch[rows], temperature, with_entropy=True)
        assert result.entropy is not None
        for ours, theirs in zip((result.log_probs, result.entropy), expected, strict=True):
            torch.testing.assert_close(ours, theirs[rows], atol=1e-5, rtol=0)
        (result.log_probs * weights[rows] + 0.1 * result.entropy).sum().backward()
    assert_same_gradients(packed, plain)
    return lengths


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_models_equal_their_own_padded_forward(folders, family, checkpointed):
    lengths = assert_same(folders(family), text_batch(), checkpointed=checkpointed)

    # Prompts once: 9 + 28, 24 + 3, 5 + 21 tokens.
    assert lengths[0] == 37 + 27 + 26


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize(
    "contents",
    [
        [((), (5, 2)), ((), (9,))],
        [((IMAGE,), (5, 8, 3)), ((WIDE, IMAGE), (9, 9)), ((), (4, 1))],
        [((CLIP,), (5, 2)), ((IMAGE, CLIP), (3,)), ((), (2, 6))],
    ],
    ids=["text", "images", "mixed"],
)
def test_vision_models_equal_their_own_padded_forward(folders, family, contents):
    assert_same(folders(family), media_batch(folders(family), contents))


def test_gradient_checkpointing_changes_nothing_with_images(folders):
    contents = [((IMAGE,), (5, 8)), ((CLIP,), (2, 3)), ((), (2, 6))]

    assert_same(folders("qwen3_vl"), media_batch(folders("qwen3_vl"), contents), checkpointed=True)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
def test_groups_may_be_split_into_any_micro_batches(folders, family):
    if family == "qwen2":
        batch = text_batch()
    else:
        batch = media_batch(folders(family), [((IMAGE,), (5, 8, 3)), ((), (4, 1, 2)), ((CLIP,), (2, 3))])

    assert_same(folders(family), batch, parts=[[6, 0, 1], [], [4, 2, 7], [3, 5]])


def test_a_response_without_tokens_changes_nothing_for_its_group(folders):
    assert_same(folders("qwen2"), text_batch(((9, (0, 7, 5)), (4, (0,)), (6, (3, 0)))))


def test_rows_of_one_uid_with_different_prompts_share_nothing(folders):
    batch = text_batch(((9, (7,)), (9, (20,)), (5, (4, 4))))
    batch.non_tensor_batch["uid"][:] = "same"

    lengths = assert_same(folders("qwen2"), batch)

    # The two rows of five tokens share: 16 + 29 + 5 + 8; whichever row comes first keeps its group.
    leader = int(batch.batch["attention_mask"][0].sum())
    assert lengths[0] == 16 + 29 + (5 + 8 if leader == 9 else 9 + 9)


def test_equal_prompts_of_different_uids_and_rows_without_uid_share_nothing(folders):
    batch = text_batch(((9, (7, 3)),))
    total = int(batch.batch["attention_mask"].sum())
    other = DataProto(batch.batch, {**batch.non_tensor_batch, "uid": np.array(["a", "b"], dtype=object)})
    without = batch.select(non_tensor_batch_keys=["multi_modal_data"])

    assert assert_same(folders("qwen2"), other) == [total]
    assert assert_same(folders("qwen2"), without) == [total]


def test_a_group_shows_its_media_to_the_vision_tower_once(folders):
    folder = folders("qwen2_5_vl")
    batch = media_batch(folder, [((IMAGE, WIDE), (5, 2, 3)), ((IMAGE,), (4, 4))])
    model = load(folder, True)
    seen = []
    model.model.visual.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    grids = {}
    for row, uid in zip(
        batch.non_tensor_batch["multi_modal_data"], batch.non_tensor_batch["uid"], strict=True
    ):
        grids[uid] = dict(row["inputs"])["image_grid_thw"].prod(-1).sum().item()

    PackedForward(model, Features(), share_prompt=True).log_probs(batch, 1.0)

    assert seen == [sum(grids.values())]


def test_what_runs_is_counted_with_prompts_and_media_once(folders):
    folder = folders("qwen2_5_vl")
    batch = media_batch(folder, [((IMAGE,), (5, 2, 3)), ((), (4, 4))])
    model = load(folder, True)
    counter, tower = FlopsCounter(model), FlopsCounter(model).encoders["vision"]
    prompts = (batch.batch["attention_mask"].sum(1) - batch.batch["loss_mask"].sum(1)).tolist()
    uids = batch.non_tensor_batch["uid"].tolist()
    groups = [(prompts[uids.index("u0")], (5, 2, 3)), (prompts[uids.index("u1")], (4, 4))]
    (grid,) = dict(batch.non_tensor_batch["multi_modal_data"][uids.index("u0")]["inputs"])["image_grid_thw"]
    image = Medium("image", {}, {"grid_thw": grid.tolist()})

    forward = PackedForward(model, Features(), share_prompt=True, flops=counter)
    forward.log_probs(batch, 1.0)

    assert tower.is_trained and counter.done == sum(counter.count(PackedWork(groups, 18), [image]))


def test_models_whose_tokens_see_later_ones_do_not_share_prompts(folders, caplog):
    model = load(folders("gemma3"), True)
    model.config.use_bidirectional_attention = True

    with caplog.at_level("WARNING"):
        forward = PackedForward(model, share_prompt=True)

    assert not forward.shares_prompts
    assert "prompts are not shared" in caplog.text and "later tokens" in caplog.text


def test_all_statistics_equal_those_of_separate_rows(folders):
    batch = text_batch().select(non_tensor_batch_keys=["uid"])
    model, other = load(folders("qwen2"), True), load(folders("qwen2"), True)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    shared, packed = (PackedForward(model, share_prompt=share) for share in (True, False))
    reference_model = PackedForward(other, share_prompt=True)

    ours, theirs = (
        forward.log_probs(batch, 0.7, with_entropy=True, with_sum_squares=True, reference=reference_model)
        for forward in (shared, packed)
    )

    assert ours.kl is not None and ours.kl.max() > 0.01
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=0)


def test_values_equal_those_of_separate_rows(folders):
    batch = text_batch(((9, (7, 20, 0)), (5, (4, 4)))).select(non_tensor_batch_keys=["uid"])
    model = load_scalar(folders("qwen2"))
    shared, packed = (PackedForward(model, share_prompt=share) for share in (True, False))

    assert_values_close(shared.values(batch), packed.values(batch))
    assert_values_close(shared.last_values(batch), packed.last_values(batch))
