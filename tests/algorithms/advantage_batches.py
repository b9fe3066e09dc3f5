# SPDX-License-Identifier: Apache-2.0
"""Batches for the tests of advantage estimators."""

from dataclasses import replace

import torch

from verl.algorithms.advantages import AdvantageInputs

ROWS, TOKENS = 24, 17


def make_inputs(rewards, mask, group_ids, **options):
    tensors = {
        name: torch.tensor(value, dtype=torch.float32) if isinstance(value, list) else value
        for name, value in options.items()
    }
    rewards = torch.tensor(rewards, dtype=torch.float32)
    return AdvantageInputs(rewards, torch.tensor(mask), torch.tensor(group_ids), **tensors)


def random_inputs(seed=0, **options):
    """Prompts with one to five responses in mixed order, tool tokens, empty rows; NaN outside of the mask.

    Responses have different numbers of turns, some without a token.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    lengths = torch.randint(1, TOKENS + 1, (ROWS, 1), generator=generator)
    mask = (torch.arange(TOKENS) < lengths) & (torch.rand(ROWS, TOKENS, generator=generator) > 0.2)
    mask[0] = True
    mask[[3, 11]] = False
    group_ids = torch.tensor([0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 6, 6, 6, 7, 7, 7, 8, 9])
    order = torch.randperm(ROWS, generator=generator)
    fields = {
        "token_level_rewards": normal(ROWS, TOKENS),
        "values": normal(ROWS, TOKENS),
        "log_probs": -normal(ROWS, TOKENS).abs(),
        "sum_squared_probs": torch.rand(ROWS, TOKENS, generator=generator),
        "importance_weights": torch.rand(ROWS, TOKENS, generator=generator) * 2,
        "process_rewards": normal(ROWS, TOKENS),
    }
    return AdvantageInputs(
        response_mask=mask.long(),
        group_ids=group_ids[order],
        reward_baselines=normal(ROWS),
        reward_components=normal(ROWS, 3),
        reward_weights=torch.tensor([1.0, 0.5, -2.0]),
        accuracies=normal(ROWS).gt(0).float(),
        turn_ids=_turn_ids(seed).masked_fill(~mask, -7),
        **{name: values.masked_fill(~mask, torch.nan) for name, values in fields.items()},
        **options,
    )


def _turn_ids(seed):
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(ROWS, 1, generator=generator) / 2  # of tokens that begin a turn
    return (torch.rand(ROWS, TOKENS, generator=generator) < shares).cumsum(-1)


def inputs_for(name, seed=0, **options):
    """`random_inputs` that the estimator of this name takes."""
    inputs = replace(random_inputs(seed), **options)
    if name == "grpo_passk":  # at least two responses to each prompt
        return replace(inputs, group_ids=inputs.group_ids // 2)
    return inputs
