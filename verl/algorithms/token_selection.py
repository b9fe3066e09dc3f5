# SPDX-License-Identifier: Apache-2.0
"""Selection of the tokens in a mini batch that a policy loss treats differently.

Covariances and fractions need all response tokens of a mini batch on all ranks, however its loss is split. A
loss that selects tokens has a function of the same name here; its result is `PolicyLossInputs.selected`.

The result does not depend on the order of the tokens, so every rank that gathered them selects the same:
sums run in the order of (row, position), and random choices follow a hash of (seed, row, position).
To add one, register a function from `SelectionInputs` to a mask (N,) bool under the name of its loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl.algorithms.kl import ratio_of
from verl.algorithms.policy_loss_types import PolicyLossFunction, clipped_surrogate
from verl.utils.masking import check_same_shape
from verl.utils.registry import Registry

# Increment and multipliers of splitmix64 as signed 64-bit integers; arithmetic wraps around.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True)
class SelectionInputs:
    """The N response tokens of a mini batch in any order, without padding."""

    log_probs: Tensor  # (N,) float32, under the weights at the start of the update
    old_log_probs: Tensor  # (N,) float32
    advantages: Tensor  # (N,) float32
    row_ids: Tensor  # (N,) int64, the token's sequence; the same on every rank
    positions: Tensor  # (N,) int64, in the response
    seed: int  # for the random choice; the same on every rank
    clip_ratio_low: float = 0.2  # the ratio is clipped at 1 - low ...
    clip_ratio_high: float = 0.2  # ... and at 1 + high
    ratio: float = 2e-4  # fraction of the tokens to select
    lower: float = 1.0  # only tokens with a covariance above this ...
    upper: float = 5.0  # ... and below this (clip_cov)


TokenSelection = Callable[[SelectionInputs], Tensor]
TOKEN_SELECTIONS: Registry[TokenSelection] = Registry("worker.actor.loss_type")
L = TypeVar("L", bound=Callable[..., Any])


def selects(selection: TokenSelection) -> Callable[[L], L]:
    """Declare the function that selects the tokens of a mini batch for a loss of a file.

    Example::

        @selects(confident_tokens)
        def my_loss(inputs): ...  # reads `inputs.selected`
    """

    def decorator(loss: L) -> L:
        loss.selection = selection  # pyright: ignore[reportFunctionMemberAccess]
        return loss

    return decorator


def selection_of(loss_type: str, loss: PolicyLossFunction) -> TokenSelection | None:
    """Return the function that selects tokens for a loss; None if it treats all alike."""
    if loss_type in TOKEN_SELECTIONS:
        return TOKEN_SELECTIONS[loss_type]
    return getattr(loss, "selection", None)


@TOKEN_SELECTIONS.register("clip_cov")
@torch.no_grad()
def clip_cov(inputs: SelectionInputs) -> Tensor:
    """Select random tokens among those of high covariance that PPO's bounds do not clip.

        candidates: lower < cov < upper, and not clipped
        number: max(floor(ratio N), 1), or all candidates if there are fewer

    Source: as for the loss, `policy_losses.clip_cov`.
    """
    cov = covariances(inputs)  # (N,)
    ratios = ratio_of(inputs.log_probs - inputs.old_log_probs)
    _, is_clipped = clipped_surrogate(
        ratios, inputs.advantages, inputs.clip_ratio_low, inputs.clip_ratio_high
    )
    is_candidate = (cov > inputs.lower) & (cov < inputs.upper) & ~is_clipped
    return _choose(is_candidate, _num_selected(inputs), token_hashes(inputs))


@TOKEN_SELECTIONS.register("kl_cov")
@torch.no_grad()
def kl_cov(inputs: SelectionInputs) -> Tensor:
    """Select the max(floor(ratio N), 1) tokens of the largest covariance, ties at random.

    Source: as for the loss, `policy_losses.kl_cov`.
    """
    cov = covariances(inputs)  # (N,)
    number = min(_num_selected(inputs), len(cov))
    if not number:
        return torch.zeros_like(cov, dtype=torch.bool)
    smallest = cov.topk(number).values[-1]
    is_larger = cov > smallest
    remaining = number - int(is_larger.sum())
    return is_larger | _choose(cov == smallest, remaining, token_hashes(inputs))


def covariances(inputs: SelectionInputs) -> Tensor:
    """Contribution of each token to the covariance of advantage and log-prob, times N: (N,) float64.

    cov = (A - mean(A)) (log_prob - mean(log_prob))    means over the mini batch
    """
    names = ("log_probs", "old_log_probs", "advantages", "row_ids", "positions")
    check_same_shape(**{name: getattr(inputs, name) for name in names})
    by_position = inputs.positions.argsort(stable=True)
    order = by_position[inputs.row_ids[by_position].argsort(stable=True)]  # (N,) by row, then position
    advantages, log_probs = inputs.advantages.double(), inputs.log_probs.double()
    return (advantages - advantages[order].mean()) * (log_probs - log_probs[order].mean())


def token_hashes(inputs: SelectionInputs) -> Tensor:
    """Hash (seed, row, position) to int64, (N,): splitmix64's mixing function, once for each of the three.

    Source: "Fast Splittable Pseudorandom Number Generators", figure 14
    (https://doi.org/10.1145/2660193.2660195).
    """
    signed_seed = (inputs.seed + 2**63) % 2**64 - 2**63
    hashes = torch.full_like(inputs.row_ids, signed_seed)
    for part in (torch.zeros_like(inputs.row_ids), inputs.row_ids, inputs.positions):
        hashes = _mixed((hashes ^ part) + GOLDEN_GAMMA)
    return hashes


def _num_selected(inputs: SelectionInputs) -> int:
    return max(int(inputs.ratio * len(inputs.log_probs)), 1)


def _choose(is_candidate: Tensor, number: int, hashes: Tensor) -> Tensor:
    """Mark the candidates with the smallest hashes, at most `number` of them, (N,) bool."""
    candidates = is_candidate.nonzero().squeeze(-1)  # (candidates,)
    chosen = candidates[hashes[candidates].argsort()[:number]]
    selected = torch.zeros_like(is_candidate)
    selected[chosen] = True
    return selected


def _mixed(values: Tensor) -> Tensor:
    values = (values ^ _shifted(values, 30)) * MIX_1
    values = (values ^ _shifted(values, 27)) * MIX_2
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    # Logical shift: `>>` on int64 would copy the sign bit.
    return (values >> bits) & ((1 << (64 - bits)) - 1)
