# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices of layers; all other parameters use AdamW."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel

from verl.distributed.fsdp import compute_device, local_part, map_full_matrices, shard_place
from verl.models.scalar_head import SCORE

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial that moves singular values towards 1
ITERATIONS = 5
MOMENTUM = 0.95
ADAMW_RMS = 0.2  # root mean square of AdamW's updates, in units of the learning rate
EPS = 1e-7  # keeps the normalization finite


class Muon(Optimizer):
    """Muon for the matrices of layers, AdamW for embeddings, head, norms and biases.

        m = mu m + (1 - mu) g          o = NS((1 - mu) g + mu m)
        p = p - lr (0.2 sqrt(max(rows, columns)) o + weight_decay p)

    `NS` approximates the nearest orthogonal matrix by five iterations in bfloat16. The factor gives an update
    the size of AdamW's, so both use the same learning rate and weight decay. The experts of a mixture are a
    stack of matrices. With sharded parameters every rank must step.

    Source: Muon (https://kellerjordan.github.io/posts/muon/); the factor: Muon is Scalable for LLM Training,
    section 2.2 (https://arxiv.org/abs/2502.16982).
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        is_matrix: Callable[[Tensor], bool],  # or a stack of matrices
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-2,
    ) -> None:
        groups = list(groups)
        self._matrices = [_part_of(group, is_matrix, True) for group in groups]
        others = [_part_of(group, is_matrix, False) for group in groups]
        self._adamw = AdamW(others, betas=betas, weight_decay=weight_decay, fused=True)
        # Groups and state are shared objects: a schedule and a checkpoint see a single optimizer.
        super().__init__([*others, *self._matrices], dict(weight_decay=weight_decay))
        self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self._adamw.step()
        for group in self._matrices:
            trained = [param for param in group["params"] if param.grad is not None]
            matrices = [param for param in trained if param.dim() == 2]
            matrices.sort(key=lambda param: (param.numel(), param.shape), reverse=True)
            at_once = shard_place(matrices[0])[1] if matrices else 1
            for start in range(0, len(matrices), at_once):
                self._update(matrices[start : start + at_once], group)
            for stack in (param for param in trained if param.dim() == 3):
                self._update_stack(stack, group)

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        # One matrix for each rank that shares them: a rank orthogonalizes one and holds up to three full
        # matrices. The update equals that of a single process.
        directions = [self._direction(param) for param in matrices]
        wholes = map_full_matrices(orthogonalize, matrices, directions)
        for param, change in zip(matrices, wholes, strict=True):
            _apply(local_part(param), change, param.shape, group)

    def _update_stack(self, stack: Tensor, group: dict[str, Any]) -> None:
        device = compute_device(stack)
        for weight, direction in zip(local_part(stack), self._direction(stack), strict=True):
            _apply(weight, orthogonalize(direction.to(device)), stack.shape[1:], group)

    def _direction(self, param: Tensor) -> Tensor:
        # This rank's part of the Nesterov direction.
        state, grad = self.state[param], local_part(param.grad)  # pyright: ignore[reportArgumentType] - it has one
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)
        momentum = local_part(state["momentum_buffer"]).lerp_(grad, 1 - MOMENTUM)
        return grad.lerp(momentum, MOMENTUM).bfloat16()


def layer_matrices(model: nn.Module) -> Callable[[Tensor], bool]:
    """Return a predicate for Muon's parameters: all matrices and stacks except embeddings and head."""
    outer = {
        id(param) for part in model.modules() if isinstance(part, nn.Embedding) for param in part.parameters()
    }
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for part in (head, getattr(model, SCORE, None)):
        outer |= {id(param) for param in part.parameters()} if isinstance(part, nn.Module) else set()
    return lambda param: param.dim() in (2, 3) and min(param.shape[-2:]) > 1 and id(param) not in outer


def orthogonalize(matrix: Tensor) -> Tensor:
    """Move the singular values to between 0.7 and 1.2: X <- a X + (b X X' + c (X X')^2) X, Newton-Schulz."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _part_of(group: dict[str, Any], is_matrix: Callable[[Tensor], bool], wanted: bool) -> dict[str, Any]:
    return group | {"params": [param for param in group["params"] if is_matrix(param) == wanted]}


def _apply(weight: Tensor, change: Tensor, shape: torch.Size, group: dict[str, Any]) -> None:
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.add_(change.to(weight.device), alpha=-group["lr"] * ADAMW_RMS * math.sqrt(max(shape)))
