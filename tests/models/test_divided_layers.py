# SPDX-License-Identifier: Apache-2.0
"""Models that tensor parallelism would not divide, or would compute otherwise, are refused by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.causal_families import FAMILIES, SMALL
from verl.models import divided_layers
from verl.models.divided_layers import TESTED, check_divides

OPTION = "worker.actor.fsdp.tensor_parallel_size"


def empty(name):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL | FAMILIES[name]))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", "whose embedding is a Gemma2TextScaledWordEmbedding"),
        ("apertus", "whose plan lacks `model.layers.0.mlp.act_fn.alpha_p`"),
        ("olmo2", "whose plan has colwise_gather_output, rowwise_split_input"),
        ("nemotron", "whose plan has no layers"),
    ],
)
def test_a_part_without_a_known_division_is_named(monkeypatch, name, reason):
    model = empty(name)
    with pytest.raises(ValueError, match=rf"`{OPTION}` \(2\) must be 1 for {type(model).__name__}"):
        check_divides(model, 2, OPTION)

    monkeypatch.setattr(divided_layers, "TESTED", (name,))

    with pytest.raises(ValueError, match=reason):
        check_divides(model, 2, OPTION)


@pytest.mark.parametrize("name", TESTED)
def test_a_listed_type_can_be_divided(name):
    check_divides(empty(name), 2, OPTION)
