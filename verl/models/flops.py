# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a model's passes, for model FLOPs utilization (MFU).

Counted from the shapes of the model's parameters, so a new architecture needs no code here. Only necessary
work counts: causal attention to earlier tokens, a shared prompt once, head products of response tokens,
routed experts, gradients of what is trained and of what lies between it and the loss; no recomputation of
gradient checkpointing.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedModel

from verl.models.attention.interface import calls_attention
from verl.models.families.interface import MediaFamily, Medium, Sense, is_part
from verl.models.families.registry import family_of
from verl.models.layer_configs import experts_per_token, layer_heads

LAYER = re.compile(r"\blayers\.(\d+)\.")
QUERIES = re.compile(r"(?:(qkv)|q_proj|query|wq)(?:\.base_layer)?\.weight")  # of an encoder's layer
AFTER_MERGING = re.compile(r"merger|projector")  # modules of encoders that run for each feature

Group = tuple[int, Sequence[int]]  # tokens of a prompt, or of a whole sequence; of responses that share it


class PackedWork(NamedTuple):
    """Tokens of a pass."""

    groups: Sequence[Group]
    to_head: int | None = None  # tokens that reach the head; None means all
    ranks: int = 1  # that share the groups


class FlopsCounter:
    """Counts the operations of forward and backward passes of one model.

    A product with a weight costs 2 operations per element and token, attention 4 per query-key pair and
    channel:

        forward  = 2 N_active tokens + 2 N_head tokens_to_head + 4 layers heads head_dim pairs
                   + states + encoders
        backward = the same for the gradients of inputs, where something before is trained,
                   and for those of trained weights

    `N_active` counts the weight matrices that a token uses: no embeddings, and k of E experts. A sequence of
    L tokens has L (L + 1) / 2 pairs, fewer with a sliding window. Layers without attention have none; those
    with a state, such as linear attention, cost every token the same, see `StateKind`.

    Source: "Scaling Laws for Neural Language Models", section 2.1 (https://arxiv.org/abs/2001.08361); MFU:
    PaLM, appendix B (https://arxiv.org/abs/2204.02311), which counts attention without the causal mask.

    Example::

        counter = FlopsCounter(model)
        counter.add(PackedWork([(150, ()), (20, (10, 12))], to_head=30))  # the second is a prompt of two
        counter.done
    """

    def __init__(self, model: PreTrainedModel, ranks: int = 1) -> None:
        """Read the shapes of a model on any device; `requires_grad` marks what is trained.

        `ranks` share each layer.
        """
        family, self.done, self.ranks = family_of(model.config), 0.0, ranks
        self.encoders: dict[Sense, EncoderShape] = {}
        if isinstance(family, MediaFamily):
            self.encoders = {sense: EncoderShape(model, family, sense) for sense in family.encoders}
        self.text = TextShape(model, any(encoder.is_trained for encoder in self.encoders.values()))

    def count(self, work: PackedWork, media: Iterable[Medium] = ()) -> tuple[float, float]:
        """Count this rank's part of a forward and of a backward pass; it encodes all of `media`."""
        forward, backward = (
            part / (work.ranks * self.ranks) for part in self.text.count(work.groups, work.to_head)
        )
        for medium in media:
            own = self.encoders["audio" if medium.kind == "audio" else "vision"].count(medium)
            forward, backward = forward + own[0], backward + own[1]
        return forward, backward

    def add(self, work: PackedWork, media: Iterable[Medium] = ()) -> None:
        """Add a pass to `done`, with the backward pass if autograd records it."""
        forward, backward = self.count(work, media)
        self.done += forward + (backward if torch.is_grad_enabled() else 0.0)


@dataclass
class Operations:
    """Operations of a token or patch in weights, or of a pair in attention."""

    forward: float = 0.0
    backward: float = 0.0

    def add(self, size: float, *, is_reached: bool, is_trained: bool) -> None:
        """Add a weight of this size; its input has a gradient if something before it is trained."""
        self.forward += 2 * size
        self.backward += 2 * size * (is_reached + is_trained)


class TextShape:
    """Operations of a token in the weights of a language model, and its layers' attention."""

    def __init__(self, model: PreTrainedModel, is_reached: bool) -> None:
        config, encoder = model.config.get_text_config(), family_of(model.config).encoder
        output = model.get_output_embeddings()
        head = None if output is None else output.weight
        chosen, counted = experts_per_token(config), {id(weight) for weight in matrices(model)}
        shares = used_shares(model, chosen)
        reached = [is_reached] * config.num_hidden_layers
        self.token, self.head = Operations(), Operations()
        for name, weight in model.named_parameters():
            if is_part(name, encoder):
                continue
            if id(weight) in counted and weight is not head:
                size = weight.numel() * shares.get(id(weight), 1.0)
                self.token.add(size, is_reached=is_reached, is_trained=weight.requires_grad)
            is_reached |= weight.requires_grad
            found = LAYER.search(name)
            if found is not None and int(found[1]) < len(reached):
                reached[int(found[1])] = is_reached
        if head is not None:
            self.head.add(head.numel(), is_reached=is_reached, is_trained=head.requires_grad)
        self.states = sum(map(state_operations, model.modules()))
        self.is_reached = is_reached
        heads, attends = layer_heads(config), attending_layers(model.get_decoder(), config.num_hidden_layers)
        self.pair: dict[int | None, Operations] = {}  # of a query and a key in all layers, by window
        for layer, window in enumerate(attention_windows(config)):
            pair = self.pair.setdefault(window, Operations())
            channels = heads[layer].queries * heads[layer].dim * attends[layer]
            pair.forward += 4 * channels
            pair.backward += 8 * channels * reached[layer]

    def count(self, groups: Sequence[Group], to_head: int | None) -> tuple[float, float]:
        """Count forward and backward pass."""
        tokens = sum(prompt + sum(responses) for prompt, responses in groups)
        to_head = tokens if to_head is None else to_head
        states = self.states * tokens
        forward = self.token.forward * tokens + self.head.forward * to_head + states
        backward = self.token.backward * tokens + self.head.backward * to_head + 2 * states * self.is_reached
        for window, pair in self.pair.items():
            pairs = sum(group_pairs(*group, window) for group in groups)
            forward += pair.forward * pairs
            backward += pair.backward * pairs
        return forward, backward


class EncoderShape:
    """Operations of an encoder of images and videos, or of audio, for each patch and each feature.

    Each frame or tile attends to itself.
    """

    def __init__(self, model: PreTrainedModel, family: MediaFamily, sense: Sense) -> None:
        self.config, self.family, parts = model.config, family, family.encoders[sense]
        self.patches_per_feature = family.patches_per_token(model.config, sense)
        self.patch, self.feature = Operations(), Operations()
        self.channels: list[int] = []  # of each layer's attention
        counted, self.is_trained = {id(weight) for weight in matrices(model)}, False
        for name, weight in model.named_parameters():
            if not is_part(name, parts):
                continue
            if id(weight) in counted:
                is_merged = AFTER_MERGING.search(name) or not is_part(name, parts[:1])
                operations = self.feature if is_merged else self.patch
                operations.add(weight.numel(), is_reached=self.is_trained, is_trained=weight.requires_grad)
            self.is_trained |= weight.requires_grad
            queries = QUERIES.search(name)
            if queries is not None:
                self.channels.append(weight.shape[0] // (3 if queries[1] else 1))
        vision: Any = getattr(model.config, "vision_config", None)
        full = getattr(vision, "fullatt_block_indexes", None) if sense == "vision" else None
        self.windowed = [full is not None and layer not in full for layer in range(len(self.channels))]
        self.window = 1 if full is None else vision.window_size // vision.patch_size  # in patches

    def count(self, medium: Medium) -> tuple[float, float]:
        """Count forward and backward pass over a medium."""
        units, size = self.family.units(self.config, medium.facts), self.patches_per_feature
        features, patches = sum(units), sum(units) * size
        full = windowed = sum((unit * size) ** 2 for unit in units)
        if any(self.windowed):
            time, height, width = medium.facts["grid_thw"]
            windowed = time * window_pairs(height, width, self.window)
        pairs = 4.0 * sum(
            channels * (windowed if has_window else full)
            for channels, has_window in zip(self.channels, self.windowed, strict=True)
        )
        forward = self.patch.forward * patches + self.feature.forward * features + pairs
        backward = self.patch.backward * patches + self.feature.backward * features
        return forward, backward + 2 * pairs * self.is_trained


def window_pairs(height: int, width: int, window: int) -> int:
    """Count pairs within square windows, which are cut off at the edges."""

    def squares(length: int) -> int:
        return length // window * window**2 + (length % window) ** 2

    return squares(height) * squares(width)


def used_shares(model: nn.Module, chosen: int) -> dict[int, float]:
    """Return the share that a token uses of each stack of experts (experts, in, out) and of its adapters."""
    convolved = {id(module.weight) for module in model.modules() if isinstance(module, nn.Conv1d)}
    stacks = [weight for weight in model.parameters() if weight.ndim == 3 and id(weight) not in convolved]
    shares = {id(weight): chosen / len(weight) for weight in stacks}
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            adapters = (*module.lora_A.parameters(), *module.lora_B.parameters())
            share = chosen / module.num_experts if module.num_experts > 1 else 1.0
            shares |= {id(weight): share for weight in adapters}
    return shares


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


def group_pairs(prompt: int, responses: Sequence[int], window: int | None = None) -> int:
    """Count pairs of a prompt and the responses that follow it."""
    alone = causal_pairs(prompt, window)
    return alone + sum(causal_pairs(prompt + response, window) - alone for response in responses)


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
