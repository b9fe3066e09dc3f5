# SPDX-License-Identifier: Apache-2.0
"""Routers of a mixture of experts: what they choose, the loss that balances them, and the replay of choices.

The balance loss of Switch Transformers (https://arxiv.org/abs/2101.03961, equations 4 to 6), over the tokens
and layers of an optimizer step, for E experts:

    loss = E sum_e f_e P_e    f_e: choices of expert e / (tokens x layers)    P_e: its mean probability

as in transformers' `load_balancing_loss_func` over the step as one padded batch: choices are the largest
probabilities of the softmax. Given f, which has no gradient, the loss is a sum over tokens.

A router whose forward takes the `topk` of a score for each expert is observed at that call. Where a token's
experts are given, the call returns these with their live scores, so what the model does with the scores
(normalization, scaling, the cast of dtypes) remains its own, and the router keeps its gradient. Replay of
routes: R3 (https://arxiv.org/abs/2510.11370), and R2 of https://arxiv.org/abs/2507.18071, section 5.3, which
replays the choices of the policy from before the update.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from verl.models.layer_configs import EXPERTS, TOP_K, experts_per_layer, experts_per_token
from verl.models.lora_weights import JOINT
from verl.models.mixture.routes import route_dtype, unrouted

LOGITS = "router_logits"  # as transformers calls what a router computes
# Arguments of routers' forwards: what is added to the scores before the choice, (E,).
BIASES = ("expert_bias", "e_score_correction_bias")
TOP_K_CALLS = (torch.topk, Tensor.topk)


class Router(NamedTuple):
    """A module that chooses experts."""

    name: str
    module: nn.Module
    index: int  # of the logits among its results


def routers_of(model: Any) -> list[Router]:  # a Any, possibly sharded
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


def logits_per_token(model: Any) -> int:
    """Count the router logits of a token in all layers: the rows of the routers' matrices."""
    matrices = ([p for p in router.module.parameters() if p.ndim == 2] for router in routers_of(model))
    return sum(min(len(matrix) for matrix in each) for each in matrices if each)


def is_router_alone(module: nn.Module) -> bool:
    """Return whether a recorded module holds a router only; in a few models it is the whole block."""
    sizes = {param.shape[0] for param in module.parameters() if param.ndim > 1}
    return len(sizes) == 1 and all(param.ndim < JOINT for param in module.parameters())


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
    def of(cls, model: Any) -> "Routing | None":
        """Return None for a model without routers that transformers records."""
        routers = routers_of(model)
        return cls(routers, experts_per_token(model.config.get_text_config()) or None) if routers else None

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


@dataclass
class ChoicePass:
    """One forward pass through the routers."""

    given: Tensor | None = None  # (n, L, k) routes to compare with, and to replay with `replays`
    replays: bool = False
    records: bool = False
    chosen: dict[int, Tensor] = field(default_factory=dict)  # by layer: (n, k) of `route_dtype`, if recorded
    # (n,) float32: how many of a token's experts in `given` its routers choose themselves, over all layers
    matches: Tensor | None = None

    def use(self, layer: int, scores: Tensor, live: Any) -> Any:
        """Return the result of a router's topk, (values, indices) (n, k) of `scores` (n, E)."""
        used = live
        if self.given is not None:
            assert len(self.given) == len(scores), "routers get the tokens of the pass"
            given = self.given[:, layer]  # (n, k)
            is_known = given[:, :1] != unrouted(given.dtype)
            experts = given.long()
            self._compare(experts, live.indices, is_known[:, 0])
            if self.replays:
                indices = torch.where(is_known, experts, live.indices)
                used = torch.return_types.topk((scores.gather(-1, indices), indices))
        if self.records:
            self.chosen[layer] = used.indices.detach().to(route_dtype(scores.shape[-1]))
        return used

    def again(self) -> "ChoicePass":
        """Return the pass as the backward pass repeats its layers: nothing is counted twice."""
        return replace(self, records=False, chosen={}, matches=None)

    def routes(self) -> Tensor:
        """(n, L, k): the experts that were used."""
        return torch.stack([self.chosen[layer] for layer in sorted(self.chosen)], 1)

    def known(self) -> Tensor:
        """(n,) float32: experts in `given` of each token, over all layers."""
        assert self.given is not None, "there is something to compare with"
        is_known = self.given[:, 0, 0] != unrouted(self.given.dtype)
        return is_known.float() * (self.given.shape[1] * self.given.shape[2])

    @torch.no_grad()
    def _compare(self, experts: Tensor, live: Tensor, is_known: Tensor) -> None:
        found = (live[:, :, None] == experts[:, None, :]).any(-1).sum(-1) * is_known
        self.matches = found.float() if self.matches is None else self.matches + found


class ExpertChoices:
    """Observes the routers of a model; without a running pass they behave as usual.

    Example::

        choices = ExpertChoices(model)
        with choices.running(ChoicePass(given=routes, replays=True)) as found:
            model(...)
        found.matches  # (n,)
    """

    def __init__(self, model: Any) -> None:
        self.routers = routers_of(model)
        assert self.routers, "a dense model has no experts to choose"
        text = model.get_decoder().config.get_text_config()
        self.experts = experts_per_layer(text)
        shape = (0, len(self.routers), experts_per_token(text))
        self.no_routes = torch.empty(shape, dtype=route_dtype(self.experts))  # (0, L, k): shape and dtype
        self._pass: ChoicePass | None = None
        for number, router in enumerate(self.routers):
            router.module.forward = self._observed(router.module, number)
        for module in model.modules():
            checkpointed = getattr(module, "_gradient_checkpointing_func", None)
            if checkpointed is not None:
                module._gradient_checkpointing_func = functools.partial(
                    checkpointed, context_fn=self._checkpoint_contexts
                )

    @contextmanager
    def running(self, forward_pass: ChoicePass) -> Iterator[ChoicePass]:
        """Observe the forward pass in the block; checkpointed blocks repeat it in the backward pass."""
        before, self._pass = self._pass, forward_pass
        try:
            yield forward_pass
        finally:
            self._pass = before

    def _checkpoint_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        # of a block's forward pass, and of its repetition
        current = self._pass
        return nullcontext(), nullcontext() if current is None else self.running(current.again())

    def _observed(self, module: nn.Module, number: int) -> Callable[..., Any]:
        original = module.forward

        @torch.compiler.disable
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            current = self._pass
            if current is None:
                return original(*args, **kwargs)
            observer = _TopK(self.experts, functools.partial(current.use, number))
            with observer:
                result = original(*args, **kwargs)
            if observer.calls != 1:
                raise RuntimeError(
                    f"{type(module).__name__} chose experts by {observer.calls} topk over all experts, and"
                    " one is needed: set `worker.actor.router_replay=off`"
                )
            return result

        return forward


class _TopK(TorchFunctionMode):
    """Hands the `topk` over the experts of each token to a function, which returns its result."""

    # entered inside the router: checkpointing repeats blocks on another thread, where no mode is active

    def __init__(self, experts: int, use: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.experts, self.use, self.calls = experts, use, 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # a router of grouped experts also takes the best of each group (n, groups, E / groups), and of groups
        if func not in TOP_K_CALLS or args[0].ndim != 2 or args[0].shape[1] != self.experts:
            return result
        self.calls += 1
        return self.use(args[0], result)


def replay_obstacle(model: Any) -> str | None:
    """Return why the experts of a model's tokens cannot be observed and replayed; None if they can.

    Args:
        model: Not sharded; it may be empty. A copy of each kind of router runs on CPU.
    """
    routers, text = routers_of(model), model.config.get_text_config()
    if not routers:
        return f"{type(model).__name__} is no mixture of experts whose routers transformers records"
    experts, kinds = experts_per_layer(text), {type(router.module): router.module for router in routers}
    if not experts or not experts_per_token(text):
        return f"the numbers of experts are not in {', '.join((*EXPERTS, *TOP_K))}"
    for kind, module in kinds.items():
        shapes = (1, 2, text.hidden_size), (2, text.hidden_size)
        if not any(_takes_one_topk(module, torch.zeros(shape), experts) for shape in shapes):
            return f"{kind.__name__} does not choose experts by one topk of a score for each"
    return None


def route_bytes(model: Any) -> int:
    """Return the bytes of a token's routes; 0 if they cannot be replayed."""
    if replay_obstacle(model) is not None:
        return 0
    text = model.config.get_text_config()
    numbers = len(routers_of(model)) * experts_per_token(text)
    return numbers * route_dtype(experts_per_layer(text)).itemsize


def check_replay(model: Any, mode: str) -> None:
    """Raise `ValueError` if `worker.actor.router_replay` is on and the model, not sharded, cannot replay."""
    reason = None if mode == "off" else replay_obstacle(model)
    if reason is not None:
        raise ValueError(f"`worker.actor.router_replay` must be 'off', got {mode!r}: {reason}")


def _takes_one_topk(module: nn.Module, hidden: Tensor, experts: int) -> bool:
    alone = copy.deepcopy(module).to_empty(device="cpu").float()
    names = inspect.signature(module.forward).parameters
    given = {name: torch.zeros(experts) for name in names if name in BIASES}
    observer = _TopK(experts, lambda _scores, live: live)
    try:
        with torch.no_grad(), observer:
            alone(hidden, **given)
    except (TypeError, RuntimeError, ValueError, IndexError):  # it is more than a router
        return False
    return observer.calls == 1
