# SPDX-License-Identifier: Apache-2.0
import pytest
from torch import nn

from verl.optim.groups import parameter_groups


def model() -> nn.ModuleDict:
    """Eight parameters: `visual.merger`, `visual.blocks`, `language.embed`, `language.head`, with biases."""
    tower = nn.ModuleDict({"merger": nn.Linear(2, 3), "blocks": nn.Linear(2, 2)})
    text = nn.ModuleDict({"embed": nn.Linear(3, 5), "head": nn.Linear(3, 7)})
    return nn.ModuleDict({"visual": tower, "language": text})


def names_of(groups: list[dict], of: nn.Module) -> list[set[str]]:
    names = {id(param): name for name, param in of.named_parameters()}
    return [{names[id(param)].removesuffix(".weight") for param in group["params"]} for group in groups]


def test_the_first_pattern_that_is_found_decides():
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


def test_the_first_group_has_the_base_rate_even_if_nothing_is_left_for_it():
    groups = parameter_groups(model(), 0.5, {"": 2.0}, "optim")

    assert [(len(group["params"]), group["lr"]) for group in groups] == [(0, 0.5), (8, 1.0)]


@pytest.mark.parametrize(
    ("factors", "rule"),
    [
        ({"vision": 2.0}, "must be found in a parameter's name; they are such as visual.merger.weight"),
        ({"embed": 2.0}, "must be found in the name of a trained parameter, but language.embed.weight"),
        ({"visual": 2.0, "merger": 3.0}, "must come before the patterns that take all of its parameters"),
    ],
)
def test_a_pattern_that_decides_nothing_is_an_error_that_says_why(factors, rule):
    net = model()
    net["language"]["embed"].requires_grad_(False)

    with pytest.raises(ValueError, match="lr_factors") as error:
        parameter_groups(net, 0.5, factors, "worker.actor.optim")
    assert f"`worker.actor.optim.lr_factors` ({list(factors)[-1]}) {rule}" in str(error.value)
