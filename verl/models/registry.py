# SPDX-License-Identifier: Apache-2.0
"""Supported models, and their preparation for packed training.

Any causal language model that uses transformers' attention interface works without an entry here. A model
that reads images or videos needs an entry in `MODEL_TYPES`, and its positions in `position_ids`.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.attention.block_inputs import record_block_inputs
from verl.models.attention.interface import ATTENTION, VISION_ATTENTION
from verl.models.attention.kernels import CHUNKED, LAYER_TYPES, SLIDING, AttentionRule
from verl.models.attention.sequence_parallel_layouts import ring_obstacle
from verl.models.deferred_logits import DeferredLogits, DeferringHead
from verl.models.monkey_patch import (
    add_packed_forward,
    defer_head,
    deferred,
    evaluating,
    own_config,
    plain_attention,
    set_attention,
)
from verl.models.scalar_head import is_scalar
from verl.models.vision import dummy_row

CHECKED_TOKENS = 8  # at the end of each sequence, all of them past the sliding window
CHECKED_DIRECTIONS = 8  # of a scalar model's hidden states
LONGEST_CHECKED_WINDOW = 1024  # longer sequences would take noticeable time
# Mean log-probability differences that rounding explains; unknown behavior causes tenths or more.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


@dataclass(frozen=True)
class ModelType:
    """Properties that a transformers config does not contain."""

    media_owner: str | None = None  # the module with `get_image_features`; None for text models
    vision_tower: str | None = None  # the module that `freeze_vision_tower` freezes
    position_rows: int = 1  # 4 for M-RoPE: text, time, height, width


_QWEN_VL = ModelType(media_owner="model", vision_tower="model.visual", position_rows=4)

MODEL_TYPES: dict[str, ModelType] = {
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "qwen3_vl": _QWEN_VL,
    "qwen3_vl_moe": _QWEN_VL,
}


def model_type_of(config: PretrainedConfig) -> ModelType:
    """Return the entry of a config, or that of a plain text model."""
    return MODEL_TYPES.get(config.model_type, ModelType())


def prompt_sharing_obstacle(config: PretrainedConfig) -> str | None:
    """Return why a model's attention does not support shared prompts; None if it does."""
    text = config.get_text_config()
    # Gemma's models for embeddings
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return "all tokens attend to later tokens"
    return None


def check_sequence_parallel(config: PretrainedConfig, sp: SequenceParallel) -> None:
    """Raise a ValueError if the model's attention does not support this division of packed sequences."""
    text = config.get_text_config()
    if text.num_attention_heads % sp.ulysses_size:
        raise ValueError(
            f"`ulysses_size` ({sp.ulysses_size}) must divide the {text.num_attention_heads} attention heads"
            f" of {config.model_type}: choose another, or use `ring_size`"
        )
    reason = ring_obstacle(_attention_rule(text), text.max_position_embeddings) if sp.ring_size > 1 else None
    if reason is not None:
        raise ValueError(
            f"`ring_size` ({sp.ring_size}) must be 1 for {config.model_type}: in a ring, {reason}; use"
            " `ulysses_size`"
        )


def _attention_rule(text: PretrainedConfig) -> AttentionRule:
    """Return the most restrictive rule of a language model's layers."""
    types = getattr(text, "layer_types", None) or [SLIDING]
    window = getattr(text, "sliding_window", None) if SLIDING in types else None
    chunk = getattr(text, "attention_chunk_size", None) if CHUNKED in types else None
    return AttentionRule(1.0, window=window, chunk=chunk)


def prepare_model(model: PreTrainedModel) -> None:
    """Enable packed attention and the deferred head, on the meta device or not, before FSDP.

    Afterwards the model also supports the following call, under FSDP too::

        model(
            input_ids=(1, N), position_ids=(1, N) or (4, 1, N),
            cu_seqlens=(B + 1,),  # or packed_layout=…, see `verl.models.attention.layouts`
            local_tokens=(n,),  # this rank's positions in a packed sequence that is sharded over ranks
            read=lambda logits: logits.log_probs(targets, rows, temperature),  # a DeferredLogits
            pixel_values=…, image_grid_thw=…, pixel_values_videos=…, video_grid_thw=…,
            # or media_features={"image": EncodedMedia, "video": EncodedMedia}, computed before by
            # model(pixel_values=…, image_grid_thw=…, only_encode=True)
            media_rows={"image": MediaRows, "video": MediaRows},  # by default found among the input ids
        ) -> result of `read`: TokenLogProbs of (M,)

    where target `i` is predicted by the packed token `rows[i]`. A scalar model's `read` is
    `lambda logits: logits.values(rows)`.
    """
    obstacle = _obstacle(model)
    if obstacle is not None:
        raise NotImplementedError(f"{type(model).__name__} {obstacle}")
    own_config(model)
    set_attention(model, ATTENTION, VISION_ATTENTION)
    defer_head(model)
    record_block_inputs(model)
    add_packed_forward(model, model_type_of(model.config).media_owner)


def _obstacle(model: PreTrainedModel) -> str | None:
    """Describe a feature that packed training does not support."""
    text = model.config.get_text_config()
    if getattr(text, "output_router_logits", False):
        return (
            "has `output_router_logits`, which requests a router loss that is not part of the policy loss:"
            " set `worker.actor.model.override_config.output_router_logits` to false"
        )
    unknown = set(getattr(text, "layer_types", None) or []) - set(LAYER_TYPES)
    if unknown:
        return f"has layers of type {', '.join(sorted(unknown))}, which cannot be packed"
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    if not any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files):
        return "does not use transformers' attention interface, so sequences cannot be packed"
    parameters = inspect.signature(model.forward).parameters.values()
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return "takes no keyword arguments for attention, so sequences cannot be packed"
    head = model.get_output_embeddings()
    if type(head) not in (nn.Linear, DeferringHead):
        return f"has a {type(head).__name__} as its head; only a linear head is supported"
    return None


def check_model(model: PreTrainedModel) -> float:
    """Compare packed log-probabilities with the model's own padded forward; return their mean difference.

    Raises NotImplementedError if they differ by more than rounding: the model does something unsupported.
    Under FSDP all ranks call it. A scalar model, whose score may be zero everywhere, is checked at the
    score's input: hidden states projected on fixed random directions, relative to their size.
    """
    weight = next(model.parameters())
    device = weight.device_mesh.device_type if isinstance(weight, DTensor) else weight.device
    rows, media = _check_rows(model)
    rows = [row.to(device) for row in rows]
    media = {key: value.to(device) for key, value in media.items()}
    scores = is_scalar(model.config)
    with evaluating(model):
        packed = _packed(model, rows, media, _projections if scores else _log_probs)
        with plain_attention(model):
            plain, dtype = (_padded_projections if scores else _padded_log_probs)(model, rows, media)
    scale = plain.square().mean().sqrt().item() if scores else 1.0
    difference = (packed - plain).abs().mean().item() / scale
    if not difference <= TOLERANCE[dtype]:
        raise NotImplementedError(
            f"{type(model).__name__} ({model.config.model_type}) computes something that packed training does"
            f" not support: {'hidden states' if scores else 'log-probabilities'} differ by {difference:.2g}"
            f" from its own forward, at most {TOLERANCE[dtype]:g} is allowed"
        )
    return difference


def _check_rows(model: PreTrainedModel) -> tuple[list[Tensor], dict[str, Tensor]]:
    config, text = model.config, model.config.get_text_config()
    window = getattr(text, "sliding_window", None) or 0
    length = 12 if window > LONGEST_CHECKED_WINDOW else max(12, window + CHECKED_TOKENS + 1)
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    rows = [torch.randint(min(256, text.vocab_size), (size,), generator=generator) for size in (length, 9)]
    if model_type_of(config).media_owner is None:
        return rows, {}
    parts = ("image", "video", "vision_start", "vision_end")
    markers = [getattr(config, f"{part}_token_id") for part in parts]
    ordinary = min(set(range(len(markers) + 1)) - set(markers))
    rows = [row.masked_fill(torch.isin(row, torch.tensor(markers)), ordinary) for row in rows]
    image = dummy_row(config, 2, 3)
    pixels = torch.rand(image.pixel_values.shape, generator=generator)
    media = {"pixel_values": pixels, "image_grid_thw": image.image_grid_thw}
    return [torch.cat([image.input_ids, rows[0]]), rows[1]], media


def _positions(model: PreTrainedModel, positions: Tensor) -> Tensor:
    rows = model_type_of(model.config).position_rows  # M-RoPE has (4, B, T)
    return positions if rows == 1 else positions.expand(rows, *positions.shape)


def _packed(
    model: PreTrainedModel, rows: list[Tensor], media: dict[str, Tensor], read: Callable[..., Tensor]
) -> Tensor:
    """Return `read` of the predictions of the last tokens of each row: (rows x CHECKED_TOKENS, ...)."""
    tokens = torch.cat(rows)
    ends = torch.tensor([len(row) for row in rows], device=tokens.device).cumsum(0)
    before = (ends[:, None] - 1 + torch.arange(-CHECKED_TOKENS, 0, device=tokens.device)).flatten()
    positions = torch.cat([torch.arange(len(row), device=tokens.device) for row in rows])
    return model(
        input_ids=tokens[None],
        position_ids=_positions(model, positions[None]),
        cu_seqlens=nn.functional.pad(ends, (1, 0)).to(torch.int32),
        read=lambda logits: read(logits, before, tokens[before + 1]),
        **media,
    )


def _log_probs(logits: DeferredLogits, rows: Tensor, targets: Tensor) -> Tensor:
    return logits.log_probs(targets, rows, temperature=1.0).log_probs


def _projections(logits: DeferredLogits, rows: Tensor, _targets: Tensor) -> Tensor:
    return _project(logits.hidden.flatten(0, 1)[rows])


def _project(hidden: Tensor) -> Tensor:
    """Project hidden states (M, H) on fixed random unit vectors: (M, CHECKED_DIRECTIONS)."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(hidden.shape[-1], CHECKED_DIRECTIONS, generator=generator)
    return hidden.float() @ nn.functional.normalize(directions, dim=0).to(hidden.device)


def _padded(model: PreTrainedModel, rows: list[Tensor], media: dict[str, Tensor]) -> tuple[Any, Tensor]:
    """Return the model's own logits of left-padded rows at the last columns, and the padded ids."""
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    columns = torch.arange(padded.shape[1], device=padded.device)
    starts = torch.tensor([padded.shape[1] - len(row) for row in rows], device=padded.device)[:, None]
    few = "logits_to_keep" in inspect.signature(model.forward).parameters
    logits = model(
        input_ids=padded,
        attention_mask=(columns >= starts).long(),
        position_ids=_positions(model, (columns - starts).clamp(min=0)),
        use_cache=False,
        **media,
        **({"logits_to_keep": CHECKED_TOKENS + 1} if few else {}),
    ).logits
    return logits, padded


def _padded_log_probs(
    model: PreTrainedModel, rows: list[Tensor], media: dict[str, Tensor]
) -> tuple[Tensor, torch.dtype]:
    logits, padded = _padded(model, rows, media)
    logits = logits[:, -CHECKED_TOKENS - 1 : -1]
    log_p = torch.log_softmax(logits.float(), -1)
    return log_p.gather(-1, padded[:, -CHECKED_TOKENS:, None]).flatten(), logits.dtype


def _padded_projections(
    model: PreTrainedModel, rows: list[Tensor], media: dict[str, Tensor]
) -> tuple[Tensor, torch.dtype]:
    with deferred(model):
        logits, _ = _padded(model, rows, media)
    hidden = logits.hidden[:, -CHECKED_TOKENS - 1 : -1].flatten(0, 1)
    return _project(hidden), hidden.dtype
