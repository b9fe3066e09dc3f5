# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a model's passes, and model FLOPs utilization (MFU).

Counted from the shapes of the model's parameters, so a new architecture needs no code here. Only necessary
work counts: causal attention to earlier tokens, head products of response tokens, routed experts, no
recomputation of gradient checkpointing.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from verl.distributed.device import device_name
from verl.distributed.known_gpus import find_gpu
from verl.models.attention.interface import calls_attention
from verl.models.hub_names import meta_model
from verl.models.layer_configs import experts_per_token, layer_heads

Grid = Sequence[int]  # (time, height, width) in patches of an image or video


def peak_flops(device_name: str) -> float | None:
    """Return a device's dense bfloat16 operations per second; None for an unknown device or variant."""
    gpu = find_gpu(device_name)
    return None if gpu is None else gpu.peak


class FlopsCounter:
    """Counts the operations of forward and backward passes of one model.

    A product with a weight costs 2 operations per element and token, attention 4 per query-key pair and
    channel:

        forward = 2 N_active tokens + 2 N_head response_tokens + 4 layers heads head_dim pairs
                  + states + vision
        backward = 2 forward    (a frozen vision tower has none)

    `N_active` counts the weight matrices that a token uses: no embeddings, and k of E experts. A sequence of
    L tokens has L (L + 1) / 2 pairs, fewer with a sliding window. Layers without attention have none; those
    with a state, such as linear attention, cost every token the same, see `StateKind`.
    Encoders of audio are not counted.

    Source: "Scaling Laws for Neural Language Models", section 2.1 (https://arxiv.org/abs/2001.08361); MFU:
    PaLM, appendix B (https://arxiv.org/abs/2204.02311), which counts attention without the causal mask.

    Example::

        counter = FlopsCounter(model.config)
        counter.mfu([150, 180], seconds=1.5, num_response_tokens=256)  # 0.41 on a known GPU, None elsewhere
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        device: torch.device | str | None = None,  # None is a GPU if there is one; a CPU has no known peak
        trains_vision: bool = True,
    ) -> None:
        self._model = meta_model(config)
        self.text = TextShape(self._model)
        self.trains_vision = trains_vision
        name = device_name(device)
        self.peak = peak_flops(name) if name is not None else None

    def forward(
        self,
        lengths: Sequence[int],
        *,
        num_response_tokens: int | None = None,  # tokens that reach the head; None means all
        grids: Iterable[Grid] = (),
    ) -> float:
        """Count one forward pass over sequences of these lengths and media with these grids of patches."""
        return self.text.forward(lengths, num_response_tokens) + self._vision_forward(grids)

    def training(
        self, lengths: Sequence[int], *, num_response_tokens: int | None = None, grids: Iterable[Grid] = ()
    ) -> float:
        """Count one forward and backward pass; arguments as in `forward`."""
        text = 3 * self.text.forward(lengths, num_response_tokens)
        return text + (3 if self.trains_vision else 1) * self._vision_forward(grids)

    def mfu(self, lengths: Sequence[int], seconds: float, **options: Any) -> float | None:
        """Return the share of this device's peak that `training` reached in a time; None without a peak."""
        return None if self.peak is None else self.training(lengths, **options) / (seconds * self.peak)

    @cached_property
    def vision(self) -> "VisionShape":
        return VisionShape(self._model)

    def _vision_forward(self, grids: Iterable[Grid]) -> float:
        return sum(self.vision.forward(*grid) for grid in grids)


class TextShape:
    """Weight elements that a token uses in a language model, and its layers' attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        encoders = [*submodels(model, "vision_config"), *submodels(model, "audio_config")]
        in_encoders = {id(weight) for encoder in encoders for weight in encoder.parameters()}
        head = model.get_output_embeddings().weight  # type: ignore[union-attr] (a causal model has one)
        weights = [
            weight for weight in matrices(model) if id(weight) not in in_encoders and weight is not head
        ]
        chosen = experts_per_token(config)
        convolved = {id(module.weight) for module in model.modules() if isinstance(module, nn.Conv1d)}
        # A stack of experts is one weight (experts, in, out).
        self.active = sum(
            weight.numel() // len(weight) * chosen
            if weight.ndim == 3 and id(weight) not in convolved
            else weight.numel()
            for weight in weights
        )
        self.head = head.numel()
        self.states = sum(map(state_operations, model.modules()))
        heads, attends = layer_heads(config), attending_layers(model.get_decoder(), config.num_hidden_layers)
        self.channels = [
            each.queries * each.dim * attending for each, attending in zip(heads, attends, strict=True)
        ]
        self.windows = attention_windows(config)

    def forward(self, lengths: Sequence[int], num_response_tokens: int | None) -> float:
        tokens = sum(lengths)
        to_head = tokens if num_response_tokens is None else num_response_tokens
        attention = sum(
            channels * causal_pairs(length, window)
            for channels, window in zip(self.channels, self.windows, strict=True)
            for length in lengths
        )
        weights = 2.0 * (self.active * tokens + self.head * to_head)
        return weights + self.states * tokens + 4.0 * attention


class VisionShape:
    """Weight elements for each patch and each merged token of a vision tower that reads grids."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.vision_config
        (tower,) = submodels(model, "vision_config")
        # The layers after adjacent patches are merged.
        merged = {id(weight) for name, weight in tower.named_parameters() if "merger" in name}
        sizes = [(id(weight) in merged, weight.numel()) for weight in matrices(tower)]
        self.merge = config.spatial_merge_size**2
        self.for_each_token = sum(size for is_merged, size in sizes if is_merged)
        self.for_each_patch = sum(size for is_merged, size in sizes if not is_merged)
        self.channels = [
            weight.shape[0] // 3 for name, weight in tower.named_parameters() if name.endswith("qkv.weight")
        ]
        full = getattr(config, "fullatt_block_indexes", None)  # Qwen2.5-VL: other blocks use windows
        self.windowed = [full is not None and block not in full for block in range(len(self.channels))]
        self.window = config.window_size // config.patch_size if full is not None else 1

    def forward(self, time: int, height: int, width: int) -> float:
        """Count an image or video of this many patches; attention stays within a frame."""
        patches = time * height * width
        weights = self.for_each_patch * patches + self.for_each_token * patches // self.merge
        attention = sum(
            channels * time * (self._window_pairs(height, width) if windowed else (height * width) ** 2)
            for channels, windowed in zip(self.channels, self.windowed, strict=True)
        )
        return 2.0 * weights + 4.0 * attention

    def _window_pairs(self, height: int, width: int) -> int:
        """Count pairs within square windows, which are cut off at the edges."""

        def squares(length: int) -> int:
            return length // self.window * self.window**2 + (length % self.window) ** 2

        return squares(height) * squares(width)


def submodels(model: PreTrainedModel, name: str) -> list[PreTrainedModel]:
    """Return the submodels that are built from the part of this name of the model's config."""
    config = getattr(model.config, name, None)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [part for part in parts if config is not None and type(part.config) is type(config)]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that activations are multiplied with, which excludes embeddings."""
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [weight for weight in model.parameters() if weight.ndim > 1 and id(weight) not in lookups]


def attention_windows(config: Any) -> list[int | None]:
    """Return the sliding window of each layer in tokens; None is full attention."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if layer_type == "sliding_attention" else None for layer_type in types]


def causal_pairs(length: int, window: int | None = None) -> int:
    """Count pairs of a token and the tokens it attends to: itself and earlier ones, at most `window`."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


class StateKind(NamedTuple):
    """Layers with a state, known by their attributes; those in `sizes` give its number of values.

    Each takes as many operations as the recurrence, whatever a kernel computes instead for a chunk of tokens.
    Of the state's values for each head, 2 for a product with a vector, and 2 for adding an outer product:

        delta rule    S = a S (I - b k k') + b v k',  o = S q      6: S k, the outer product, S q
        Mamba         S = a S + x B',                 y = S C      4: the outer product, S C
        lightning     S = a S + k v',                 o = S'q      4: the outer product, S'q

    The decay `a` and other elementwise steps do not count, as the softmax of attention does not.

    Sources: "Gated Delta Networks", equation 10 (https://arxiv.org/abs/2412.06464), of which "Kimi Linear",
    equation 1 (https://arxiv.org/abs/2510.26692), decays channels apart; "Mamba", equation 2
    (https://arxiv.org/abs/2312.00752); "Lightning Attention-2", section 3.1 (https://arxiv.org/abs/2401.04658).
    """

    sizes: tuple[str, ...]
    operations: int  # for each value and token
    marks: tuple[str, ...] = ()  # further attributes


STATES = (
    StateKind(("num_v_heads", "head_v_dim", "head_k_dim"), 6),  # gated delta rule
    StateKind(("num_heads", "head_dim", "head_dim"), 6, ("forget_gate",)),  # Kimi delta attention
    StateKind(("intermediate_size", "ssm_state_size"), 4),  # Mamba, Mamba-2
    StateKind(("num_attention_heads", "head_dim", "head_dim"), 4, ("slope_rate",)),  # lightning attention
)


def attending_layers(decoder: nn.Module, num_layers: int) -> list[bool]:
    """Return for each layer of a decoder if its tokens attend to each other.

    All do in models that compute attention in a way of their own.
    """
    found = [any(map(calls_attention, layer.modules())) for layer in getattr(decoder, "layers", ())]
    return found if len(found) == num_layers and any(found) else [True] * num_layers


def state_operations(module: nn.Module) -> int:
    """Count the operations of a token in the recurrence of a layer with a state; 0 for other modules."""
    for sizes, operations, marks in STATES:
        if all(hasattr(module, name) for name in (*sizes, *marks)):
            return operations * math.prod(getattr(module, name) for name in sizes)
    return 0
