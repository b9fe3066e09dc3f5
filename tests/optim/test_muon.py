# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.helpers.optimizers import Parameters, gradients, update
from verl.config.model import OptimConfig
from verl.optim.build import build_optimizer
from verl.optim.muon import layer_matrices, orthogonalize


def test_matrices_match_torch_muon_and_the_rest_matches_adamw():
    ours, theirs = Parameters(), Parameters()
    config = OptimConfig(lr=1e-2, strategy="muon", weight_decay=0.1, betas=(0.8, 0.9))
    matrices = {"wide.weight", "tall.weight", "flat.weight", "square.weight"}
    named = dict(theirs.named_parameters())
    stacks = {name: [nn.Parameter(part) for part in named[name].detach().clone()] for name in ("experts",)}
    references = [
        torch.optim.Muon(
            [named[name] for name in matrices], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.Muon(stacks["experts"], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [param for name, param in named.items() if name not in matrices | {"experts"}],
            lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9),
        ),
    ]  # fmt: skip
    optimizer = build_optimizer(ours, config)

    for step in range(4):
        update(ours, optimizer, None, range(step, step + 1))
        for param, grad in gradients(theirs, step):
            param.grad = grad
        for part, grad in zip(stacks["experts"], named["experts"].grad, strict=True):
            part.grad = grad
        for reference in references:
            reference.step()

    expected = named | {"experts": torch.stack([part.detach() for part in stacks["experts"]])}
    for name, param in ours.named_parameters():
        torch.testing.assert_close(param.detach(), expected[name].detach(), atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_orthogonalization_keeps_the_singular_vectors_with_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)

    found = orthogonalize(matrix.bfloat16()).float()

    assert found.shape == shape
    sizes = left.T @ found @ right.T
    assert sizes.diagonal().min() > 0.6 and sizes.diagonal().max() < 1.3
    assert (sizes - sizes.diagonal().diag()).abs().max() < 0.05


@pytest.mark.parametrize("is_tied", [True, False])
def test_embeddings_head_norms_and_biases_are_not_layer_matrices(is_tied):
    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=is_tied,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    is_matrix = layer_matrices(model)

    names = {name for name, param in model.named_parameters() if is_matrix(param)}

    assert {name.split(".")[-2] for name in names} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_the_score_is_not_a_layer_matrix():
    model = nn.ModuleDict({"inner": nn.Linear(4, 4), "score": nn.Linear(4, 2)})

    assert [name for name, param in model.named_parameters() if layer_matrices(model)(param)] == [
        "inner.weight"
    ]


def test_without_matrices_muon_equals_adamw():
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(nn.ParameterList([ours]), OptimConfig(lr=0.1, strategy="muon"))
    reference = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.01)
    for param, one in ((ours, optimizer), (theirs, reference)):
        param.grad = torch.tensor([1.0, -2.0, 0.0])
        one.step()

    torch.testing.assert_close(ours, theirs)
