# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks: equal to eager ones, not compiled again for other lengths."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig

from tests.helpers.causal_families import FAMILIES, build_family
from tests.helpers.distributed import run_distributed
from tests.helpers.families import load_tiny
from tests.helpers.family_training import load_model
from verl.config.model import FSDPConfig, ModelConfig
from verl.distributed.fsdp import fsdp_blocks, make_mesh
from verl.distributed.weights.gathering import full_named_tensors
from verl.models import monkey_patch
from verl.models.attention.layouts import PackedLayout
from verl.models.hub_names import auto_class
from verl.models.registry import prepare_model
from verl.models.tiny import save_tiny_model
from verl.workers import model_builder

KINDS = [  # whose results have strides of their own
    ([5, 9], None),
    ([9], None),
    ([8, 4, 2, 6], PackedLayout.of_groups([(8, [4, 2]), (6, [])])),
]
LENGTHS = [
    ([7, 3, 20], None),
    ([50, 1, 9], None),
    ([31], None),
    ([9, 5, 3, 7], PackedLayout.of_groups([(9, [5, 3]), (7, [])])),
]


def results(model, lengths, layout):
    """Log-probs and gradients of packed sequences."""
    ids = torch.randint(200, (sum(lengths),), generator=torch.Generator().manual_seed(sum(lengths)))
    layout = layout or PackedLayout.of(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]))
    positions = torch.cat([torch.arange(length) for length in lengths])
    model.zero_grad()
    found = model(
        input_ids=ids[None],
        position_ids=positions[None],
        packed_layout=layout,
        read=lambda logits: logits.log_probs(ids.roll(-1), torch.arange(len(ids)), 1.0),
    )
    found.log_probs.sum().backward()
    return [found.log_probs.detach()] + [p.grad for p in model.parameters() if p.grad is not None]


def prepared(folder):
    model = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32)
    prepare_model(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


@pytest.mark.slow
def test_compiled_blocks_equal_eager_ones_and_are_not_compiled_again_for_other_lengths(tmp_path):
    folder = save_tiny_model(tmp_path, "qwen2", num_hidden_layers=3)
    eager, compiled = prepared(folder), prepared(folder)
    monkey_patch.compile_blocks(compiled, backend="aot_eager")
    graphs = []

    for lengths, layout in KINDS + LENGTHS:
        expected = [tensor.clone() for tensor in results(eager, lengths, layout)]
        for left, right in zip(results(compiled, lengths, layout), expected, strict=True):
            assert (left - right).abs().max() <= 2e-6 * right.abs().max()
        graphs.append(counters["stats"]["unique_graphs"])

    assert graphs[0] > 0, "blocks were compiled"
    assert graphs[len(KINDS) - 1 :] == [graphs[-1]] * (1 + len(LENGTHS))


@pytest.mark.parametrize("model_type", ["gpt2", "modernbert-decoder", "llama4_text"])
def test_blocks_are_found_where_fsdp_finds_them(model_type, monkeypatch):
    model = build_family(model_type, FAMILIES[model_type])  # whose decoder has no list of `layers`
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compiled.append(forward.__self__) or forward)

    monkey_patch.compile_blocks(model)

    assert compiled == fsdp_blocks(model)
    assert len(compiled) == model.config.num_hidden_layers


def test_blocks_of_a_vision_tower_are_not_compiled(monkeypatch):
    tiny = load_tiny("llava_onevision")
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compiled.append(forward.__self__) or forward)

    monkey_patch.compile_blocks(load_model(tiny, prepared=True))

    assert {type(block).__name__ for block in compiled} == {"Qwen2DecoderLayer"}


def test_a_model_that_names_no_blocks_is_refused():
    model = build_family("llama", {})
    model._no_split_modules = []

    with pytest.raises(ValueError, match="`compile_blocks` must be false for LlamaForCausalLM"):
        monkey_patch.compile_blocks(model)


def sharded_differences(rank, world_size, folder, expert_ranks):
    """Run a model that is compiled and sharded, and one that is only sharded."""
    lengths = ([5, 9], [9], [7, 3, 20], [31])
    found, graphs = [], []
    original = monkey_patch.compile_blocks
    model_builder.compile_blocks = lambda model: original(model, backend="aot_eager")
    for is_compiled in (False, True):
        config = ModelConfig(model_path=folder, compile_blocks=is_compiled)
        fsdp = FSDPConfig(mp_param_dtype="fp32", torch_dtype="fp32", expert_parallel_size=expert_ranks)
        mesh = make_mesh(world_size, -1, "cpu")
        model = model_builder.build_model(config, fsdp, mesh=mesh, device="cpu", trainable=True)
        found.append([])
        for each in lengths:
            log_probs, *grads = results(model, each, None)
            found[-1] += [log_probs, *(grad.full_tensor() for grad in grads)]
            graphs.append(counters["stats"]["unique_graphs"])
        names = [name for name, _ in full_named_tensors(model)]
        assert not [name for name in names if "_orig_mod" in name]
    assert graphs[3] == 0 < graphs[5] == graphs[-1], "other lengths were not compiled again"
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize(("family", "expert_ranks"), [("qwen2", 1), ("qwen3_moe", 2)])
def test_compiled_blocks_are_sharded_like_eager_ones(tmp_path, family, expert_ranks):
    folder = str(save_tiny_model(tmp_path, family, num_hidden_layers=2))

    for difference in run_distributed(sharded_differences, 2, folder, expert_ranks):
        assert difference <= 2e-6
