# SPDX-License-Identifier: Apache-2.0
"""Causal language models of transformers, packed and with shared prompts, against their own padded forward.

`docs/models.md` has a row for each model here.
"""

import re
from pathlib import Path

import pytest
import torch

from tests.equivalence.test_packed_forward import reference
from tests.equivalence.test_shared_prompts import text_batch
from tests.helpers.causal_families import EVERY_TIME, FAMILIES, REFUSED, build_family
from tests.helpers.nightly import by_day
from verl.models.registry import check_model, prepare_model
from verl.workers.packing.forward import PackedForward

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
LOG_PROBS, GRADIENTS = 1e-5, 1e-5  # the largest difference, and that of all gradients relative to their norm


def differences(model_type: str, overrides: dict) -> dict[str, float]:
    """Differences of log-probs and gradients, of packed rows and of shared prompts."""
    batch = text_batch()
    weights = torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))
    plain, packed = (build_family(model_type, overrides) for _ in range(2))
    prepare_model(packed)
    expected = reference(plain, batch, 1.0)[0]
    (expected * weights).sum().backward()
    exact = {name: parameter.grad for name, parameter in plain.named_parameters()}
    batch = batch.select(non_tensor_batch_keys=["uid"])
    found = {}
    for name, share in {"packed": False, "shared": True}.items():
        packed.zero_grad()
        forward = PackedForward(packed, share_prompt=share)
        assert forward.shares_prompts == share
        ours = forward.log_probs(batch, 1.0).log_probs
        (ours * weights).sum().backward()
        found[name] = (ours - expected).abs().max().item()
        found[f"{name} gradients"] = gradient_difference(packed, exact)
    return found


def gradient_difference(model: torch.nn.Module, exact: dict[str, torch.Tensor | None]) -> float:
    difference = size = 0.0
    for name, parameter in model.named_parameters():
        theirs = exact[name]
        if theirs is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        ours = torch.zeros_like(theirs) if parameter.grad is None else parameter.grad
        difference += (ours - theirs).double().square().sum().item()
        size += theirs.double().square().sum().item()
    return (difference / size) ** 0.5


@pytest.mark.parametrize("model_type", by_day(FAMILIES, *EVERY_TIME, paths=["verl/models"]))
def test_packed_rows_and_shared_prompts_equal_the_models_own_padded_forward(model_type):
    found = differences(model_type, FAMILIES[model_type])

    assert max(found["packed"], found["shared"]) <= LOG_PROBS, found
    assert max(found["packed gradients"], found["shared gradients"]) <= GRADIENTS, found


@pytest.mark.parametrize("model_type", REFUSED)
def test_models_that_cannot_be_packed_are_refused_with_the_reason(model_type):
    overrides, reason = REFUSED[model_type]
    model = build_family(model_type, overrides)

    with pytest.raises(NotImplementedError, match=reason):
        prepare_model(model)
        check_model(model)


def documented() -> dict[str, list[str]]:
    """The cells of each row of the table of text models, by model type."""
    text = DOCUMENT.read_text().split("## Text models", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_the_documentation_has_a_row_for_each_model():
    rows = documented()

    assert sorted(rows) == sorted([*FAMILIES, *REFUSED])
    assert len(FAMILIES) >= 28
    for model_type, (works, difference) in rows.items():
        if model_type in FAMILIES:
            assert works == "yes" and re.fullmatch(r"\de-\d", difference), model_type
            assert float(difference) <= LOG_PROBS, model_type
        else:
            assert works.startswith("no: ") and difference == "", model_type
