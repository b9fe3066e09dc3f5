# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import torch

from verl.workers.rollout.vllm import cpu_patches, patches, vllm_import


def test_an_empty_model_gets_random_parameters_and_keeps_its_buffers(monkeypatch):
    vllm_import.set_environment("cpu")
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    patches.keep_buffers_of_empty_models()
    model = torch.nn.BatchNorm1d(3)

    DummyModelLoader.load_weights(None, model, None)

    assert model.running_var.tolist() == [1, 1, 1]
    assert (model.weight.abs() < 1e-3).all()


def test_a_class_of_transformers_stays_as_it_is_when_vllm_runs_it():
    from transformers import Glm4vTextModel

    vllm_import.set_environment("cpu")
    patches.keep_classes_of_transformers()
    from vllm.model_executor.models.transformers.base import Base

    before = Glm4vTextModel.__init__, Glm4vTextModel.__call__, Glm4vTextModel.__bases__

    backend: Any = object.__new__(Base)
    backend._decorate_cls_for_torch_compile(Glm4vTextModel, None, lambda config: True, False)

    assert (Glm4vTextModel.__init__, Glm4vTextModel.__call__, Glm4vTextModel.__bases__) == before


def test_only_files_of_the_group_are_unlinked(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_patches, "SHARED_MEMORY", tmp_path)
    for name in ("verl-1-tp-[0-1]-cpushm_0", "verl-1-tp-[0-1]-cpushm_1", "verl-2-tp-[0-1]-cpushm_0", "other"):
        (tmp_path / name).touch()

    cpu_patches.unlink_shared_memory("verl-1-tp-[0-1]-cpushm")

    assert {file.name for file in tmp_path.iterdir()} == {"verl-2-tp-[0-1]-cpushm_0", "other"}


def test_experts_on_cpu_are_the_weighted_sum_of_the_chosen_ones():
    generator = torch.Generator().manual_seed(0)
    hidden, w1, w2 = (torch.randn(*shape, generator=generator) for shape in ((5, 4), (3, 6, 4), (3, 4, 3)))
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    weights = torch.rand(5, 2, generator=generator)
    output = torch.empty(5, 4)

    cpu_patches._apply_experts(
        SimpleNamespace(w1_bias=None), output, hidden, w1, w2, weights, ids, SimpleNamespace(value="silu")
    )

    for row in range(5):
        expected = torch.zeros(4)
        for weight, expert in zip(weights[row], ids[row], strict=True):
            gate, up = (w1[expert] @ hidden[row]).split(3)
            expected += weight * (w2[expert] @ (gate * gate.sigmoid() * up))
        torch.testing.assert_close(output[row], expected)
