# SPDX-License-Identifier: Apache-2.0
"""Supported models, and their preparation for packed training.

Any model that uses transformers' attention interface may work; the start compares it with its own forward.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from verl.distributed.device import to_device
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.attention.interface import calls_attention, record_block_inputs
from verl.models.attention.kernels import CHUNKED, LAYER_TYPES, SLIDING, AttentionRule
from verl.models.attention.sequence_parallel_layouts import ring_obstacle
from verl.models.deferred_logits import DeferredLogits, DeferringHead
from verl.models.families.interface import WHAT_TO_WRITE, MediaFamily, Medium, needs_family
from verl.models.families.registry import family_of, is_named
from verl.models.linear_attention.layers import (
    STATE_TYPES,
    linear_layers,
    pack_linear_layers,
    row_layers,
    run_whole_rows,
)
from verl.models.monkey_patch import (
    add_packed_forward,
    defer_head,
    deferred,
    evaluating,
    own_config,
    plain_attention,
    set_packed_attention,
)
from verl.models.scalar_head import is_scalar

WITHOUT_MIXING = frozenset({"mlp", "moe"})  # transformers' names of layers where tokens do not meet
CHECKED_TOKENS = 8  # at the end of each sequence, all of them past the sliding window
CHECKED_DIRECTIONS = 8  # of a scalar model's hidden states
LONGEST_CHECKED_WINDOW = 1024  # longer sequences would take noticeable time
# Mean log-probability differences that rounding explains; unknown behavior causes tenths or more.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
# The same of a model that is compared with itself: what its own rounding changes is added, times NOISE.
FLOOR = TOLERANCE | {torch.bfloat16: 0.02, torch.float16: 0.005}
NOISE = 3.0  # of a right model, the difference is 0.1 to 1.9 times that of its own rounding


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
    heads_of = {"attention heads": text.num_attention_heads}
    if "linear_attention" in _layer_types(text):
        linear = getattr(text, "linear_num_value_heads", None) or getattr(text, "linear_num_heads", 0)
        heads_of["heads of the linear attention layers"] = linear
    for name, heads in heads_of.items():
        if heads % sp.ulysses_size:
            other = "" if _layer_types(text) & STATE_TYPES else ", or use `ring_size`"
            raise ValueError(
                f"`ulysses_size` ({sp.ulysses_size}) must divide the {heads} {name} of {config.model_type}:"
                f" choose another{other}"
            )
    reason = _ring_obstacle(config) if sp.ring_size > 1 else None
    if reason is not None:
        raise ValueError(
            f"`ring_size` ({sp.ring_size}) must be 1 for {config.model_type}: in a ring, {reason}; use"
            " `ulysses_size`"
        )


def _ring_obstacle(config: PretrainedConfig) -> str | None:
    family, text = family_of(config), config.get_text_config()
    if _layer_types(text) & STATE_TYPES:
        return "linear attention layers carry a state from token to token, for which ranks would wait"
    if family.block_layers(config):
        return "tokens of an image cannot attend to each other in both directions"
    return ring_obstacle(_attention_rule(text), text.max_position_embeddings)


def _layer_types(text: PretrainedConfig) -> set[str]:
    return set(getattr(text, "layer_types", None) or [])


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
            media=[Medium, …],  # or media_features={"image": [features], "video": [features]}, computed
            # before by model(media=[Medium, …], only_encode=True)
            media_order={"image": [0, 0, 2], "video": [1]},  # media in the order of their tokens
            media_rows={"image": SPRows, "video": SPRows},  # by default found among the input ids
        ) -> result of `read`: TokenLogProbs of (M,)

    where target `i` is predicted by the packed token `rows[i]`. A scalar model's `read` is
    `lambda logits: logits.values(rows)`.
    A prepared model stays as it is.
    """
    if isinstance(model.get_output_embeddings(), DeferringHead):
        return
    obstacle = _obstacle(model)
    if obstacle is not None:
        raise NotImplementedError(f"{type(model).__name__} {obstacle}")
    own_config(model)
    family = family_of(model.config)
    family.repair(model)
    set_packed_attention(model)
    pack_linear_layers(model)
    if _layer_types(model.config.get_text_config()) & STATE_TYPES:
        run_whole_rows(model)
    defer_head(model)
    record_block_inputs(model)
    add_packed_forward(model, family)


def _obstacle(model: PreTrainedModel) -> str | None:
    """Describe a feature that packed training does not support."""
    text = model.config.get_text_config()
    if getattr(text, "output_router_logits", False):
        return (
            "has `output_router_logits`, which requests transformers' own router loss: set"
            " `worker.actor.model.override_config.output_router_logits` to false, and"
            " `worker.actor.model.router_aux_loss_coef` for a loss that balances the experts"
        )
    packable, with_state = {*LAYER_TYPES, *WITHOUT_MIXING}, list(row_layers(model))
    if with_state or next(linear_layers(model), None) is not None:
        packable |= STATE_TYPES
    unknown = _layer_types(text) - packable
    if unknown:
        return f"has layers of type {', '.join(sorted(unknown))}, which cannot be packed"
    if not (model._supports_attention_backend or any(map(calls_attention, model.modules()))):
        return "does not use transformers' attention interface, so sequences cannot be packed"
    convolving = [each for each in with_state if any(isinstance(part, nn.Conv1d) for part in each.modules())]
    if convolving and not _layer_types(text) & STATE_TYPES:
        return (
            f"convolves tokens in {type(convolving[0]).__name__}, and its config names no `layer_types` with"
            " a state, so sequences cannot be packed"
        )
    parameters = inspect.signature(model.forward).parameters.values()
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return "takes no keyword arguments for attention, so sequences cannot be packed"
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"has a {type(head).__name__} as its head; only a linear head is supported"
    return None


def check_model(model: PreTrainedModel, processor: Any = None) -> float:
    """Compare packed log-probabilities with the model's own padded forward; return their mean difference.

    Raises NotImplementedError if they differ by more than rounding: the model does something unsupported.
    What rounding changes in half precision depends on the model's weights, so it is measured: the padded
    forward runs again with its input embeddings moved by a rounding error, after which it rounds otherwise
    everywhere. Under FSDP all ranks call it. A scalar model, whose score may be zero everywhere, is checked
    at the score's input: hidden states projected on fixed random directions, relative to their size.
    """
    weight = next(model.parameters())
    device = weight.device_mesh.device_type if isinstance(weight, DTensor) else weight.device
    rows, media = to_device(_check_rows(model, processor), device)
    scores, what_to_write = is_scalar(model.config), "" if is_named(model.config) else f": {WHAT_TO_WRITE}"
    with evaluating(model):
        if not is_named(model.config):
            _check_features(model, media)
        packed = _packed(model, rows, media)
        with plain_attention(model), deferred(model) if scores else nullcontext():
            plain, dtype = rerun, _ = _plain(model, rows, media)
            if dtype.itemsize < torch.float32.itemsize:
                with _rounding_otherwise(model):
                    rerun, _ = _plain(model, rows, media)
    scale = plain.square().mean().sqrt().item() if scores else 1.0
    difference, own = ((other - plain).abs().mean().item() / scale for other in (packed, rerun))
    allowed = FLOOR[dtype] + NOISE * own
    if not difference <= allowed:
        raise NotImplementedError(
            f"{type(model).__name__} ({model.config.model_type}) computes something that packed training does"
            f" not support: {'hidden states' if scores else 'log-probabilities'} differ by {difference:.2g}"
            f" from its own forward, at most {allowed:.2g} is allowed{what_to_write}"
        )
    return difference


@contextmanager
def _rounding_otherwise(model: PreTrainedModel) -> Iterator[None]:
    """Move each number of the input embeddings by one unit in its last place."""
    generator = torch.Generator().manual_seed(0)  # the same on every rank

    def moved(module: nn.Module, inputs: Any, embeddings: Tensor) -> Tensor:
        signs = torch.randint(0, 2, embeddings.shape, generator=generator).to(embeddings) * 2 - 1
        return embeddings * (1 + signs * torch.finfo(embeddings.dtype).eps)

    hook = model.get_input_embeddings().register_forward_hook(moved)
    try:
        yield
    finally:
        hook.remove()


def _check_features(model: PreTrainedModel, media: Sequence[Medium]) -> None:
    """Raise NotImplementedError if features of an image depend on others that are encoded with it."""
    together = model(media=media, only_encode=True)
    alone = [model(media=[medium], only_encode=True)[0] for medium in media]
    difference = max(
        ((one - part).norm() / part.norm()).item() for one, part in zip(together, alone, strict=True)
    )
    allowed = TOLERANCE[together[0].dtype]
    if not difference <= allowed:
        raise needs_family(
            f"{type(model).__name__} ({model.config.model_type}) computes other features of an image together"
            f" with others: they differ by {difference:.2g} of their size, at most {allowed:g} is allowed"
        )


def _check_rows(model: PreTrainedModel, processor: Any) -> tuple[list[Tensor], list[Medium]]:
    config, text = model.config, model.config.get_text_config()
    sizes = (getattr(text, name, None) or 0 for name in ("sliding_window", "attention_chunk_size"))
    window = max(size for size in (0, *sizes) if size <= LONGEST_CHECKED_WINDOW)
    length = max(12, window + CHECKED_TOKENS + 1)
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    rows = [torch.randint(min(256, text.vocab_size), (size,), generator=generator) for size in (length, 9)]
    family = family_of(config)
    if not isinstance(family, MediaFamily):
        return rows, []
    markers = sorted(special_tokens(config))
    ordinary = min(set(range(len(markers) + 1)) - set(markers))
    rows = [row.masked_fill(torch.isin(row, torch.tensor(markers)), ordinary) for row in rows]
    image = family.example(config, processor, generator)
    return [torch.cat([image.input_ids, rows[0]]), rows[1]], image.media


def special_tokens(config: PretrainedConfig) -> set[int]:
    """Return the tokens that the config names: those of media, and of the ends of texts."""
    named = {**config.get_text_config().to_dict(), **config.to_dict()}
    return {
        value
        for name, value in named.items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }


def _positions(model: PreTrainedModel, positions: Tensor) -> Tensor:
    rows = family_of(model.config).position_rows  # M-RoPE has (4, B, T)
    return positions if rows == 1 else positions.expand(rows, *positions.shape)


def _packed(model: PreTrainedModel, rows: list[Tensor], media: list[Medium]) -> Tensor:
    """Return the log-probs of the last tokens of each row, or projections of the states before them."""
    tokens = torch.cat(rows)
    ends = torch.tensor([len(row) for row in rows], device=tokens.device).cumsum(0)
    before = (ends[:, None] - 1 + torch.arange(-CHECKED_TOKENS, 0, device=tokens.device)).flatten()
    positions = torch.cat([torch.arange(len(row), device=tokens.device) for row in rows])

    def read(logits: DeferredLogits) -> Tensor:
        if is_scalar(model.config):
            return _project(logits.hidden.flatten(0, 1)[before])
        return logits.log_probs(tokens[before + 1], before, temperature=1.0).log_probs

    return model(
        input_ids=tokens[None],
        position_ids=_positions(model, positions[None]),
        cu_seqlens=nn.functional.pad(ends, (1, 0)).to(torch.int32),
        read=read,
        media=media,
    )


def _project(hidden: Tensor) -> Tensor:
    """Project hidden states (M, H) on fixed random unit vectors: (M, CHECKED_DIRECTIONS)."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(hidden.shape[-1], CHECKED_DIRECTIONS, generator=generator)
    return hidden.float() @ nn.functional.normalize(directions, dim=0).to(hidden.device)


def _plain(model: PreTrainedModel, rows: list[Tensor], media: list[Medium]) -> tuple[Tensor, torch.dtype]:
    """Return what `_packed` does, by the model's own forward of left-padded rows, and the type it has."""
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    columns = torch.arange(padded.shape[1], device=padded.device)
    starts = torch.tensor([padded.shape[1] - len(row) for row in rows], device=padded.device)[:, None]
    family = family_of(model.config)
    inputs = family.own_arguments(model.config, padded)
    if media and isinstance(family, MediaFamily):
        inputs |= family.own_inputs(media)
    few = "logits_to_keep" in inspect.signature(model.forward).parameters
    logits = model(
        input_ids=padded,
        attention_mask=(columns >= starts).long(),
        position_ids=_positions(model, (columns - starts).clamp(min=0)),
        use_cache=False,
        **inputs,
        **({"logits_to_keep": CHECKED_TOKENS + 1} if few else {}),
    ).logits
    scores = is_scalar(model.config)
    values = (logits.hidden if scores else logits)[:, -CHECKED_TOKENS - 1 : -1]  # before each checked token
    if scores:
        return _project(values.flatten(0, 1)), values.dtype
    log_p = torch.log_softmax(values.float(), -1)
    return log_p.gather(-1, padded[:, -CHECKED_TOKENS:, None]).flatten(), values.dtype
