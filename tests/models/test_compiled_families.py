# SPDX-License-Identifier: Apache-2.0
"""Blocks that `auto` compiles and recomputes: every type of language model in its table."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from tests.helpers.causal_families import FAMILIES, build_family
from verl.config.model import LoraConfig, ModelConfig
from verl.models.attention.layouts import PackedLayout
from verl.models.families.registry import load_config
from verl.models.hub_names import auto_class
from verl.models.mixture.routing import Routing, balance_loss
from verl.models.monkey_patch import compile_blocks, recompute_blocks
from verl.models.registry import prepare_model
from verl.models.tiny import save_tiny_model
from verl.models.trainable import select_trainable
from verl.planning.auto_switches import TESTED
from verl.workers.model_builder import adapter_config

# Types whose tiny models are the package's.
TINY = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni", "qwen3_omni_moe"}
EVERY_TIME = ("qwen2", "qwen3_moe")
ALL = [pytest.param(kind, marks=[] if kind in EVERY_TIME else pytest.mark.nightly) for kind in sorted(TESTED)]
# Kinds of batches, and then other lengths of the same kinds: in groups, responses share their prompt.
GROUPS = PackedLayout.of_groups
SEEN = [([5, 9], None), ([9], None), ([8, 4, 2, 6], GROUPS([(8, [4, 2]), (6, [])])), ([40, 3], None)]
OTHERS = [
    ([7, 3, 20], None),
    ([31], None),
    ([50, 1, 9], None),
    ([9, 5, 3, 7], GROUPS([(9, [5, 3]), (7, [])])),
]


def build(kind, folder, lora=0):
    """A prepared model in float32 with a router's hooks, as a worker has it."""
    if kind in FAMILIES:
        model = build_family(kind, FAMILIES[kind]).float()
    else:
        save_tiny_model(folder, kind)
        config = load_config(str(folder), trust_remote_code=False)
        model = auto_class(config).from_pretrained(folder, dtype=torch.float32, config=config)
    prepare_model(model)
    if lora:
        options = ModelConfig(model_path=str(folder), lora=LoraConfig(rank=lora))
        select_trainable(model, options, "worker.actor.model", adapter_config(options, "worker.actor.model"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    return model.train()


def results(model, routing, lengths, layout):
    """Log-probs and gradients of packed sequences, with the loss that balances routers."""
    count = sum(lengths)
    ids = torch.randint(200, (count,), generator=torch.Generator().manual_seed(count))
    layout = layout or PackedLayout.of(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]))
    inputs = dict(
        input_ids=ids[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        packed_layout=layout,
        read=lambda logits: logits.log_probs(ids.roll(-1), torch.arange(count), 1.0),
    )
    model.zero_grad()
    if routing is None:
        found = model(**inputs)
        found.log_probs.sum().backward()
    else:
        with routing.recording(torch.ones(count), keeps_logits=True) as routes:
            found = model(**inputs)
        (found.log_probs.sum() + balance_loss([routes], routes.choices())).backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {"log_probs": found.log_probs.detach()} | grads


def compiled_and_eager(kind, folder, lora=0):
    """Yield for each batch the results of compiled and of eager blocks, and the graphs so far."""
    torch._dynamo.reset()
    counters.clear()
    eager = build(kind, folder, lora)
    compiled = copy.deepcopy(eager)
    for model in (eager, compiled):
        recompute_blocks(model, 1.0)
    compile_blocks(compiled, backend="aot_eager")
    routers = Routing.of(eager), Routing.of(compiled)
    for lengths, layout in SEEN + OTHERS:
        expected = results(eager, routers[0], lengths, layout)
        found = results(compiled, routers[1], lengths, layout)
        yield found, expected, counters["stats"]["unique_graphs"]


def assert_compiled_once(batches):
    graphs = []
    for found, expected, count in batches:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] - value).abs().max() <= 2e-5 * value.abs().max(), name
        graphs.append(count)
    assert graphs[0] > 0 and graphs[len(SEEN) - 1 :] == [graphs[-1]] * (1 + len(OTHERS))
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])


def test_every_type_in_the_table_has_a_model():
    assert (FAMILIES.keys() | TINY) >= TESTED


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_compiled_blocks_equal_eager_ones_for_any_length_in_graphs_that_end_at_attention(kind, tmp_path):
    assert_compiled_once(compiled_and_eager(kind, tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_compiled_blocks_with_adapters_equal_eager_ones(kind, tmp_path):
    assert_compiled_once(compiled_and_eager(kind, tmp_path, lora=4))


@pytest.mark.parametrize("kind", ALL)
def test_gradients_are_the_same_bits_however_many_blocks_are_recomputed(kind, tmp_path):
    model = build(kind, tmp_path)
    routing, found = Routing.of(model), []
    for share in (1.0, 0.5, 0.25):
        recompute_blocks(model, share)
        found.append({name: value.clone() for name, value in results(model, routing, *SEEN[0]).items()})

    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[name], value) for name, value in found[0].items())
