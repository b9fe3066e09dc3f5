# SPDX-License-Identifier: Apache-2.0
import sys
from collections import Counter

import pytest
import torch
from torch import nn

from tests.helpers.optimizers import IN_BF16, MARKED_STRATEGIES, STRATEGIES, Parameters, update
from verl.config.model import OptimConfig
from verl.config.schema import ConfigError, check_config, load_config
from verl.optim.build import OPTIMIZERS, build_optimizer, parameter_groups
from verl.optim.schedules import SCHEDULES, SHAPES

# Of the parameters of `Parameters`: in matrices of layers or a stack; in the table and vectors; and of
# those in blocks of 8 bits (rows of 256: embed, wide; of 1536: experts).
MATRICES, OTHERS = 17 * 256 + 40 * 16 + 12 * 40 + 24 * 24 + 4 * 8 * 192, 20 * 256 + 17 + 30
IN_BLOCKS, SCALES = 17 * 256 + 20 * 256 + 4 * 8 * 192, 17 + 20 + 4 * 6


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim() > 0
    )


def test_only_trained_weights_are_optimized_and_none_is_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)

    optimizer = build_optimizer(model, OptimConfig(strategy="adamw_bf16"))

    assert [id(param) for param in optimizer.param_groups[0]["params"]] == [
        id(param) for param in model[1].parameters()
    ]
    with pytest.raises(ValueError, match="everything is frozen"):
        build_optimizer(model.requires_grad_(False), OptimConfig())


@pytest.mark.parametrize("strategy", MARKED_STRATEGIES)
def test_the_state_takes_the_documented_number_of_bytes(strategy):
    total = MATRICES + OTHERS
    expected = {
        "adamw": 8 * total,
        "adamw_bf16": 8 * total,
        "adamw_bf16_sr": 4 * total,
        "adamw_8bit": 2 * (IN_BLOCKS + 4 * SCALES) + 8 * (total - IN_BLOCKS),
        "muon": 4 * MATRICES + 8 * OTHERS,
    }
    model = Parameters(torch.bfloat16 if strategy in IN_BF16 else torch.float32)
    optimizer = build_optimizer(model, OptimConfig(strategy=strategy))

    update(model, optimizer, None, range(1))

    assert state_bytes(optimizer) == expected[strategy]


@pytest.mark.parametrize("strategy", MARKED_STRATEGIES)
def test_frozen_parameters_have_no_state_and_do_not_change(strategy):
    model = Parameters(torch.bfloat16 if strategy in IN_BF16 else torch.float32)
    for part in (model.embed, model.flat, model.square):
        part.requires_grad_(False)
    model.wide.weight.requires_grad_(False)
    model.experts.requires_grad_(False)
    frozen = [model.embed.weight, model.wide.weight, model.experts]
    before = [param.clone() for param in frozen]
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, strategy=strategy, weight_decay=0.5))

    update(model, optimizer, None, range(2))

    grouped = [param for group in optimizer.param_groups for param in group["params"]]
    assert Counter(map(id, grouped)) == Counter(map(id, (model.wide.bias, model.tall.weight, model.norm)))
    assert set(optimizer.state) == {model.wide.bias, model.tall.weight, model.norm}
    assert all(map(torch.equal, frozen, before))


@pytest.mark.parametrize("strategy", MARKED_STRATEGIES)
def test_a_factor_scales_the_updates_of_its_group_alone(strategy):
    # The first update of every optimizer, without decay, is the learning rate times something.
    changes = []
    for factors in ({}, {"wide": 4.0}):
        model = Parameters()
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        config = OptimConfig(lr=1e-2, strategy=strategy, weight_decay=0.0, lr_factors=factors)
        update(model, build_optimizer(model, config), None, range(1))
        changes.append({name: param.detach() - before[name] for name, param in model.named_parameters()})

    for name, change in changes[0].items():
        factor = 4 if "wide" in name else 1
        torch.testing.assert_close(changes[1][name], factor * change, atol=1e-5, rtol=1e-4)


def test_the_log_describes_each_group(caplog):
    with caplog.at_level("INFO"):
        build_optimizer(nn.Linear(3, 2), OptimConfig(lr=0.5, lr_factors={"bias": 2.0}), "worker.critic.optim")

    first, second = caplog.messages
    assert "worker.critic.optim" in first and "pattern=None lr=0.5 tensors=1 parameters=6" in first
    assert "pattern=bias lr=1 tensors=1 parameters=2" in second


def test_the_option_choices_match_the_registries():
    fields = OptimConfig.__dataclass_fields__
    choices = {name: set(fields[name].metadata["option"].choices) for name in (
        "strategy", "lr_scheduler_type", "lr_decay_shape",
    )}  # fmt: skip

    assert choices["strategy"] == set(OPTIMIZERS) == set(STRATEGIES)
    assert choices["lr_scheduler_type"] == set(SCHEDULES)
    assert choices["lr_decay_shape"] == set(SHAPES)


def test_factors_keep_their_order():
    config = load_config(OptimConfig, [r"lr_factors={'visual\.merger\.': 10, 'visual\.': 0.1}"])

    assert list(config.lr_factors.items()) == [(r"visual\.merger\.", 10), (r"visual\.", 0.1)]


@pytest.mark.parametrize(
    ("factors", "problem"),
    [
        ({"visual": 0.0}, r"lr_factors` \(visual\) must be a number above 0, got 0.0: .*`freeze_modules`"),
        ({"visual": "fast"}, r"lr_factors` \(visual\) must be a number above 0, got 'fast'"),
        ({"(": 1.0}, r"lr_factors` \(\(\) must be a regular expression"),
    ],
)
def test_an_invalid_factor_is_a_config_error(factors, problem):
    with pytest.raises(ConfigError, match=problem):
        check_config(OptimConfig(lr_factors=factors))


def test_8_bit_adamw_without_torchao_is_a_config_error_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)  # makes the import fail

    with pytest.raises(ConfigError, match=r"strategy` .*pip install 'easy-verl\[torchao\]'"):
        check_config(OptimConfig(strategy="adamw_8bit"))


def model() -> nn.ModuleDict:
    """Eight parameters: `visual.merger`, `visual.blocks`, `language.embed`, `language.head`, with biases."""
    tower = nn.ModuleDict({"merger": nn.Linear(2, 3), "blocks": nn.Linear(2, 2)})
    text = nn.ModuleDict({"embed": nn.Linear(3, 5), "head": nn.Linear(3, 7)})
    return nn.ModuleDict({"visual": tower, "language": text})


def names_of(groups: list[dict], of: nn.Module) -> list[set[str]]:
    names = {id(param): name for name, param in of.named_parameters()}
    return [{names[id(param)].removesuffix(".weight") for param in group["params"]} for group in groups]


def test_the_first_matching_pattern_decides():
    net = model()
    for name, param in net.named_parameters():
        param.requires_grad_("bias" not in name)

    groups = parameter_groups(net, 0.5, {r"visual\.merger": 10.0, r"^visual": 0.1}, "optim")

    assert names_of(groups, net) == [
        {"language.embed", "language.head"},
        {"visual.merger"},
        {"visual.blocks"},
    ]
    assert [group["lr"] for group in groups] == [0.5, 5.0, 0.05]


def test_the_first_group_has_the_base_rate_even_if_it_is_empty():
    groups = parameter_groups(model(), 0.5, {"": 2.0}, "optim")

    assert [(len(group["params"]), group["lr"]) for group in groups] == [(0, 0.5), (8, 1.0)]


@pytest.mark.parametrize(
    ("factors", "rule"),
    [
        ({"vision": 2.0}, "must match part of a parameter's name, for example visual.merger.weight"),
        ({"embed": 2.0}, "must match a trained parameter, but language.embed.weight"),
        ({"visual": 2.0, "merger": 3.0}, "must come before the patterns that match all of its parameters"),
    ],
)
def test_a_pattern_without_effect_is_an_error(factors, rule):
    net = model()
    net["language"]["embed"].requires_grad_(False)

    with pytest.raises(ValueError, match="lr_factors") as error:
        parameter_groups(net, 0.5, factors, "worker.actor.optim")
    assert f"`worker.actor.optim.lr_factors` ({list(factors)[-1]}) {rule}" in str(error.value)
