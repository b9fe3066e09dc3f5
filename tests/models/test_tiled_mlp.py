# SPDX-License-Identifier: Apache-2.0
"""MLPs in tiles: equal to whole ones in results and gradients, at the same cost, in less memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.causal_families import FAMILIES, build_family
from tests.helpers.distributed import run_distributed
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig
from verl.distributed.fsdp import make_mesh
from verl.models import tiled_mlp
from verl.models.attention.layouts import PackedLayout
from verl.models.registry import prepare_model
from verl.models.tiny import save_tiny_model
from verl.workers import model_builder
from verl.workers.model_builder import build_model

HIDDEN = 64  # size of the tiny models
LENGTHS = (9, 5, 8)
TILE = 4  # so that there are six, the last of two tokens
QUICK = ("qwen2", "gemma3_text", "glm4", "gpt_oss", "phi3", "stablelm")  # the others are slow
NO_DROPOUT = dict.fromkeys(
    ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "residual_dropout"), 0.0
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled_mlp, "TILE", TILE)


def results(model):
    """Return log-probs of packed sequences and the gradients."""
    ids = torch.randint(200, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    found = model(
        input_ids=ids[None],
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
        packed_layout=PackedLayout.of(bounds),
        read=lambda logits: logits.log_probs(ids.roll(-1), torch.arange(len(ids)), 1.0),
    )
    if torch.is_grad_enabled():
        found.log_probs.sum().backward()
    return [found.log_probs.detach()] + [p.grad for p in model.parameters() if p.grad is not None]


def checkpointed(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def assert_equal(tiled, whole):
    assert len(tiled) == len(whole) > 1
    for left, right in zip(tiled, whole, strict=True):
        assert (left - right).abs().max() <= 3e-5 * right.abs().max()


@pytest.mark.parametrize(
    "model_type",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_log_probs_and_gradients_of_every_model_stay(model_type):
    models = [build_family(model_type, FAMILIES[model_type] | NO_DROPOUT) for _ in range(2)]
    if not tiled_mlp.dense_mlps(models[0]):
        pytest.skip("its blocks have no dense MLP")
    for model in models:
        prepare_model(model)
        checkpointed(model)
    tiled_mlp.tile_mlps(models[0])

    assert_equal(*map(results, models))


def pair(**options):
    """Return a model with tiles and one without."""
    models = [checkpointed(build_family("qwen2", options)) for _ in range(2)]
    for model in models:
        prepare_model(model)
    tiled_mlp.tile_mlps(models[0])
    return models


def test_each_tile_runs_once_forward_and_once_before_its_backward_pass():
    runs = []
    for model in pair():
        starts = []
        for mlp in tiled_mlp.dense_mlps(model):
            mlp.gate_proj.register_forward_pre_hook(lambda *_, starts=starts: starts.append(1))
        results(model)
        runs.append(len(starts))

    tiles, layers = 6, 2
    assert runs == [2 * tiles * layers, 2 * layers]  # no more operations than without tiles


class Widest(TorchDispatchMode):
    """Notes the most tokens of states of a width."""

    def __init__(self, width):
        super().__init__()
        self.width, self.tokens = width, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.shape[-1:] == (self.width,):
            tokens = found[..., 0].numel()
            self.tokens = max(self.tokens, 0 if tokens == HIDDEN else tokens)  # of a weight, or its gradient
        return found


@pytest.mark.parametrize("trains", [True, False])
def test_no_wide_tensor_has_more_tokens_than_a_tile(trains):
    tokens = []
    for model in pair(intermediate_size=368):
        with Widest(368) as widest, torch.set_grad_enabled(trains):
            results(model)
        tokens.append(widest.tokens)

    assert tokens == [TILE, sum(LENGTHS)]


def sharded_results(rank, world_size, folder, adapters):
    tiled_mlp.TILE = TILE
    original, found = tiled_mlp.tile_mlps, []
    for tiles in (True, False):
        model_builder.tile_mlps = original if tiles else lambda model: None
        model = build_model(
            ModelConfig(model_path=folder, lora=LoraConfig(rank=4 if adapters else 0)),
            FSDPConfig(mp_param_dtype="fp32", torch_dtype="fp32"),
            mesh=make_mesh(world_size, -1, "cpu"),
            device="cpu",
            trainable=True,
        )
        if adapters:  # the second ones begin as zeros
            torch.manual_seed(1)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter.to_local(), std=0.1)
        log_probs, *gradients = results(model)
        found.append([log_probs, *(gradient.full_tensor() for gradient in gradients)])
    assert_equal(*found)
    return len(found[0])


@pytest.mark.heavy
@pytest.mark.parametrize("adapters", [False, True])
def test_tiles_of_sharded_models_equal_whole_ones(adapters, tmp_path):
    folder = str(save_tiny_model(tmp_path, "qwen2", num_hidden_layers=2))

    assert run_distributed(sharded_results, 2, folder, adapters) == [29 if adapters else 27] * 2
