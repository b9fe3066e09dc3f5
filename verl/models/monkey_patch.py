# SPDX-License-Identifier: Apache-2.0
"""Every change to a transformers model, one function each; all of them modify only the given model."""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from verl.distributed.fsdp import fsdp_blocks
from verl.distributed.token_sharding import SPRows
from verl.models.attention.interface import ATTENTION
from verl.models.attention.layouts import Layout, PackedLayout
from verl.models.deferred_logits import DeferredLogits, DeferringHead
from verl.models.families.interface import Family, Kind, MediaFamily, Medium, is_part
from verl.models.families.registry import family_of
from verl.models.vision import Features, MediaShare, blocks_of, order_of


def own_config(model: PreTrainedModel) -> None:
    """Give the model copies of its configs: `from_config` keeps the object, which others may share."""
    copies: dict[int, Any] = {}  # shared by the modules, so that they keep sharing a config
    for module in model.modules():
        if isinstance(module.__dict__.get("config"), PretrainedConfig):
            module.config = copy.deepcopy(module.config, copies)


def set_attention(model: PreTrainedModel, name: str, vision_name: str) -> None:
    # transformers' own setter refuses names with "flash" unless flash-attn is installed, and would give the
    # tower and the language model the same function, so the configs are written directly.
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            is_text = module.config is model.config or module.config is model.config.get_text_config()
            module.config._attn_implementation_internal = name if is_text else vision_name


def set_packed_attention(model: PreTrainedModel) -> None:
    family = family_of(model.config)
    tower = family.tower_attention if isinstance(family, MediaFamily) else ATTENTION
    set_attention(model, ATTENTION, tower)


@contextlib.contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use transformers' own eager attention inside the block, as the reference of the self-check."""
    set_attention(model, "eager", "eager")
    try:
        yield
    finally:
        set_packed_attention(model)


def compile_blocks(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile the blocks of the language model, all of which share their code; call it before FSDP.

    The forward is compiled rather than the block, so that FSDP's hooks and checkpointing stay outside. Sizes
    are symbolic, and attention runs between the compiled parts: neither depends on the sequences' lengths.
    """
    encoder = family_of(model.config).encoder
    in_tower = {module for name, module in model.named_modules() if is_part(name, encoder)}
    blocks = [block for block in fsdp_blocks(model) if block not in in_tower]
    if not blocks:
        raise ValueError(
            f"`compile_blocks` must be false for {type(model).__name__}, which does not name its blocks"
        )
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend, dynamic=True)


def recompute_blocks(model: PreTrainedModel, share: float) -> None:
    """Recompute activations of a share of the blocks of each part, the first ones, in the backward pass.

    It reaches these when it has freed what the last ones keep, so that no more is held at once.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parts: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            parts.setdefault(name.rpartition(".")[0], []).append(module)
    if share < 1 and not parts:
        raise ValueError(
            f"`enable_gradient_checkpointing` must be true or false for {type(model).__name__}, got {share}:"
            " it does not recompute by blocks"
        )
    for blocks in parts.values():
        for block in blocks[math.ceil(share * len(blocks)) :]:
            block.gradient_checkpointing = False


def defer_head(model: PreTrainedModel) -> None:
    """Replace the class of the output embedding by `DeferringHead`; its parameters stay."""
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has an output embedding"
    head.__class__ = DeferringHead


def add_packed_forward(model: PreTrainedModel, family: Family) -> None:
    """Extend the model's forward: if `read` is passed, it returns `read(deferred logits)`."""
    # A subclass of the same name rather than a closure as `model.forward`, because FSDP2 derives its own
    # class from the model's, and copies of the model must run their own forward.
    original = type(model)
    packed = functools.wraps(original.forward)(_packed_forward(original.forward, family))
    model.__class__ = type(
        original.__name__, (original,), {"forward": packed, "__module__": original.__module__}
    )


def _packed_forward(original: Callable, family: Family) -> Callable:
    def forward(
        self: PreTrainedModel,
        *args: Any,
        read: Callable[[DeferredLogits], Any] | None = None,
        cu_seqlens: Tensor | None = None,
        packed_layout: Layout | None = None,
        local_tokens: Tensor | None = None,
        media: list[Medium] | None = None,
        media_order: dict[Kind, list[int]] | None = None,
        media_rows: dict[Kind, SPRows] | None = None,
        media_share: MediaShare | None = None,
        media_features: Features | None = None,
        only_encode: bool = False,
        **kwargs: Any,
    ) -> Any:
        layout = packed_layout
        if cu_seqlens is not None:
            blocks = blocks_of(family, self.config, kwargs["input_ids"][0])
            layout = PackedLayout.of(cu_seqlens, blocks=blocks)
        encoded: list[Tensor] = []
        if media:
            reader = _reading_media(self, family)
            encoded = reader.encode(self.get_submodule(reader.media_owner), media)
            encoded = encoded if media_share is None else media_share.gather(encoded)
        if only_encode:
            return encoded
        if read is None or layout is None:
            return original(self, *args, **kwargs)
        features: Features = media_features or {}
        if media:
            order = order_of(_reading_media(self, family), media) if media_order is None else media_order
            features = {kind: [encoded[i] for i in numbers] for kind, numbers in order.items() if numbers}
        if features and media_rows is None:
            assert local_tokens is None, "a sharded sequence comes with the rows of its media"
            found = _reading_media(self, family).media_tokens(self.config, kwargs["input_ids"][0])
            media_rows = {kind: SPRows(rows) for kind, rows in found.items()}
        if local_tokens is not None:
            kwargs["input_ids"] = kwargs["input_ids"].index_select(1, local_tokens)
            kwargs["position_ids"] = kwargs["position_ids"].index_select(-1, local_tokens)
        with _reading_features(self.get_decoder(), features, media_rows or {}), deferred(self):
            logits = original(self, *args, packed_layout=layout, use_cache=False, **kwargs).logits
        return read(_checked(logits, self))

    return forward


def _reading_media(model: PreTrainedModel, family: Family) -> MediaFamily:
    if not isinstance(family, MediaFamily):
        raise NotImplementedError(f"{type(model).__name__} does not support images or videos")
    return family


def _checked(logits: Any, model: PreTrainedModel) -> DeferredLogits:
    if not isinstance(logits, DeferredLogits):
        raise NotImplementedError(
            f"{type(model).__name__} computes its logits outside of its output embedding"
        )
    return logits


@contextlib.contextmanager
def deferred(model: PreTrainedModel) -> Iterator[None]:
    """Make the model's forward return `DeferredLogits`."""
    head: Any = model.get_output_embeddings()
    head.is_deferred = True
    try:
        yield
    finally:
        head.is_deferred = False


@contextlib.contextmanager
def _reading_features(decoder: Any, features: Features, rows: dict[Kind, SPRows]) -> Iterator[None]:
    """Replace media tokens by features, if there are any."""
    if not features:
        yield
        return
    # The models would find media tokens by masks on the device, whose ones the CPU must count.
    change = functools.partial(_changed_inputs, features, rows)
    handle = decoder.register_forward_pre_hook(change, with_kwargs=True)
    is_deepstack = hasattr(decoder, "_deepstack_process")  # Qwen3-VL only
    if is_deepstack:
        decoder._deepstack_process = _add_level
    try:
        yield
    finally:
        handle.remove()
        if is_deepstack:
            del decoder._deepstack_process


def _changed_inputs(
    features: Features, rows: dict[Kind, SPRows], decoder: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    if args:
        raise NotImplementedError(
            f"{type(decoder).__name__} is called with positional inputs, so media cannot be inserted"
        )
    changed = dict(kwargs)
    levels: list[list[tuple[SPRows, Tensor]]] = []  # of deepstack, for each the features of each kind
    for kind, parts in features.items():
        hidden = changed["inputs_embeds"]  # (1, N, D)
        first, *others = rows[kind].select(torch.cat(parts)).to(hidden.dtype).split(hidden.shape[-1], -1)
        changed["inputs_embeds"] = hidden.index_copy(1, rows[kind].local, first[None])
        levels += [[] for _ in range(len(others) - len(levels))]
        for level, values in zip(levels, others, strict=True):
            level.append((rows[kind], values))
    if levels:
        changed["visual_pos_masks"] = changed["inputs_embeds"]  # not read by `_add_level`
        changed["deepstack_visual_embeds"] = levels
    return args, changed


def _add_level(hidden: Tensor, _mask: Tensor, level: list[tuple[SPRows, Tensor]]) -> Tensor:
    """Add a deepstack level's features of each kind of media to the hidden states (1, N, D) of its tokens."""
    for rows, values in level:
        hidden = hidden.index_add(1, rows.local, values[None])
    return hidden


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the block in evaluation mode without autograd, then restore the mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
