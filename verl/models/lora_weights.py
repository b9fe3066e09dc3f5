# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters as tensors: their names, and their sum with the weights that they adapt.

Names are those of peft's layers inside a model: `X.base_layer.weight` is the weight that the plain model
calls `X.weight`, and `X.lora_A.default.weight`, `X.lora_B.default.weight`, for DoRA also
`X.lora_magnitude_vector.default.weight`, adapt it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

BASE = ".base_layer."
ADAPTER = "default"  # peft's name of the only adapter
DOWN, UP, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
PARTS = (DOWN, UP, MAGNITUDE)


def is_adapter(name: str) -> bool:
    """Whether a tensor belongs to an adapter."""
    return any(f".{part}." in name for part in PARTS)


def plain_name(name: str) -> str:
    """The name in a model without adapters of a tensor that is no adapter's."""
    return name.replace(BASE, ".")


def split_name(name: str) -> tuple[str, str]:
    """The module that an adapter's tensor adapts, and which of `PARTS` it is."""
    part = next(part for part in PARTS if f".{part}." in name)
    return name.split(f".{part}.")[0], part


def saved_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a model's tensors by name those that a checkpoint needs.

    With adapters it is these, trained or not, and what is trained beside them, since the base stays in its
    own files; otherwise it is everything.
    """
    if not any(map(is_adapter, tensors)):
        return dict(tensors)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    return {name: tensor for name, tensor in tensors.items() if name in trained or is_adapter(name)}


def folded(weight: Tensor, down: Tensor, up: Tensor, scale: float, magnitude: Tensor | None = None) -> Tensor:
    """The weight that alone computes what it computes with its adapter, in float32.

        LoRA:  W + scale B A                    (https://arxiv.org/abs/2106.09685, section 4.1)
        DoRA:  m (W + scale B A) / ||W + scale B A||      (https://arxiv.org/abs/2402.09353, equation 5)

    Args:
        weight: (out, in).
        down: (rank, in), `lora_A`.
        up: (out, rank), `lora_B`.
        scale: `alpha / rank`, or `alpha / sqrt(rank)` for rsLoRA.
        magnitude: (out,), of DoRA; the norm is each row's.

    Returns:
        (out, in) float32.
    """
    adapted = torch.addmm(weight.float(), up.float(), down.float(), alpha=scale)
    if magnitude is None:
        return adapted
    norm = torch.linalg.vector_norm(adapted, dim=1, keepdim=True)
    return adapted * (magnitude.float()[:, None] / norm)


@dataclass
class _Module:
    """What has arrived of one adapted weight."""

    weight: Tensor | None = None
    parts: dict[str, Tensor] = field(default_factory=dict)

    def is_whole(self, has_magnitude: bool) -> bool:
        wanted = {DOWN, UP} | ({MAGNITUDE} if has_magnitude else set())
        return self.weight is not None and wanted <= self.parts.keys()


def fold(
    named_tensors: Iterable[tuple[str, Tensor]], scale: float, *, has_magnitude: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the plain model: adapted weights folded, in float32, the others as they are.

    An adapted weight waits until its adapter has arrived, which peft keeps beside it.

    Args:
        named_tensors: Of a model with adapters.
        scale: Of every adapter.
        has_magnitude: Whether the adapters are DoRA's.

    Raises:
        ValueError: A weight's adapter is not complete.
    """
    waiting: dict[str, _Module] = {}
    for name, tensor in named_tensors:
        if is_adapter(name):
            module, part = split_name(name)
            waiting.setdefault(module, _Module()).parts[part] = tensor
        elif name.endswith(f"{BASE}weight"):
            module = name.removesuffix(f"{BASE}weight")
            waiting.setdefault(module, _Module()).weight = tensor
        else:
            yield plain_name(name), tensor
            continue
        found = waiting[module]
        if found.is_whole(has_magnitude):
            del waiting[module]
            assert found.weight is not None, "it is whole"
            parts = found.parts
            yield (
                f"{module}.weight",
                folded(found.weight, parts[DOWN], parts[UP], scale, parts.get(MAGNITUDE)),
            )
    if waiting:
        raise ValueError(f"adapters are incomplete: {sorted(waiting)[:3]} of {len(waiting)}")
