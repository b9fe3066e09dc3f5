# SPDX-License-Identifier: Apache-2.0
"""Packed training of a family's tiny model against the model's own padded forward, in one process or several.

A group is a prompt, in the parts of `tests.helpers.families`, and its responses: each the number of its
tokens or, of a conversation, such numbers and what was observed between them. For example::

    groups = [(["look:\\n", image, "?"], (5, 8)), (["How many?"], (4, [3, ["see:\\n", image], 6]))]
    tiny = load_tiny("internvl")
    assert_small(training_errors(tiny, groups, share_prompt=True))
    for found in run_distributed(errors_on_ranks, 2, tiny.folder, groups):
        assert_small(*found.values())
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import pad

from tests.helpers.families import Clip, Part, Tiny, expanded, load_own, media_of, media_shape_of, open_tiny
from verl.data.media.loader import references_in_order
from verl.distributed.fsdp import fsdp_blocks
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.families.interface import Medium
from verl.models.hub_names import meta_model
from verl.models.registry import prepare_model
from verl.protocol import DataProto, objects
from verl.workers.packing.forward import PackedForward
from verl.workers.packing.media_inputs import media_in_packing_order

Response = int | Sequence[int | Sequence[Part]]
Group = tuple[Sequence[Part], Sequence[Response]]
Errors = tuple[float, float]  # largest of a log-prob or entropy; relative one of all gradients
TEMPERATURE = 0.8
LARGEST = 1e-5


class HeldMedia:
    """Stands for the media loader: references are numbers of media."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny, self.processor = tiny, tiny.processor
        self.held: list[Medium] = []

    def hold(self, parts: Sequence[Part]) -> dict[str, Any] | None:
        """Keep the media of a row and return their references."""
        refs: dict[str, list[str]] = {"images": [], "videos": [], "audios": [], "sounds": [], "order": []}
        has_sound = any(isinstance(part, Clip) and part.sound is not None for part in parts)
        for medium in media_of(self.tiny, parts):
            name = "sounds" if has_sound and medium.kind == "audio" else f"{medium.kind}s"
            refs[name].append(str(len(self.held)))
            if name != "sounds":
                refs["order"].append(medium.kind)
            self.held.append(medium)
        return refs if refs["order"] else None

    def media(self, multi_modal_data: Mapping[str, Sequence[str]]) -> list[Medium]:
        return [self.held[int(str(ref))] for _, ref in references_in_order(multi_modal_data)]


class Own(NamedTuple):
    """A batch, and what the model's own padded forward makes of it: computed once for all comparisons."""

    batch: DataProto
    held: HeldMedia
    weights: Tensor  # (B, R), of log-probs in the loss
    results: tuple[Tensor, Tensor]  # log-probs and entropies (B, R)
    model: Any  # with the gradients of the loss


class Row(NamedTuple):
    """A prompt and a response."""

    group: int
    prompt: Tensor
    response: Tensor
    positions: Tensor  # of both
    is_sampled: Tensor  # of the response
    media: tuple[Any, Any]  # references of the prompt's, of the observations'


def batch_of(tiny: Tiny, groups: Sequence[Group]) -> tuple[DataProto, HeldMedia]:
    """Return random responses to prompts as the collector has them, groups taking turns, and their media."""
    held, generator = HeldMedia(tiny), torch.Generator().manual_seed(0)
    rows = []
    for number, (parts, responses) in enumerate(groups):
        prompt, media = expanded(tiny, parts), held.hold(parts)
        for response in responses:
            steps = [response] if isinstance(response, int) else response
            observed = [part for step in steps if not isinstance(step, int) for part in step]
            tokens, is_sampled = response_of(tiny, steps, generator)
            positions = tiny.family.positions(
                tiny.config, torch.cat([prompt, tokens]), media_shape_of(tiny, [*parts, *observed])
            )
            if positions is None:
                positions = torch.arange(len(prompt) + len(tokens))
            rows.append(Row(number, prompt, tokens, positions, is_sampled, (media, held.hold(observed))))
    order = np.random.default_rng(0).permutation(len(rows))
    return as_batch([rows[index] for index in order]), held


def response_of(
    tiny: Tiny, steps: Sequence[int | Sequence[Part]], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the tokens of a response, random ones for each number, and which of them are sampled."""
    vocabulary = min(300, tiny.config.get_text_config().vocab_size)
    tokens, is_sampled = [], []
    for step in steps:
        if isinstance(step, int):
            tokens.append(torch.randint(20, vocabulary, (step,), generator=generator))
        else:
            tokens.append(expanded(tiny, step))
        is_sampled.append(torch.full((len(tokens[-1]),), int(isinstance(step, int))))
    return torch.cat(tokens), torch.cat(is_sampled)


def as_batch(rows: Sequence[Row]) -> DataProto:
    """Pad rows as the collector does."""
    widths = max(len(row.prompt) for row in rows), max(len(row.response) for row in rows)
    columns: dict[str, list[Tensor]] = {}
    for row in rows:
        sides = widths[0] - len(row.prompt), widths[1] - len(row.response)
        tokens = torch.cat([row.prompt, row.response])
        ids, mask = pad(tokens, sides), pad(torch.ones_like(tokens), sides)
        parts = {
            "input_ids": ids, "attention_mask": mask, "position_ids": pad(row.positions, sides),
            "responses": ids[widths[0] :], "loss_mask": pad(row.is_sampled, (0, sides[1])),
        }  # fmt: skip
        for name, value in parts.items():
            columns.setdefault(name, []).append(value)
    prompts, observations = zip(*(row.media for row in rows), strict=True)
    arrays = {
        "multi_modal_data": objects(prompts),
        "observation_media": objects(observations),
        "uid": objects([f"u{row.group}" for row in rows]),
    }
    return DataProto.from_dict({name: torch.stack(values) for name, values in columns.items()}, arrays)


def load_model(tiny: Tiny, prepared: bool) -> Any:
    """Return the model on its own, with eager attention, or prepared for packing."""
    model = load_own(tiny.folder, attn_implementation="sdpa" if prepared else "eager")
    if prepared:
        prepare_model(model)
    else:
        tiny.family.repair(model)
    return model


def own_forward(tiny: Tiny, model: Any, batch: DataProto, held: HeldMedia) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (B, R) of the model's own padded forward."""
    keys, family = batch.batch, tiny.family
    media = [
        medium
        for refs in media_in_packing_order(batch, [[row] for row in range(len(batch))])
        for medium in held.media(refs)
    ]
    inputs = family.own_inputs(media) if media else {}
    positions = keys["position_ids"]
    logits = model(
        input_ids=keys["input_ids"], attention_mask=keys["attention_mask"], use_cache=False,
        position_ids=positions.transpose(0, 1) if positions.ndim == 3 else positions,
        **inputs, **family.own_arguments(tiny.config, keys["input_ids"]),
    ).logits  # fmt: skip
    log_p = torch.log_softmax(logits[:, -keys["responses"].shape[1] - 1 : -1].float() / TEMPERATURE, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    taken = log_p.gather(-1, keys["responses"][..., None])[..., 0]
    return taken * keys["loss_mask"], entropy * keys["loss_mask"]


def own_results(tiny: Tiny, groups: Sequence[Group]) -> Own:
    """Run the model's own padded forward and backward."""
    batch, held = batch_of(tiny, groups)
    weights = torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))
    model = load_model(tiny, False)
    results = own_forward(tiny, model, batch, held)
    _loss(results, weights).backward()
    return Own(batch, held, weights, (results[0].detach(), results[1].detach()), model)


def training_errors(
    tiny: Tiny,
    groups: Sequence[Group],
    *,
    share_prompt: bool,
    sp: SequenceParallel | None = None,
    checkpointed: bool = False,
    parts: Sequence[Sequence[int]] | None = None,  # rows of micro batches
    own: Own | None = None,  # of the groups, if it is known
) -> Errors:
    """Compare packed log-probs, entropies and gradients with those of the model's own padded forward."""
    batch, held, weights, expected, plain = own or own_results(tiny, groups)
    packed = load_model(tiny, True)
    if checkpointed:
        packed.gradient_checkpointing_enable({"use_reentrant": False})
        packed.train()
    forward = PackedForward(packed, held, share_prompt=share_prompt, sp=sp)
    assert forward.shares_prompts == share_prompt
    error = 0.0
    for chosen in parts or [list(range(len(batch)))]:
        rows = list(chosen)
        result = forward.log_probs(batch[rows], TEMPERATURE, with_entropy=True)
        assert result.entropy is not None
        found = result.log_probs, result.entropy
        _loss(found, weights[rows]).backward()
        differences = [(a - b[rows]).abs() for a, b in zip(found, expected, strict=True) if len(rows)]
        error = max([error, *(difference.max().item() for difference in differences)])
    return error, relative_difference(packed, plain, summed=sp is not None)


def _loss(found: tuple[Any, Any], weights: Tensor) -> Tensor:
    return (found[0] * weights + 0.1 * found[1]).sum()


def relative_difference(model: Any, other: Any, *, summed: bool) -> float:
    """Return the relative difference of all gradients, `model`'s summed over ranks."""
    gradients = dict(model.named_parameters())
    difference = size = 0.0
    for name, parameter in other.named_parameters():
        own = gradients[name].grad
        total = torch.zeros_like(parameter) if own is None else own.detach().clone()
        if summed:
            dist.all_reduce(total)
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        difference += (total - expected).double().square().sum().item()
        size += expected.double().square().sum().item()
    return (difference / size) ** 0.5


def fsdp_errors(tiny: Tiny, own: Own, rank: int, world_size: int, share_prompt: bool) -> Errors:
    """Compare FSDP ranks, of which the last has no rows in its last micro batch, with one process."""
    batch, held, weights, expected, plain = own
    model = load_model(tiny, True)
    for module in [*fsdp_blocks(model), model]:
        fully_shard(module)
    forward, error = PackedForward(model, held, share_prompt=share_prompt), 0.0
    for rows in _parts(len(batch), rank, world_size):
        result = forward.log_probs(batch[rows], TEMPERATURE, with_entropy=True)
        assert result.entropy is not None
        found = result.log_probs, result.entropy
        (_loss(found, weights[rows]) * world_size).backward()
        differences = [(a - b[rows]).abs() for a, b in zip(found, expected, strict=True) if len(rows)]
        error = max([error, *(difference.max().item() for difference in differences)])
    for parameter in model.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad.full_tensor()
    return error, relative_difference(model, plain, summed=False)


def _parts(rows: int, rank: int, world_size: int) -> list[list[int]]:
    """Return two micro batches of a rank; the last rank has no row in its second."""
    own = list(range(rank, rows, world_size))
    return [own, []] if rank == world_size - 1 else [own[: len(own) // 2], own[len(own) // 2 :]]


def errors_on_ranks(
    rank: int,
    world_size: int,
    folder: Path,
    groups: Sequence[Group],
    divisions: Sequence[str] = ("fsdp", "ulysses", "ring"),
    share: Sequence[bool] = (False, True),
) -> dict[tuple[str, bool], Errors]:
    """Return the errors of each division over all ranks, with prompts apart and shared."""
    found: dict[tuple[str, bool], Errors] = {}
    tiny = open_tiny(folder)
    own = own_results(tiny, groups)
    for division, shared in itertools.product(divisions, share):
        if division == "fsdp":
            found[division, shared] = fsdp_errors(tiny, own, rank, world_size, shared)
            continue
        sizes = (world_size, 1) if division == "ulysses" else (1, world_size)
        sp = SequenceParallel.build(*sizes)
        found[division, shared] = training_errors(tiny, groups, share_prompt=shared, sp=sp, own=own)
    return found


def assert_small(*errors: Errors) -> None:
    """Assert that log-probs and gradients agree up to float32 rounding."""
    wrong = [each for each in errors if not (each[0] < LARGEST and each[1] < LARGEST)]
    assert not wrong, wrong


def assert_nothing_is_read_back(tiny: Tiny, row: Sequence[Part]) -> None:
    """Assert that the tower of a prepared model runs on a device from which no value comes back."""
    model = meta_model(tiny.config)
    prepare_model(model)
    media = [
        medium._replace(tensors={name: tensor.to("meta") for name, tensor in medium.tensors.items()})
        for medium in media_of(tiny, row)
    ]
    encoded = tiny.family.encode(model.get_submodule(tiny.family.media_owner), media)
    counts = [sum(tiny.family.units(tiny.config, medium.facts)) for medium in media]
    assert [len(features) for features in encoded] == counts
