# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from tests.workers.rollout.reference import rollout_config
from verl.workers.rollout import vllm_patches
from verl.workers.rollout.vllm_inputs import cpu_cache_bytes


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.32.1rc1.dev5+cpu"])
def test_supported_versions_are_accepted(version):
    vllm_patches.check_version(version)


@pytest.mark.parametrize("version", ["0.25.2", "0.33.0", "1.0.0"])
def test_other_versions_are_refused_with_an_install_command(version):
    with pytest.raises(
        RuntimeError, match=rf"vLLM {version} is not supported.*pip install 'vllm>=0\.26,<0\.33'"
    ):
        vllm_patches.check_version(version)


def test_the_environment_keeps_the_users_values_except_for_multiprocessing(monkeypatch):
    monkeypatch.setattr(vllm_patches.os, "environ", environ := {"VLLM_LOGGING_LEVEL": "DEBUG"})
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    environ["RANK"] = "3"

    vllm_patches.set_environment("cpu")

    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert (environ["RANK"], environ["LOCAL_RANK"]) == ("3", "0")


def test_an_empty_model_gets_random_parameters_and_keeps_its_buffers(monkeypatch):
    vllm_patches.set_environment("cpu")
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    vllm_patches.keep_buffers_of_empty_models()
    model = torch.nn.BatchNorm1d(3)

    DummyModelLoader.load_weights(None, model, None)

    assert model.running_var.tolist() == [1, 1, 1]
    assert (model.weight.abs() < 1e-3).all()


def test_a_class_of_transformers_stays_as_it_is_when_vllm_runs_it():
    from transformers import Glm4vTextModel

    vllm_patches.set_environment("cpu")
    vllm_patches.keep_classes_of_transformers()
    from vllm.model_executor.models.transformers.base import Base

    before = Glm4vTextModel.__init__, Glm4vTextModel.__call__, Glm4vTextModel.__bases__

    backend: Any = object.__new__(Base)
    backend._decorate_cls_for_torch_compile(Glm4vTextModel, None, lambda config: True, False)

    assert (Glm4vTextModel.__init__, Glm4vTextModel.__call__, Glm4vTextModel.__bases__) == before


def test_only_files_of_the_group_are_unlinked(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_patches, "SHARED_MEMORY", tmp_path)
    for name in ("verl-1-tp-[0-1]-cpushm_0", "verl-1-tp-[0-1]-cpushm_1", "verl-2-tp-[0-1]-cpushm_0", "other"):
        (tmp_path / name).touch()

    vllm_patches.unlink_shared_memory("verl-1-tp-[0-1]-cpushm")

    assert {file.name for file in tmp_path.iterdir()} == {"verl-2-tp-[0-1]-cpushm_0", "other"}


def test_logits_are_divided_by_the_current_temperature():
    model = SimpleNamespace(compute_logits=lambda hidden: None if hidden is None else hidden.bfloat16())
    scale = vllm_patches.scale_logits(model)

    plain = model.compute_logits(torch.tensor([3.0]))
    scale.temperature = 0.5
    scaled = model.compute_logits(torch.tensor([3.0]))

    assert (plain.item(), scaled.item()) == (3.0, 6.0)
    assert plain.dtype == scaled.dtype == torch.float32
    assert model.compute_logits(None) is None


def test_experts_on_cpu_are_the_weighted_sum_of_the_chosen_ones():
    generator = torch.Generator().manual_seed(0)
    hidden, w1, w2 = (torch.randn(*shape, generator=generator) for shape in ((5, 4), (3, 6, 4), (3, 4, 3)))
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    weights = torch.rand(5, 2, generator=generator)
    output = torch.empty(5, 4)

    vllm_patches._apply_experts(
        SimpleNamespace(w1_bias=None), output, hidden, w1, w2, weights, ids, SimpleNamespace(value="silu")
    )

    for row in range(5):
        expected = torch.zeros(4)
        for weight, expert in zip(weights[row], ids[row], strict=True):
            gate, up = (w1[expert] @ hidden[row]).split(3)
            expected += weight * (w2[expert] @ (gate * gate.sigmoid() * up))
        torch.testing.assert_close(output[row], expected)


def test_the_cpu_cache_holds_the_sequences_up_to_one_gib_and_four_of_any_length():
    # 2 layers, 2 heads of 32: 2 * 2 * 2 * 32 values of 4 bytes are 1 KiB for a token; a block has 128 tokens
    config = Qwen2Config(
        num_hidden_layers=2, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32
    )
    one_block = 128 * 1024

    short, long, longest = (
        cpu_cache_bytes(config, rollout_config(), length) for length in (100, 8192, 10**6)
    )

    assert short == 256 * 2 * one_block
    assert long == 1 << 30
    assert longest == 4 * 7814 * one_block
