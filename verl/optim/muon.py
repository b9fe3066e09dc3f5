# SPDX-License-Identifier: Apache-2.0
"""Muon: matrices are changed by orthogonal matrices; what is no matrix of a layer is trained by AdamW."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel

from verl.distributed.fsdp import local_part, num_shards, on_whole_matrices
from verl.models.scalar_head import SCORE

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial that pulls singular values towards 1
ITERATIONS = 5
MOMENTUM = 0.95
ADAMW_RMS = 0.2  # root mean square of an update of AdamW, in units of the learning rate
EPS = 1e-7


class Muon(Optimizer):
    """Muon for the matrices of layers, AdamW for embeddings, head, norms and biases.

        m = mu m + (1 - mu) g          o = NS((1 - mu) g + mu m)
        p = p - lr (0.2 sqrt(max(rows, columns)) o + weight_decay p)

    `NS` takes a matrix to the nearest orthogonal one, about: five iterations in bfloat16. The factor gives an
    update the size that AdamW's has, so both take the same learning rate and weight decay. A matrix takes 4
    bytes of state for a float32 weight, half of AdamW's. The experts of a mixture are matrices in a stack.

    Sharded matrices are gathered one after the other, in bfloat16. As many as there are ranks are in work at
    once: each rank orthogonalizes one, and sends every rank its rows. So the update is that of one process,
    and beside the parts a rank holds three whole matrices for a moment. Every rank must step.

    Source: Muon (https://kellerjordan.github.io/posts/muon/); the factor: Muon is Scalable for LLM Training,
    section 2.2 (https://arxiv.org/abs/2502.16982).

    Args:
        groups: Groups of `parameter_groups`.
        is_matrix: Whether a parameter is the matrix, or a stack of matrices, of a layer.
        betas: Of AdamW.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        is_matrix: Callable[[Tensor], bool],
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-2,
    ) -> None:
        groups = list(groups)
        self._matrices = [_part_of(group, is_matrix, True) for group in groups]
        others = [_part_of(group, is_matrix, False) for group in groups]
        self._adamw = AdamW(others, betas=betas, weight_decay=weight_decay, fused=True)
        # The groups are the same dictionaries, and so is the state: a schedule and a checkpoint see one.
        super().__init__([*others, *self._matrices], dict(weight_decay=weight_decay))
        self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; with sharded ones every rank must call it.

        Args:
            closure: Computes the loss anew, with gradients; None if they are there already.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._adamw.step()
        for group in self._matrices:
            trained = [param for param in group["params"] if param.grad is not None]
            matrices = [param for param in trained if param.dim() == 2]
            matrices.sort(key=lambda param: (param.numel(), param.shape), reverse=True)
            at_once = num_shards(matrices[0]) if matrices else 1
            for start in range(0, len(matrices), at_once):
                self._update(matrices[start : start + at_once], group)
            for stack in (param for param in trained if param.dim() == 3):
                self._update_stack(stack, group)
        return loss

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices, one for each rank that holds a part of them."""
        directions = [self._direction(param) for param in matrices]
        wholes = on_whole_matrices(orthogonalized, matrices, directions)
        for param, change in zip(matrices, wholes, strict=True):
            _apply(local_part(param), change, param.shape, group)

    def _update_stack(self, stack: Tensor, group: dict[str, Any]) -> None:
        """Update this rank's matrices of a stack, each whole."""
        for weight, direction in zip(local_part(stack), self._direction(stack), strict=True):
            _apply(weight, orthogonalized(direction), stack.shape[1:], group)

    def _direction(self, param: Tensor) -> Tensor:
        """This rank's part of the momentum after the gradient (Nesterov), bfloat16."""
        state, grad = self.state[param], local_part(param.grad)  # pyright: ignore[reportArgumentType] - it has one
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)
        momentum = local_part(state["momentum_buffer"]).lerp_(grad, 1 - MOMENTUM)
        return grad.lerp(momentum, MOMENTUM).bfloat16()


def layer_matrices(model: nn.Module) -> Callable[[Tensor], bool]:
    """Say which parameters of a model Muon is for: matrices and stacks of them, but embeddings and head."""
    outer = {
        id(param) for part in model.modules() if isinstance(part, nn.Embedding) for param in part.parameters()
    }
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for part in (head, getattr(model, SCORE, None)):
        outer |= {id(param) for param in part.parameters()} if isinstance(part, nn.Module) else set()
    return lambda param: param.dim() in (2, 3) and min(param.shape[-2:]) > 1 and id(param) not in outer


def orthogonalized(matrix: Tensor) -> Tensor:
    """About the nearest matrix whose singular values are 1; they come out from 0.7 to 1.2.

    Newton and Schulz's iteration X <- a X + (b X X' + c (X X')^2) X, of the wide one of the matrix and its
    transpose.

    Args:
        matrix: (rows, columns) bfloat16.
    """
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
    """Decay a weight and change it, in place."""
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.add_(change.to(weight.device), alpha=-group["lr"] * ADAMW_RMS * math.sqrt(max(shape)))
