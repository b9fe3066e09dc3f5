# SPDX-License-Identifier: Apache-2.0
"""A family's packed forward against its models' own, row by row: log-probs and all gradients, in float32.

assert_packed_equals_own(load_tiny("internvl"), GROUPS, share_prompt=True)
assert_ranks_equal_own("internvl", GROUPS)  # FSDP, Ulysses and a ring on two processes
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForImageTextToText

from tests.helpers.distributed import run_distributed
from tests.helpers.families import (
    Part,
    Tiny,
    expanded,
    load_tiny,
    media_of,
    media_shape_of,
    medium_of,
    open_tiny,
    random_clip,
    random_image,
)
from verl.data.media.loader import references_in_order
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.families.interface import Medium
from verl.models.registry import prepare_model
from verl.protocol import DataProto
from verl.utils.quiet import no_weight_bars
from verl.workers.packing.forward import PackedForward

TEMPERATURE = 0.8
LIMIT = 1e-5  # of log-prob differences, and of the gradients' relative error
TOWER_LIMIT = 1e-4  # of the tower's own gradients, which are small sums of large terms


class Group(NamedTuple):
    """A prompt and the lengths of its responses. Media are names: an `i` or a `v`, and a size."""

    prompt: tuple[str, ...]
    responses: tuple[int, ...]


# text, an image, two images of different sizes, a video, and both kinds, the video first
GROUPS = (
    Group(("What colour?",), (5, 2)),
    Group(("i 90 60", "red?"), (4, 1, 3)),
    Group(("first\n", "i 40 150", "or\n", "i 64 64", "?"), (3, 6)),
    Group(("v 3 60 80", "\nHow many?"), (5, 2)),
    Group(("v 2 50 40", "\nthen\n", "i 70 100", "and\n", "i 30 30", "?"), (2, 4)),
)


def parts_of(prompt: Sequence[str], seed: int) -> list[Part]:
    """Replace the names of media by random ones."""
    rng = np.random.default_rng(seed)
    parts: list[Part] = []
    for name in prompt:
        kind, *numbers = name.split(" ")
        if kind == "i" and numbers:
            parts.append(random_image(rng, *map(int, numbers)))
        elif kind == "v" and numbers:
            parts.append(random_clip(rng, *map(int, numbers)))
        else:
            parts.append(name)
    return parts


class Rows(NamedTuple):
    """Sequences as the trainer has them; it also stands for the media loader."""

    tiny: Tiny
    batch: DataProto
    prompts: list[list[Part]]  # of each row
    media_by_name: dict[str, Medium]

    @property
    def processor(self) -> Any:
        return self.tiny.processor

    def media(self, row: Mapping[str, Any]) -> list[Medium]:
        return [self.media_by_name[str(name)] for _, name in references_in_order(row)]


def rows_of(tiny: Tiny, groups: Sequence[Group]) -> Rows:
    """Return all responses of the groups, padded to the longest prompt and response."""
    generator = torch.Generator().manual_seed(1)
    rows, prompts, known = [], [], {}
    for number, group in enumerate(groups):
        parts = parts_of(group.prompt, number)
        ids = expanded(tiny, parts)
        media = {"images": [], "videos": [], "order": []}
        for part in parts:
            if not isinstance(part, str):
                medium, name = medium_of(tiny, part), str(len(known))
                known[name] = medium
                media[f"{medium.kind}s"].append(name)
                media["order"].append(medium.kind)
        positions = tiny.family.positions(tiny.config, ids, media_shape_of(tiny, parts))
        for length in group.responses:
            response = torch.randint(8, 250, (length,), generator=generator)
            rows.append((f"u{number}", ids, response, positions, media if known and media["order"] else None))
            prompts.append(parts)
    return Rows(tiny, _padded(rows), prompts, known)


def _padded(rows: Sequence[tuple[str, Tensor, Tensor, Tensor | None, Any]]) -> DataProto:
    width, longest = (max(len(row[index]) for row in rows) for index in (1, 2))
    columns: dict[str, list[Tensor]] = {}
    for _, prompt, response, positions, _ in rows:
        left, right = width - len(prompt), longest - len(response)
        ids = torch.nn.functional.pad(torch.cat([prompt, response]), (left, right))
        mask = torch.nn.functional.pad(torch.ones(len(prompt) + len(response)).long(), (left, right))
        every = torch.arange(len(prompt) + len(response))
        if positions is not None:
            after = positions[:, -1:] + 1 + torch.arange(len(response))
            every = torch.cat([positions, after], 1)
        row = {
            "input_ids": ids, "attention_mask": mask, "responses": ids[width:], "response_mask": mask[width:],
            "position_ids": torch.nn.functional.pad(every, (left, right)),
        }  # fmt: skip
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    objects = {"uid": np.array([row[0] for row in rows], dtype=object), "multi_modal_data": _objects(rows)}
    return DataProto.from_dict({name: torch.stack(values) for name, values in columns.items()}, objects)


def _objects(rows: Sequence[tuple[Any, ...]]) -> np.ndarray:
    media = np.empty(len(rows), dtype=object)
    media[:] = [row[-1] for row in rows]
    return media


def load_model(folder: Path | str, *, prepared: bool) -> Any:
    with no_weight_bars():
        model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa" if prepared else "eager"
        ).eval()
    if prepared:
        prepare_model(model)
    return model


def own_log_probs(model: Any, rows: Rows, index: int) -> Tensor:
    """Return the log-probs (R,) of a row's response by the model's own forward of that row alone."""
    tiny, tensors = rows.tiny, rows.batch.batch
    is_token = tensors["attention_mask"][index].bool()
    ids = tensors["input_ids"][index][is_token][None]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    inputs |= tiny.family.own_arguments(tiny.config, ids)
    if media := media_of(tiny, rows.prompts[index]):
        inputs |= tiny.family.own_inputs(media)
    positions = tensors["position_ids"][index][..., is_token]
    inputs["position_ids"] = positions[None] if positions.ndim == 1 else positions[:, None]
    log_p = (model(**inputs).logits[0].float() / TEMPERATURE).log_softmax(-1)
    length = int(tensors["response_mask"][index].sum())
    chosen = log_p[-length - 1 : -1].gather(-1, ids[0, -length:, None])[:, 0]
    return torch.nn.functional.pad(chosen, (0, tensors["responses"].shape[1] - length))


class Outcome(NamedTuple):
    """Log-probs (B, R) and gradients by name."""

    log_probs: np.ndarray
    gradients: dict[str, np.ndarray]


def weights_of(rows: Rows) -> Tensor:
    return torch.randn(rows.batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))


def own_outcome(rows: Rows) -> Outcome:
    model = load_model(rows.tiny.folder, prepared=False)
    found = torch.stack([own_log_probs(model, rows, index) for index in range(len(rows.batch))])
    (found * weights_of(rows)).sum().backward()
    return Outcome(found.detach().numpy(), _gradients(model))


def packed_outcome(
    rows: Rows,
    model: Any,
    *,
    share_prompt: bool,
    parts: Sequence[Sequence[int]] | None = None,  # rows of each micro batch
    sp: SequenceParallel | None = None,
    scale: float = 1.0,  # of the loss
) -> Outcome:
    forward = PackedForward(model, model.config, rows, share_prompt=share_prompt, sp=sp)
    weights, found = weights_of(rows), torch.zeros(rows.batch.batch["responses"].shape)
    for part in parts or [list(range(len(rows.batch)))]:
        log_probs = forward.log_probs(rows.batch[list(part)], TEMPERATURE).log_probs
        (log_probs * weights[list(part)]).sum().mul(scale).backward()
        found[list(part)] = log_probs.detach()
    return Outcome(found.numpy(), _gradients(model))


def _gradients(model: Any) -> dict[str, np.ndarray]:
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        grads[name] = np.zeros(parameter.shape) if grad is None else grad.double().numpy()
    return grads


def assert_same(
    tiny: Tiny, found: Outcome, expected: Outcome, rows: Sequence[int] | None = None, what: str = ""
) -> None:
    """Assert equal log-probs (of these rows), and gradients: of everything, and of the tower alone."""
    chosen = slice(None) if rows is None else list(rows)
    error = np.abs(found.log_probs[chosen] - expected.log_probs[chosen]).max()
    assert error < LIMIT, (what, error)
    names = list(expected.gradients)
    assert relative_error(found.gradients, expected.gradients, names) < LIMIT, what
    tower = [name for name in names if name.startswith(tiny.family.encoder)]
    assert tower and relative_error(found.gradients, expected.gradients, tower) < TOWER_LIMIT, what


def relative_error(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], names: Sequence[str]
) -> float:
    difference = sum(np.square(found[name] - expected[name]).sum() for name in names)
    return (difference / sum(np.square(expected[name]).sum() for name in names)) ** 0.5


def assert_packed_equals_own(tiny: Tiny, groups: Sequence[Group], *, share_prompt: bool) -> None:
    rows = rows_of(tiny, groups)
    found = packed_outcome(rows, load_model(tiny.folder, prepared=True), share_prompt=share_prompt)
    assert_same(tiny, found, own_outcome(rows))


# --- two processes


def assert_ranks_equal_own(kind: str, groups: Sequence[Group], *modes: str) -> None:
    """Assert it for `fsdp`, `ulysses` and `ring` on two processes, packed and with shared prompts."""
    tiny = load_tiny(kind)
    expected = own_outcome(rows_of(tiny, groups))
    modes = modes or ("fsdp", "ulysses", "ring")
    for found in run_distributed(_on_rank, 2, str(tiny.folder), list(groups), modes):
        for (mode, share_prompt, part), outcome in found.items():
            assert_same(tiny, outcome, expected, part, f"{mode}, shared prompts: {share_prompt}")


def _on_rank(
    rank: int, world_size: int, folder: str, groups: Sequence[Group], modes: Sequence[str]
) -> dict[tuple[str, bool, tuple[int, ...]], Outcome]:
    rows = rows_of(open_tiny(Path(folder)), groups)
    every = list(range(len(rows.batch)))
    found = {}
    for mode in modes:
        for share_prompt in (False, True):
            model, sp, parts = load_model(folder, prepared=True), None, [every]
            if mode == "fsdp":  # each rank has every other row, and one rank has text only in a micro batch
                own = every[rank::world_size]
                fully_shard_blocks(model)
                parts = [own[:1], own[1:]]
            else:
                sizes = (world_size, 1) if mode == "ulysses" else (1, world_size)
                sp = SequenceParallel.build(range(world_size), *sizes)
            outcome = packed_outcome(
                rows, model, share_prompt=share_prompt, parts=parts, sp=sp,
                scale=world_size if mode == "fsdp" else 1.0,  # FSDP averages over the ranks
            )  # fmt: skip
            if mode != "fsdp":
                outcome = outcome._replace(gradients=_summed(outcome.gradients))
            found[mode, share_prompt, tuple(row for part in parts for row in part)] = outcome
    return found


def _summed(gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    summed = {name: torch.from_numpy(value) for name, value in gradients.items()}
    for value in summed.values():
        torch.distributed.all_reduce(value)
    return {name: value.numpy() for name, value in summed.items()}


def fully_shard_blocks(model: Any) -> None:
    blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    for module in [*blocks, model]:
        fully_shard(module)
