# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from transformers import AutoConfig

from tests.helpers.checkpoints import stored_tensors
from tests.helpers.nightly import by_day
from verl.distributed.weights.gathering import full_named_tensors
from verl.models.families.registry import family_of, load_config
from verl.models.hub_names import HubNames, auto_class
from verl.models.scalar_head import is_scalar, make_scalar
from verl.models.tiny import TINY_MODELS, save_tiny_model

FEW = "qwen2_5_vl", "qwen3_moe", "gemma3_vl", "internvl"


@pytest.mark.parametrize("family", by_day(sorted(TINY_MODELS.keys() - {"qwen3_vl_moe"}), *FEW))
def test_converted_tensors_match_save_pretrained(family, tmp_path):
    folder = save_tiny_model(tmp_path, family)
    config = load_config(folder)
    model = auto_class(config).from_pretrained(folder, config=config)
    on_disk = stored_tensors(folder)

    converted = dict(HubNames(config).convert(full_named_tensors(model)))

    assert converted.keys() == on_disk.keys()
    assert all(torch.equal(converted[name], on_disk[name]) for name in on_disk)


def test_each_expert_of_a_mixture_gets_its_own_name(tmp_path):
    names = HubNames(AutoConfig.from_pretrained(save_tiny_model(tmp_path, "qwen3_moe")))

    produced = names.of("model.layers.0.mlp.experts.gate_up_proj")

    assert len(produced) == 8  # gate and up of four experts
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in produced


def test_tensors_are_yielded_one_by_one_in_order(tmp_path):
    config = AutoConfig.from_pretrained(save_tiny_model(tmp_path, "qwen2_5_vl"))
    taken = []

    def weights():
        for name in ("model.visual.merger.ln_q.weight", "model.language_model.norm.weight"):
            taken.append(name)
            yield name, torch.ones(128)

    stream = HubNames(config).convert(weights())

    assert next(stream)[0] == "visual.merger.ln_q.weight"
    assert len(taken) == 1
    assert next(stream)[0] == "model.norm.weight"


def test_an_unknown_name_is_refused(tmp_path):
    names = HubNames(AutoConfig.from_pretrained(save_tiny_model(tmp_path, "qwen2")))

    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM has no tensor 'visual.x'"):
        list(names.convert([("visual.x", torch.ones(1))]))


def test_joint_experts_are_transposed_for_the_hub_and_vllm(tmp_path):
    config = AutoConfig.from_pretrained(save_tiny_model(tmp_path, "qwen3_vl_moe", moe_intermediate_size=96))
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    in_memory = torch.randn(4, 192, 128)  # experts, gate and up, hidden

    [(hub_name, on_hub)] = HubNames(config).convert([(name, in_memory)])

    assert hub_name == name
    assert torch.equal(on_hub, in_memory.transpose(1, 2))


@pytest.mark.parametrize("family", by_day(sorted(TINY_MODELS.keys() - {"qwen3_vl_moe"}), *FEW))
@pytest.mark.parametrize("has_bias", by_day([False, True], True))
def test_a_scalar_model_has_the_same_names_with_a_score_instead_of_the_head(family, has_bias, tmp_path):
    folder = save_tiny_model(tmp_path, family)
    config = load_config(folder)
    make_scalar(config, has_bias=has_bias)
    model = auto_class(config).from_config(config)

    converted = dict(HubNames(config).convert(full_named_tensors(model)))

    prefix = family_of(config).hub_prefix  # of a part of a larger model, which has no score
    named = {name.removeprefix(prefix) for name in stored_tensors(folder)}
    expected = {name for name in named if not name.endswith("lm_head.weight")}
    assert converted.keys() == expected | {"score.weight"} | ({"score.bias"} if has_bias else set())
    assert converted["score.weight"].shape == (1, 128)


def test_scalar_models_are_recognized_by_their_config(tmp_path):
    config = AutoConfig.from_pretrained(save_tiny_model(tmp_path, "qwen2_5_vl"))
    assert not is_scalar(config)

    make_scalar(config, has_bias=True)
    assert is_scalar(config) and config.num_labels == 1
    assert config.architectures == ["Qwen2_5_VLForTokenClassification"]

    make_scalar(config, has_bias=False)
    assert config.architectures == ["Qwen2_5_VLForSequenceClassification"]


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_vl_moe"])
@pytest.mark.parametrize("slice_bytes", [1 << 30, 2 * 128 * 128 * 4, 1])
def test_slices_that_stayed_joint_separate_into_the_tensors_on_the_hub(tmp_path, kind, slice_bytes):
    config = AutoConfig.from_pretrained(save_tiny_model(tmp_path, kind))
    model, names = auto_class(config).from_pretrained(tmp_path), HubNames(config)
    expected = dict(names.convert(full_named_tensors(model)))

    joint = dict(names.convert(full_named_tensors(model, stacks=names.stacks, slice_bytes=slice_bytes)))
    separated = dict(names.separate(joint.items()))

    assert any(name.endswith(".0.mlp.experts.gate_up_proj[0:1]") for name in joint) == (slice_bytes == 1)
    assert separated.keys() == expected.keys()
    assert all(torch.equal(separated[name], expected[name]) for name in expected)
