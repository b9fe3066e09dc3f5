# SPDX-License-Identifier: Apache-2.0
"""What the packed forward says about the whole vocabulary against softmaxes of full padded logits."""

from functools import lru_cache

import pytest
import torch

from tests.equivalence.test_packed_forward import (
    CLIP,
    IMAGE,
    Features,
    as_batch,
    assert_same_gradients,
    load,
    text_rows,
    vision_batch,
)
from verl.models.tiny import save_tiny_model
from verl.workers.packing.forward import PackedForward

TEMPERATURE = 0.8
# A plain model, one with a soft cap, one whose head is not tied, and two that read media.
FAMILIES = ["qwen2", "gemma2", "deepseek", "qwen2_5_vl", "qwen3_vl"]
VISION = ["qwen2_5_vl", "qwen3_vl"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return lru_cache(lambda family, seed: save_tiny_model(root / f"{family}_{seed}", family, seed=seed))


def make_batch(folder, family):
    if family in VISION:
        return vision_batch(folder, [((IMAGE,), 5), ((), 4), ((CLIP, IMAGE), 3)])
    return as_batch(text_rows(((24, 20), (3, 7), (9, 1))))


def padded_log_p(model, batch):
    """Log-probabilities of every word at every response place, (B, R, V)."""
    keys = batch.batch
    positions = keys["position_ids"]
    inputs = {}
    for row in batch.non_tensor_batch["multi_modal_data"]:
        for name, value in row["inputs"] if row else ():
            inputs.setdefault(name, []).append(value)
    logits = model(
        input_ids=keys["input_ids"], attention_mask=keys["attention_mask"], use_cache=False,
        position_ids=positions.transpose(0, 1) if positions.ndim == 3 else positions,
        **{name: torch.cat(values) for name, values in inputs.items()},
    ).logits  # fmt: skip
    response = keys["responses"].shape[1]
    return torch.log_softmax(logits[:, -response - 1 : -1].double() / TEMPERATURE, -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_squares_and_kl_and_the_gradient_of_the_kl_are_those_of_full_logits(folders, family):
    mine, other = folders(family, 0), folders(family, 1)
    batch = make_batch(mine, family)
    mask = batch.batch["loss_mask"]
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
    plain, packed, reference = load(mine, False), load(mine, True), load(other, True)
    forward = PackedForward(packed, Features())
    frozen = PackedForward(reference, Features())

    log_p = padded_log_p(plain, batch)
    log_q = padded_log_p(load(other, False), batch).detach()
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).float() * mask
    squares = log_p.exp().square().sum(-1).float() * mask
    (kl * weights).sum().backward()
    assert kl.max() > 0.1
    for rows in ([1], [2, 0], []):
        result = forward.log_probs(batch[rows], TEMPERATURE, with_sum_squares=True, reference=frozen)
        torch.testing.assert_close(result.kl, kl[rows], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(result.sum_squared_probs, squares[rows], atol=1e-6, rtol=1e-5)
        assert result.entropy is None
        (result.kl * weights[rows]).sum().backward()
    assert_same_gradients(packed, plain)
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_the_kl_from_itself_is_zero_and_does_not_change_other_results(folders):
    folder = folders("qwen2", 0)
    model, batch = load(folder, True), as_batch(text_rows())
    forward = PackedForward(model)
    alone = forward.log_probs(batch, TEMPERATURE, with_entropy=True)

    result = forward.log_probs(batch, TEMPERATURE, with_entropy=True, reference=forward)

    assert result.kl.abs().max() < 1e-6
    assert torch.equal(result.log_probs, alone.log_probs)
    assert torch.equal(result.entropy, alone.entropy)
    assert alone.kl is None and alone.sum_squared_probs is None
