# SPDX-License-Identifier: Apache-2.0
"""Routers of a mixture of experts: their choices, and the loss that balances them.

The balance loss of Switch Transformers (https://arxiv.org/abs/2101.03961, equations 4 to 6), over the tokens
and layers of an optimizer step, for E experts:

    loss = E sum_e f_e P_e    f_e: choices of expert e / (tokens x layers)    P_e: its mean probability

as in transformers' `load_balancing_loss_func` over the step as one padded batch: choices are the largest
probabilities of the softmax. Given f, which has no gradient, the loss is a sum over tokens.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from verl.models.layer_configs import TOP_K, experts_per_token
from verl.models.lora_weights import JOINT

LOGITS = "router_logits"  # as transformers calls what a router computes


class Router(NamedTuple):
    """A module that chooses experts."""

    name: str
    module: nn.Module
    index: int  # of the logits among its results


def routers_of(model: PreTrainedModel) -> list[Router]:
    """Return the routers whose logits transformers records; none for a dense model."""
    decoder = model.get_decoder()
    recorders = (getattr(decoder, "_can_record_outputs", None) or {}).get(LOGITS, [])
    recorders = recorders if isinstance(recorders, list) else [recorders]
    prefix = next((name for name, module in model.named_modules() if module is decoder), "")
    return [
        Router(f"{prefix}.{name}" if prefix else name, module, recorder.index)
        for name, module in decoder.named_modules()
        for recorder in recorders
        if _is_recorded(name, module, recorder)
    ]


def _is_recorded(name: str, module: nn.Module, recorder: Any) -> bool:
    where = recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{name}."
    return where and recorder.target_class is not None and isinstance(module, recorder.target_class)


def logits_per_token(model: PreTrainedModel) -> int:
    """Count the router logits of a token in all layers: the rows of the routers' matrices."""
    matrices = ([p for p in router.module.parameters() if p.ndim == 2] for router in routers_of(model))
    return sum(min(len(matrix) for matrix in each) for each in matrices if each)


def is_router_alone(module: nn.Module) -> bool:
    """Return whether a recorded module holds a router only; in a few models it is the whole block."""
    sizes = {param.shape[0] for param in module.parameters() if param.ndim > 1}
    return len(sizes) == 1 and all(param.ndim < JOINT for param in module.parameters())


class TokenOwners(NamedTuple):
    """The rows to which the tokens of a packed sequence belong; shared prompts belong to several."""

    rows: Tensor  # (M,) int64: row of each of the batch's tokens that this rank holds
    local: Tensor  # (M,) int64: its position among this rank's tokens
    weights: Tensor  # (n,) int64: rows that own each of this rank's tokens; zero for padding and dummies
    num_rows: int
    is_divided: bool  # other ranks hold the rest of the sequence


class Routes:
    """Choices of all routers in one forward pass."""

    def __init__(self, weights: Tensor, top_k: int | None, *, keeps_logits: bool, by_token: bool) -> None:
        self.weights = weights.float()  # (n,)
        self.top_k = top_k  # experts of a token; None: as the routers' results have it
        self.load: list[Tensor] = []  # of each layer (E,): tokens sent to each expert
        self.logits: list[Tensor] = []  # of each layer (n, E), with gradient
        self.by_token: Tensor | None = None  # (n, E): layers in which a token chooses each expert
        self._keeps_logits, self._counts_tokens = keeps_logits, by_token

    def add(self, result: Any, index: int) -> None:
        """Add what a router returned."""
        parts = result if isinstance(result, tuple) else (result,)
        logits = parts[index if isinstance(result, tuple) else 0]
        logits = logits.view(-1, logits.shape[-1])
        if self._keeps_logits:
            self.logits.append(logits)
        with torch.no_grad():
            sent = next((part for part in parts if part.dtype in (torch.int64, torch.int32)), None)
            self.top_k = self.top_k if sent is None else sent.shape[-1]
            chosen = self._chosen(logits)
            sent = chosen if sent is None else sent.view(len(logits), -1).long()
            self.load.append(_count(sent, self.weights, logits.shape[-1]))
            if self._counts_tokens:
                one_hot = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, chosen, 1.0)
                self.by_token = one_hot if self.by_token is None else self.by_token + one_hot

    def _chosen(self, logits: Tensor) -> Tensor:
        # (n, k): as transformers counts, without a router's groups and corrections
        if self.top_k is None:
            raise NotImplementedError(f"the number of experts of a token is not in {', '.join(TOP_K)}")
        return logits.softmax(-1).topk(self.top_k, dim=-1).indices

    @torch.no_grad()
    def choices(self) -> Tensor:
        """(E,) float64: choices of each expert in all layers, from the logits that were kept."""
        counts = [_count(self._chosen(logits), self.weights, logits.shape[-1]) for logits in self.logits]
        return torch.stack(counts).sum(0)


def _count(chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
    # (n, k), (n,) to (E,) in float64, without reading sizes from the device
    weights = weights.double()[:, None].expand_as(chosen).flatten()
    return weights.new_zeros(experts).scatter_add_(0, chosen.flatten(), weights)


class Routing:
    """Records what the routers of a model do; the model's own forward is not changed.

    Example::

        routing = Routing.of(model)
        with routing.recording(weights) as routes:
            model(...)
        routes.load  # of each layer (E,)
    """

    def __init__(self, routers: list[Router], top_k: int | None) -> None:
        self.routers, self._top_k = routers, top_k
        self._routes: Routes | None = None  # of the forward pass that runs
        for router in routers:
            router.module.register_forward_hook(self._hook(router.index))

    @classmethod
    def of(cls, model: Any, config: Any) -> "Routing | None":
        """Return None for a model without routers that transformers records."""
        routers = routers_of(model)
        return cls(routers, experts_per_token(config.get_text_config()) or None) if routers else None

    @contextmanager
    def recording(
        self, weights: Tensor, *, keeps_logits: bool = False, by_token: bool = False
    ) -> Iterator[Routes]:
        """Record the forward pass in the block, whose tokens count `weights` (n,).

        Nothing is recorded in a backward pass, which may recompute the routers.
        """
        self._routes = Routes(weights, self._top_k, keeps_logits=keeps_logits, by_token=by_token)
        try:
            yield self._routes
        finally:
            self._routes = None

    def _hook(self, index: int) -> Any:
        @torch.compiler.disable
        def hook(_module: nn.Module, _args: Any, result: Any) -> None:
            # An autograd operation here would break checkpointing: recomputation leaves it out.
            if self._routes is not None:
                self._routes.add(result, index)

        return hook


def balance_loss(routes: Iterable[Routes], choices: Tensor) -> Tensor:
    """Return the part of the balance loss that these forward passes contribute; parts add up.

    Args:
        routes: Forward passes that kept their logits.
        choices: (E,): choices of each expert by all tokens of the optimizer step, in all layers.
    """
    routes = list(routes)
    top_k = routes[0].top_k
    assert top_k is not None, "the forward pass found it"
    tokens = (choices.sum() / top_k).clamp(min=1.0)  # once for each layer
    shares = (choices / tokens).float()
    # Recomputed in the backward pass: only logits are kept, not their softmax.
    parts = [
        checkpoint(_weighted_probabilities, logits, each.weights, shares, use_reentrant=False)
        for each in routes
        for logits in each.logits
    ]
    return len(shares) * torch.stack(parts).sum() / tokens.float()


def _weighted_probabilities(logits: Tensor, weights: Tensor, shares: Tensor) -> Tensor:
    return (logits.softmax(-1, dtype=torch.float32) @ shares * weights).sum()
