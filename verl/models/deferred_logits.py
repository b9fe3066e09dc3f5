# SPDX-License-Identifier: Apache-2.0
"""The head of a causal language model, put off until it is known which logits are wanted.

During a training forward the output embedding returns `DeferredLogits` in place of logits. The model's own
code then scales or soft-caps them as it always does, which is only noted down, and the noted transform is
applied chunk by chunk where log-probabilities are computed. So every model's head is right without a list
of models, and whatever else a model does to its logits is refused by name.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.models.fused_log_probs import TokenLogProbs, linear_kl, linear_log_probs
from verl.models.logit_chunks import HeadLogits, LogitTransform


class DeferredLogits:
    """Logits that were never computed: hidden states, the head, and what the model did to the product."""

    UNCHANGING: ClassVar[tuple[str, ...]] = ("float", "contiguous", "to")

    def __init__(self, hidden: Tensor, head: nn.Linear, transform: LogitTransform = LogitTransform()) -> None:  # noqa: B008 (immutable)
        self.hidden, self.head, self.transform = hidden, head, transform

    def __mul__(self, factor: float) -> "DeferredLogits":
        if not isinstance(factor, int | float):
            raise NotImplementedError(
                f"the model multiplies its logits with a {type(factor).__name__}; only numbers are supported"
            )
        scale, softcap, _ = self.transform
        if softcap is None:
            return self._with(LogitTransform(scale * factor))
        # factor * softcap * tanh(scale x / softcap) has the cap and the scale multiplied alike.
        return self._with(LogitTransform(scale * factor, softcap * factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "DeferredLogits":
        if not isinstance(divisor, int | float):
            raise NotImplementedError(
                f"the model divides its logits by a {type(divisor).__name__}; only numbers are supported"
            )
        return self * (1.0 / divisor)

    def tanh(self) -> "DeferredLogits":
        """Note a soft cap of one."""
        if self.transform.softcap is not None:
            raise NotImplementedError("the model applies tanh to its logits twice, which is not supported")
        return self._with(LogitTransform(self.transform.scale, 1.0))

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Torch functions called on deferred logits: tanh and plain arithmetic."""
        known = {torch.tanh: cls.tanh, torch.mul: cls.__mul__, torch.div: cls.__truediv__}
        if function not in known or not isinstance(args[0], cls) or kwargs:
            raise NotImplementedError(
                f"the model calls {function.__name__} on its logits, which is not supported"
            )
        return known[function](*args)

    def __getattr__(self, name: str) -> Any:
        if name in self.UNCHANGING:
            return lambda *args, **kwargs: self  # a cast or a copy; what follows is float32 anyway
        raise AttributeError(
            f"the model uses `.{name}` of its logits, which is not supported without full logits"
        )

    def _with(self, transform: LogitTransform) -> "DeferredLogits":
        return DeferredLogits(self.hidden, self.head, transform)

    def head_logits(self, rows: Tensor, temperature: float = 1.0) -> HeadLogits:
        """What the logits of the packed tokens `rows` (M,) are made of."""
        weight = self.head.weight
        if weight.numel() and not weight.untyped_storage().size():
            raise RuntimeError(
                "the head's weight is not at hand after the forward pass: keep it in the root FSDP group"
            )
        hidden = self.hidden.flatten(0, 1).index_select(0, rows)
        return HeadLogits(hidden, weight, self.head.bias, self.transform._replace(temperature=temperature))

    def log_probs(
        self,
        targets: Tensor,
        rows: Tensor,
        temperature: float,
        *,
        with_entropy: bool = False,
        with_sum_squares: bool = False,
        reference: HeadLogits | None = None,
    ) -> TokenLogProbs:
        """Log-probability of `targets` (M,) under the logits of the packed tokens `rows` (M,), and more.

        Args:
            targets: Token ids.
            rows: Which packed token predicts each.
            temperature: Divides the logits.
            with_entropy: Compute the entropy too.
            with_sum_squares: Compute the sum of squared probabilities too.
            reference: Another model's logits of the same tokens: compute the KL divergence from it too.
        """
        hidden, weight, bias, transform = self.head_logits(rows, temperature)
        result = linear_log_probs(
            hidden,
            weight,
            targets,
            bias=bias,
            transform=transform,
            with_entropy=with_entropy,
            with_sum_squares=with_sum_squares,
        )
        if reference is None:
            return result
        return result._replace(kl=linear_kl(hidden, weight, reference, bias=bias, transform=transform))

    def values(self, rows: Tensor) -> Tensor:
        """Scores of the packed tokens `rows` (M,), in float32; what the model does to logits is left out."""
        hidden, weight, bias, _ = self.head_logits(rows)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        values = torch.mv(hidden.to(dtype), weight[0].to(dtype))  # not a column: FSDP wants no views
        return values if bias is None else values + bias.to(dtype)


class DeferringHead(nn.Linear):
    """An output embedding that returns `DeferredLogits` while `is_deferred` is set."""

    is_deferred = False

    def forward(self, hidden: Tensor) -> Tensor | DeferredLogits:
        if self.is_deferred:
            return DeferredLogits(hidden, self)
        return F.linear(hidden, self.weight, self.bias)
