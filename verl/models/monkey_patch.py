# SPDX-License-Identifier: Apache-2.0
"""Every change to a transformers model, one function each; all of them modify only the given model."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from verl.models.attention.interface import ATTENTION, VISION_ATTENTION
from verl.models.attention.layouts import Layout, PackedLayout
from verl.models.deferred_logits import DeferredLogits, DeferringHead
from verl.models.vision import EncodedMedia, MediaShare, encode_media

MEDIA_KEYS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


def own_config(model: PreTrainedModel) -> None:
    """Give the model copies of its configs: `from_config` keeps the object, which others may share."""
    copies: dict[int, Any] = {}  # shared by the modules, so that they keep sharing a config
    for module in model.modules():
        if isinstance(module.__dict__.get("config"), PretrainedConfig):
            module.config = copy.deepcopy(module.config, copies)


def set_attention(model: PreTrainedModel, name: str, vision_name: str) -> None:
    """Choose the attention functions of a model and of its vision tower."""
    # transformers' own setter refuses names with "flash" unless flash-attn is installed, and would give the
    # tower and the language model the same function, so the configs are written directly.
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            is_tower = getattr(model.config, "vision_config", None) is module.config
            module.config._attn_implementation_internal = vision_name if is_tower else name


@contextlib.contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use transformers' own eager attention inside the block, as the reference of the self-check."""
    set_attention(model, "eager", "eager")
    try:
        yield
    finally:
        set_attention(model, ATTENTION, VISION_ATTENTION)


def compile_blocks(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile the blocks of the language model, all of which share their code; call it before FSDP.

    The forward is compiled rather than the block, so that FSDP's hooks and checkpointing stay outside. Sizes
    are symbolic, and attention runs between the compiled parts: neither depends on the sequences' lengths.
    """
    blocks = model.get_decoder().layers
    assert isinstance(blocks, nn.ModuleList), "a language model has a list of blocks"
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend, dynamic=True)


def defer_head(model: PreTrainedModel) -> None:
    """Replace the class of the output embedding by `DeferringHead`; its parameters stay."""
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has an output embedding"
    head.__class__ = DeferringHead


def add_packed_forward(
    model: PreTrainedModel,
    media_owner: str | None,  # module that turns pixels into features; None for text models
) -> None:
    """Extend the model's forward: if `read` is passed, it returns `read(deferred logits)`."""
    # A subclass of the same name rather than a closure as `model.forward`, because FSDP2 derives its own
    # class from the model's, and copies of the model must run their own forward.
    original = type(model)
    packed = functools.wraps(original.forward)(_packed_forward(original.forward, media_owner))
    model.__class__ = type(
        original.__name__, (original,), {"forward": packed, "__module__": original.__module__}
    )


def _packed_forward(original: Callable, media_owner: str | None) -> Callable:
    def forward(
        self: PreTrainedModel,
        *args: Any,
        read: Callable[[DeferredLogits], Any] | None = None,
        cu_seqlens: Tensor | None = None,
        packed_layout: Layout | None = None,
        local_tokens: Tensor | None = None,
        image_order: list[int] | None = None,
        video_order: list[int] | None = None,
        media_share: MediaShare | None = None,
        media_features: dict[str, EncodedMedia] | None = None,
        only_encode: bool = False,
        **kwargs: Any,
    ) -> Any:
        layout = packed_layout if cu_seqlens is None else PackedLayout.of(cu_seqlens)
        media = {key: kwargs[key] for key in MEDIA_KEYS if kwargs.get(key) is not None}
        if only_encode:
            return encode_media(_media_owner(self, media_owner), media, share=media_share)
        if read is None or layout is None:
            return original(self, *args, **kwargs)
        with contextlib.ExitStack() as stack:
            if media or media_features:
                owner = _media_owner(self, media_owner)
                features = media_features or encode_media(owner, media, image_order, video_order, media_share)
                stack.enter_context(_given_features(owner, features))
                kwargs |= _pixel_arguments(features, media)
            if local_tokens is not None:
                stack.enter_context(_only_local(local_tokens, self.get_decoder()))
            stack.enter_context(deferred(self))
            logits = original(self, *args, packed_layout=layout, use_cache=False, **kwargs).logits
        return read(_checked(logits, self))

    return forward


def _media_owner(model: PreTrainedModel, name: str | None) -> nn.Module:
    if name is None:
        raise NotImplementedError(f"{type(model).__name__} does not support images or videos")
    return model.get_submodule(name)


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
def _given_features(owner: nn.Module, features: dict[str, EncodedMedia]) -> Iterator[None]:
    """Make `get_image_features` and `get_video_features` return precomputed features."""
    # Newer transformers take the features as `mm_encoder_outputs`; 5.5 has no such argument.
    for kind, encoded in features.items():
        setattr(owner, f"get_{kind}_features", lambda *_, encoded=encoded, **__: encoded)
    try:
        yield
    finally:
        for kind in features:
            delattr(owner, f"get_{kind}_features")


def _pixel_arguments(features: dict[str, EncodedMedia], media: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Return pixel arguments that make the model's forward ask for all kinds of features."""
    # If all features were computed before, any tensor serves as the pixels.
    given = (media[key] for key in ("pixel_values", "pixel_values_videos") if key in media)
    pixels = next(given, torch.empty(0))
    arguments = {"pixel_values": "image", "pixel_values_videos": "video"}
    return {key: media.get(key, pixels) if kind in features else None for key, kind in arguments.items()}


@contextlib.contextmanager
def _only_local(tokens: Tensor, decoder: nn.Module) -> Iterator[None]:
    """Run the decoder on this rank's tokens only: (n,) positions in the packed sequence."""
    # Media features have been inserted into the full packed sequence by then.
    handle = decoder.register_forward_pre_hook(functools.partial(_take_tokens, tokens), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _take_tokens(
    tokens: Tensor, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    if args:
        raise NotImplementedError(
            f"{type(decoder).__name__} is called with positional inputs, so a packed sequence cannot be"
            " sharded over ranks"
        )
    names = ("input_ids", "inputs_embeds", "visual_pos_masks")  # (1, N, ...)
    given = [name for name in names if kwargs.get(name) is not None]
    taken = kwargs | {name: kwargs[name].index_select(1, tokens) for name in given}
    taken["position_ids"] = kwargs["position_ids"].index_select(-1, tokens)
    levels = kwargs.get("deepstack_visual_embeds")  # Qwen3-VL only: (media tokens, D) each
    if levels is not None:
        is_media = kwargs["visual_pos_masks"][0]  # (N,)
        rows = (is_media.cumsum(0) - 1)[tokens][is_media[tokens]]  # of the media tokens on this rank
        taken["deepstack_visual_embeds"] = [level.index_select(0, rows) for level in levels]
    return args, taken


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
