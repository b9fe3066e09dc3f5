# SPDX-License-Identifier: Apache-2.0
"""Every change made to a transformers model, one function each; all of them touch the given model only.

Used by `verl.models.registry.prepare_model` and `check_model`.
"""

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
    copies: dict[int, Any] = {}  # shared over the modules, so that what was one config stays one
    for module in model.modules():
        if isinstance(module.__dict__.get("config"), PretrainedConfig):
            module.config = copy.deepcopy(module.config, copies)


def set_attention(model: PreTrainedModel, name: str, vision_name: str) -> None:
    """Choose the attention function of a model and of its vision tower.

    transformers' own setter refuses names with "flash" in them unless flash-attn is installed, and would
    give the tower and the language model the same function, so the configs are written directly.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            is_tower = getattr(model.config, "vision_config", None) is module.config
            module.config._attn_implementation_internal = vision_name if is_tower else name


@contextlib.contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model with transformers' own eager attention and padded rows, as the self-check's reference."""
    set_attention(model, "eager", "eager")
    try:
        yield
    finally:
        set_attention(model, ATTENTION, VISION_ATTENTION)


def defer_head(model: PreTrainedModel) -> None:
    """Let the output embedding put its product off, see `causal_head`; its parameters stay."""
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has an output embedding"
    head.__class__ = DeferringHead


def add_packed_forward(model: PreTrainedModel, media_owner: str | None) -> None:
    """Give the model a forward that returns what `read` makes of its deferred logits when that is passed.

    Otherwise it is unchanged.

    The class is replaced by a subclass of the same name rather than `model.forward` by a closure, because
    FSDP2 derives its own class from the one it finds, and copies of the model must run their own forward.

    Args:
        model: With a deferring head.
        media_owner: Attribute of the module that turns pixels into features; None for text models.
    """
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
        if cu_seqlens is not None:
            packed_layout = PackedLayout.of(cu_seqlens)
        media = {key: kwargs[key] for key in MEDIA_KEYS if kwargs.get(key) is not None}
        if only_encode:
            return encode_media(self.get_submodule(media_owner or ""), media, share=media_share)
        if read is None or packed_layout is None:
            return original(self, *args, **kwargs)
        with contextlib.ExitStack() as stack:
            if media or media_features:
                if media_owner is None:
                    raise NotImplementedError(f"{type(self).__name__} is not known to read media")
                owner = self.get_submodule(media_owner)
                features = media_features or encode_media(owner, media, image_order, video_order, media_share)
                stack.enter_context(_given_features(owner, features))
                kwargs |= _told_of(features, media)
            if local_tokens is not None:
                stack.enter_context(_running_only(local_tokens, self.get_decoder()))
            stack.enter_context(deferred(self))
            logits = original(self, *args, packed_layout=packed_layout, use_cache=False, **kwargs).logits
        if not isinstance(logits, DeferredLogits):
            raise NotImplementedError(
                f"{type(self).__name__} computes its logits outside of its output embedding"
            )
        return read(logits)

    return forward


@contextlib.contextmanager
def deferred(model: PreTrainedModel) -> Iterator[None]:
    """The model's forward gives `DeferredLogits` as its logits."""
    head: Any = model.get_output_embeddings()
    head.is_deferred = True
    try:
        yield
    finally:
        head.is_deferred = False


@contextlib.contextmanager
def _given_features(owner: nn.Module, features: dict[str, EncodedMedia]) -> Iterator[None]:
    """Let `get_image_features` and `get_video_features` return what has been computed already.

    Newer transformers take the features as `mm_encoder_outputs`; 5.5 has no such argument.
    """
    for kind, encoded in features.items():
        setattr(owner, f"get_{kind}_features", functools.partial(_give, encoded))
    try:
        yield
    finally:
        for kind in features:
            delattr(owner, f"get_{kind}_features")


def _told_of(features: dict[str, EncodedMedia], media: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Pixels for a forward that asks for the features of what it has pixels of: of all kinds there are.

    Where all features were computed before, any tensor stands for the pixels.
    """
    given = (media[key] for key in ("pixel_values", "pixel_values_videos") if key in media)
    pixels = next(given, torch.empty(0))
    arguments = {"pixel_values": "image", "pixel_values_videos": "video"}
    return {key: media.get(key, pixels) if kind in features else None for key, kind in arguments.items()}


def _give(encoded: EncodedMedia, *_: Any, **__: Any) -> EncodedMedia:
    return encoded


@contextlib.contextmanager
def _running_only(tokens: Tensor, decoder: nn.Module) -> Iterator[None]:
    """The decoder runs some tokens of the line it is given: those that this rank holds, (n,) int64 places.

    Media have been put into the whole line by then.
    """
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
            f"{type(decoder).__name__} is called without naming its inputs, so a line cannot be divided"
            " over ranks"
        )
    taken = dict(kwargs)
    for name in ("input_ids", "inputs_embeds", "visual_pos_masks"):  # (1, N, ...)
        if kwargs.get(name) is not None:
            taken[name] = kwargs[name].index_select(1, tokens)
    taken["position_ids"] = kwargs["position_ids"].index_select(-1, tokens)
    levels = kwargs.get("deepstack_visual_embeds")  # Qwen3-VL only: (media tokens, D) each
    if levels is not None:
        is_media = kwargs["visual_pos_masks"][0]  # (N,)
        rows = (is_media.cumsum(0) - 1)[tokens][is_media[tokens]]  # of the media tokens among the taken ones
        taken["deepstack_visual_embeds"] = [level.index_select(0, rows) for level in levels]
    return args, taken


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without autograd; its mode comes back afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
