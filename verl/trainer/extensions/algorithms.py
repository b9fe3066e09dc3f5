# SPDX-License-Identifier: Apache-2.0
"""Checks of advantage estimators, policy losses and KL estimators, on two tiny prompts or responses."""

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages import Advantages
from verl.algorithms.policy_loss_types import PolicyLossOptions
from verl.algorithms.policy_losses import PolicyLoss, PolicyLossInputs
from verl.algorithms.token_selection import SelectionInputs, TokenSelection, selection_of
from verl.config.algorithm import AlgorithmConfig
from verl.protocol import DataProto
from verl.trainer.core_algos import advantage_inputs
from verl.trainer.extensions.protocol import ProtocolError, UsedExtension, check_tensor, described

LENGTH = 3  # tokens of a tiny response


def check_estimator(estimator: Any, _used: UsedExtension, config: Any) -> None:
    """Call an estimator for two prompts: one has responses of different scores, one of equal scores."""
    algorithm: AlgorithmConfig = config.algorithm
    batch = _tiny_batch(algorithm, responses=min(config.worker.rollout.n, 4))
    result = estimator(advantage_inputs(batch, algorithm))
    if not isinstance(result, tuple) or len(result) != len(Advantages._fields):
        raise ProtocolError(f"must return Advantages(advantages, returns), got {described(result)}")
    for name, values in zip(Advantages._fields, result, strict=True):
        check_tensor(name, values, batch.batch["loss_mask"].shape)


def check_loss(loss: Any, _used: UsedExtension, config: Any) -> None:
    """Call a loss for two responses and follow its gradient."""
    actor = config.worker.actor
    options = {entry.name: getattr(actor, entry.name) for entry in fields(PolicyLossOptions)}
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    old = torch.tensor([[-0.5, -1.0, -2.0], [-0.1, -3.0, 0.0]])
    log_probs = (old + torch.tensor([[0.01, -0.02, 0.03], [-0.01, 0.02, 0.0]])).requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]])
    inputs = {"log_probs": log_probs, "old_log_probs": old, "advantages": advantages, "response_mask": mask}
    choose = selection_of("", loss)
    if choose is not None:
        inputs["selected"] = _check_selection(choose, inputs)
    result = loss(PolicyLossInputs(**inputs, **options))
    if not isinstance(result, PolicyLoss):
        raise ProtocolError(f"must return a PolicyLoss, got {described(result)}")
    check_tensor("per_token", result.per_token, mask.shape)
    for name, values in result.statistics.items():
        check_tensor(f"statistics[{name!r}]", values, mask.shape)
        if values.requires_grad:
            raise ProtocolError(f"must detach `statistics[{name!r}]`, which carries a gradient")
    check_gradient("per_token", result.per_token, log_probs)


def check_kl(estimator: Any, _used: UsedExtension, config: Any) -> None:
    """Call a KL estimator for log-ratios of both signs, and for equal policies."""
    log_ratio = torch.tensor([[0.0, 0.5, -0.5], [2.0, -2.0, 0.0]], requires_grad=True)
    result = estimator(log_ratio)
    check_tensor("the KL", result, log_ratio.shape)
    zeros = result[log_ratio == 0]
    if zeros.abs().max() > 1e-6:
        raise ProtocolError(f"must be 0 for a log-ratio of 0, as padding has, got {zeros.tolist()}")
    if config.algorithm.use_kl_loss:
        check_gradient("the KL", result, log_ratio)


def _tiny_batch(algorithm: AlgorithmConfig, responses: int) -> DataProto:
    """Two prompts with `responses` responses each, and the inputs that the estimator declares."""
    size, needs = 2 * responses, algorithm.needs
    mask = torch.ones(size, LENGTH, dtype=torch.int64)
    mask[-1, -1] = 0
    scores = torch.cat([torch.arange(responses).float(), torch.ones(responses)])  # (B,)
    rewards = torch.zeros(size, LENGTH)
    rewards[:, 1] = scores
    tensors = {"token_level_rewards": rewards, "loss_mask": mask, "old_log_probs": -rewards - 0.5}
    optional = {
        "values": {"values": rewards / 2},
        "sum_squared_probs": {"sum_squared_probs": torch.full((size, LENGTH), 0.5)},
        "reward_baselines": {"reward_baselines": scores / 2},
        "reward_components": {
            "reward_components": scores[:, None].repeat(1, len(algorithm.gdpo_reward_keys))
        },
        "process_rewards": {"process_rewards": rewards / 2, "accuracies": (scores > 0).float()},
    }
    for name, added in optional.items():
        tensors |= added if name in needs else {}
    uids = np.array([f"prompt {row // responses}" for row in range(size)], dtype=object)
    return DataProto.from_dict(tensors, {"uid": uids})


def check_gradient(name: str, result: Tensor, inputs: Tensor) -> None:
    if not result.requires_grad:
        raise ProtocolError(f"must return `{name}` with a gradient, and it has none: is it detached?")
    (gradient,) = torch.autograd.grad(result.sum(), inputs, allow_unused=True)
    if gradient is None or not gradient.any():
        raise ProtocolError(f"must return `{name}` with a gradient, and that of the log-probs is 0")
    if not gradient.isfinite().all():
        raise ProtocolError(f"must have a finite gradient, got {gradient.tolist()}")


def _check_selection(choose: TokenSelection, inputs: dict[str, Tensor]) -> Tensor:
    """Select among the response tokens of a tiny batch, and return the selection (B, R)."""
    keep = inputs["response_mask"].bool()  # (B, R)
    row_ids, positions = keep.nonzero().unbind(-1)  # (N,), (N,)
    names = ("log_probs", "old_log_probs", "advantages")
    tokens = [inputs[name].detach()[keep] for name in names]
    chosen = choose(SelectionInputs(*tokens, row_ids=row_ids, positions=positions, seed=0))
    check_tensor("the selected tokens", chosen, (int(keep.sum()),), torch.bool)
    return torch.zeros_like(keep).masked_scatter(keep, chosen)
