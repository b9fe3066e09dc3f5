# SPDX-License-Identifier: Apache-2.0
"""An LM head that defers computing logits until they are needed.

During a training forward the output embedding returns `DeferredLogits`. The scaling and soft-capping that the
model's own code applies to them is recorded, and applied chunk by chunk where log-probabilities are computed.
So the head of any model works without a list of models, and all other operations on logits are refused by
name.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.models.fused_log_probs import TokenLogProbs, linear_kl, linear_log_probs
from verl.models.head.logit_chunks import HeadLogits, LogitTransform


class DeferredLogits:
    """Hidden states, the head, and the transform of their product."""

    UNCHANGING: ClassVar[tuple[str, ...]] = ("float", "contiguous", "to")

    def __init__(self, hidden: Tensor, head: Any, transform: LogitTransform = LogitTransform()) -> None:  # noqa: B008 (immutable)
        self.hidden, self.head, self.transform = hidden, head, transform

    def __mul__(self, factor: float) -> "DeferredLogits":
        _check_number(factor, "multiplies its logits with")
        scale, softcap, _ = self.transform
        if softcap is None:
            return self._with(LogitTransform(scale * factor))
        # factor * softcap * tanh(scale x / softcap): both the cap and the scale are multiplied.
        return self._with(LogitTransform(scale * factor, softcap * factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "DeferredLogits":
        _check_number(divisor, "divides its logits by")
        return self * (1.0 / divisor)

    def tanh(self) -> "DeferredLogits":
        # Recorded as a soft cap of one.
        if self.transform.softcap is not None:
            raise NotImplementedError("the model applies tanh to its logits twice, which is not supported")
        return self._with(LogitTransform(self.transform.scale, 1.0))

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        known = {torch.tanh: cls.tanh, torch.mul: cls.__mul__, torch.div: cls.__truediv__}
        if function not in known or not isinstance(args[0], cls) or kwargs:
            raise NotImplementedError(
                f"the model calls {function.__name__} on its logits, which is not supported"
            )
        return known[function](*args)

    def __getattr__(self, name: str) -> Any:
        if name in self.UNCHANGING:
            return lambda *args, **kwargs: self  # a cast or a copy; logits are float32 anyway
        raise AttributeError(
            f"the model uses `.{name}` of its logits, which is not supported with deferred logits"
        )

    def _with(self, transform: LogitTransform) -> "DeferredLogits":
        return DeferredLogits(self.hidden, self.head, transform)

    def head_logits(self, rows: Tensor, temperature: float = 1.0) -> HeadLogits:
        """Return the factors of the logits of the packed tokens `rows` (M,)."""
        weight = self.head.weight
        if weight.numel() and not weight.untyped_storage().size():
            raise RuntimeError(
                "the head's weight is not available after the forward pass: keep it in the root FSDP group"
            )
        hidden = self.hidden.flatten(0, 1).index_select(0, rows)
        return self.head.factors(hidden, self.transform._replace(temperature=temperature))

    def log_probs(
        self,
        targets: Tensor,
        rows: Tensor,
        temperature: float,
        *,
        with_entropy: bool = False,
        with_sum_squares: bool = False,
        reference: HeadLogits | None = None,  # compute the KL divergence from these logits
    ) -> TokenLogProbs:
        """Compute log-probabilities of `targets` (M,) as predicted by the packed tokens `rows` (M,)."""
        policy = self.head_logits(rows, temperature)
        options = {"with_entropy": with_entropy, "with_sum_squares": with_sum_squares}
        result = linear_log_probs(policy, targets, **options)
        return result if reference is None else result._replace(kl=linear_kl(policy, reference))

    def values(self, rows: Tensor) -> Tensor:
        """Compute float32 scores of the packed tokens `rows` (M,), without the model's logit transform."""
        hidden, weight, bias, *_ = self.head_logits(rows)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        values = torch.mv(hidden.to(dtype), weight[0].to(dtype))  # not a column: FSDP does not support views
        return values if bias is None else values + bias.to(dtype)


def _check_number(value: Any, action: str) -> None:
    if not isinstance(value, int | float):
        raise NotImplementedError(f"the model {action} a {type(value).__name__}; only numbers are supported")


class DeferringHead(nn.Linear):
    """An output embedding that returns `DeferredLogits` while `is_deferred` is set."""

    is_deferred = False

    def forward(self, hidden: Tensor) -> Tensor | DeferredLogits:
        if self.is_deferred:
            return DeferredLogits(hidden, self)
        return F.linear(hidden, self.weight, self.bias)

    def factors(self, hidden: Tensor, transform: LogitTransform) -> HeadLogits:
        return HeadLogits(hidden, self.weight, self.bias, transform)
