# SPDX-License-Identifier: Apache-2.0
"""Values of packed scalar models against hidden states of the plain padded model times the score."""

from functools import lru_cache

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.equivalence.test_packed_forward import (
    CLIP,
    IMAGE,
    TEXT,
    VISION,
    WIDE,
    Features,
    as_batch,
    assert_same_gradients,
    load,
    text_rows,
    vision_batch,
)
from tests.helpers.closeness import assert_values_close
from verl.models.hub_names import HubNames, auto_class
from verl.models.registry import check_model, prepare_model
from verl.models.scalar_head import make_scalar
from verl.models.tiny import save_tiny_model
from verl.workers.packing.forward import PackedForward


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return lru_cache(lambda family: save_tiny_model(root / family, family))


def load_scalar(folder, has_bias=False):
    """The folder's model with a score of random weights, prepared for packing."""
    config = AutoConfig.from_pretrained(folder)
    make_scalar(config, has_bias=has_bias)
    model = auto_class(config).from_pretrained(folder, config=config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    prepare_model(model)
    return model


class PlainScalar(nn.Module):
    """A score on the last hidden states of transformers' own model, padded rows and all."""

    def __init__(self, folder, score):
        super().__init__()
        self.model = load(folder, False).model
        self.score = nn.Linear(score.in_features, 1, bias=score.bias is not None)
        self.score.load_state_dict(score.state_dict())

    def forward(self, batch):
        keys = batch.batch
        positions = keys["position_ids"]
        inputs = {}
        for row in batch.non_tensor_batch["multi_modal_data"]:
            for name, value in row["inputs"] if row else ():
                inputs.setdefault(name, []).append(value)
        hidden = self.model(
            input_ids=keys["input_ids"], attention_mask=keys["attention_mask"], use_cache=False,
            position_ids=positions.transpose(0, 1) if positions.ndim == 3 else positions,
            **{name: torch.cat(values) for name, values in inputs.items()},
        ).last_hidden_state  # fmt: skip
        return self.score(hidden)[..., 0]  # (B, T): at every token


def expected_values(everywhere, batch):
    """(B, R): one place to the left of each response token."""
    response = batch.batch["responses"].shape[1]
    return everywhere[:, -response - 1 : -1] * batch.batch["loss_mask"]


def expected_last_values(everywhere, batch):
    """(B,): the index of the last one in each row of the mask."""
    last = [int(mask.nonzero().max()) for mask in batch.batch["attention_mask"]]
    return torch.stack([row[place] for row, place in zip(everywhere, last, strict=True)])


def assert_same(folder, batch, parts=None, has_bias=False):
    packed = load_scalar(folder, has_bias)
    plain = PlainScalar(folder, packed.score)
    forward = PackedForward(packed, Features())
    weights = torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))

    everywhere = plain(batch)
    values, last = expected_values(everywhere, batch), expected_last_values(everywhere, batch)
    ((values * weights).sum() + (last * weights[:, 0]).sum()).backward()
    assert values.std() > 0.1
    for rows in parts or [list(range(len(batch)))]:
        ours, ours_last = forward.values(batch[rows]), forward.last_values(batch[rows])
        assert_values_close(ours, values[rows])
        assert_values_close(ours_last, last[rows])
        assert ours.dtype == ours_last.dtype == torch.float32
        assert not ours[batch[rows].batch["loss_mask"] == 0].any()
        ((ours * weights[rows]).sum() + (ours_last * weights[rows, 0]).sum()).backward()
    assert_same_gradients(packed, plain)


@pytest.mark.parametrize("family", TEXT)
def test_text_models_equal_a_score_on_their_own_hidden_states(folders, family):
    assert_same(folders(family), as_batch(text_rows()))


def classified(model, batch):
    """(B,) scores of a sequence classifier, which looks for the last id that is not padding's, 0."""
    keys = ("input_ids", "attention_mask", "position_ids")
    with torch.no_grad():
        return model.eval()(**{key: batch.batch[key] for key in keys}).logits[:, 0]


@pytest.mark.parametrize("family", TEXT)
def test_tensors_under_their_hub_names_are_a_sequence_classifier_of_transformers(folders, family, tmp_path):
    model, batch = load_scalar(folders(family)), as_batch(text_rows())
    names = HubNames(model.config)
    save_file(
        dict(names.convert((name, tensor.detach().clone()) for name, tensor in model.named_parameters())),
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    model.config.save_pretrained(tmp_path)

    # With sdpa transformers leaves out Gemma 2's soft cap of attention.
    loaded, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )

    assert not info["missing_keys"] and not info["unexpected_keys"]
    last = PackedForward(model).last_values(batch)
    torch.testing.assert_close(last, classified(loaded, batch), atol=3e-5, rtol=0)


@pytest.mark.parametrize("family", VISION)
def test_vision_models_equal_a_score_on_their_own_hidden_states(folders, family):
    contents = [((IMAGE,), 5), ((), 4), ((WIDE, CLIP), 3), ((IMAGE,), 6)]

    assert_same(folders(family), vision_batch(folders(family), contents), parts=[[1], [3, 0], [], [2]])


def test_gradients_do_not_depend_on_the_split_and_a_bias_has_one_too(folders):
    assert_same(folders("qwen2"), as_batch(text_rows()), parts=[[2], [0, 3], [], [1]], has_bias=True)


def test_a_value_is_read_at_the_token_before_even_after_tool_output(folders):
    model = load_scalar(folders("qwen2"))
    batch = as_batch(text_rows(((4, 6),)))
    whole = PackedForward(model).values(batch)
    batch.batch["loss_mask"][0, 2:4] = 0  # written by a tool: attended, not scored

    values = PackedForward(model).values(batch)

    assert not values[0, 2:4].any() and not values[0, 6:].any()
    assert_values_close(values[0, [0, 1, 4, 5]], whole[0, [0, 1, 4, 5]])


def test_values_are_not_capped_as_the_models_logits_are(folders):
    # The tiny Gemma 2 caps its logits at 30; a score of weight 100 goes far beyond.
    model = load_scalar(folders("gemma2"))
    with torch.no_grad():
        model.score.weight.fill_(100.0)

    values = PackedForward(model).values(as_batch(text_rows()))

    assert model.config.final_logit_softcapping == 30.0
    assert values.abs().max() > 100.0


@pytest.mark.parametrize("family", [*TEXT, *VISION])
def test_the_self_check_accepts_supported_families_with_a_zero_score(folders, family):
    model = load_scalar(folders(family))
    with torch.no_grad():
        model.score.weight.zero_()

    assert check_model(model) < 1e-4


def test_the_self_check_of_a_zero_score_finds_unknown_behavior(folders):
    model = load_scalar(folders("llama"))
    with torch.no_grad():
        model.score.weight.zero_()
    attention = model.model.layers[0].self_attn
    original = attention.forward

    def offset_by_packed_position(
        hidden_states, *args, **kwargs
    ):  # depends on the packed position, not on that in the row
        place = torch.arange(hidden_states.shape[1]).view(1, -1, 1)
        return original(hidden_states + 0.1 * place, *args, **kwargs)

    attention.forward = offset_by_packed_position

    with pytest.raises(NotImplementedError, match=r"hidden states differ by .* from its own forward"):
        check_model(model)
