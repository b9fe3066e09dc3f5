# SPDX-License-Identifier: Apache-2.0
"""The abilities of every vision-language family, tried with its tiny model.

    python -m tests.helpers.family_table  # writes the table of docs/models.md

Each ability is a comparison in float32; `tests/models/families/test_every_family.py` makes them, and compares
the table with the page.
"""

import re
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.architecture.source import ROOT
from tests.helpers.checkpoints import stored_tensors
from tests.helpers.distributed import run_distributed
from tests.helpers.families import (
    Clip,
    Part,
    Sound,
    Tiny,
    load_tiny,
    random_clip,
    random_image,
    random_sound,
    render,
)
from tests.helpers.family_engines import engine_error
from tests.helpers.family_training import (
    LARGEST,
    TEMPERATURE,
    Group,
    Own,
    Row,
    as_batch,
    batch_of,
    errors_on_ranks,
    load_model,
    own_forward,
    own_results,
    relative_difference,
    training_errors,
)
from tests.helpers.media import save_video
from tests.workers.rollout.reference import rollout_config, setup_of
from verl.agents.media import join_shapes
from verl.config.model import ModelConfig
from verl.data.media.audio import wav_bytes
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.families.interface import KINDS as MEDIA
from verl.models.families.interface import MediaShape, is_part
from verl.models.families.registry import all_families, family_of, transposed_experts
from verl.models.hub_names import HubNames
from verl.models.lora_weights import AdapterConfig, is_adapter
from verl.models.registry import check_sequence_parallel
from verl.models.trainable import select_trainable
from verl.protocol import DataProto
from verl.workers.packing.forward import PackedForward
from verl.workers.packing.media_inputs import MEDIA_KEYS
from verl.workers.packing.vision_features import FrozenTower
from verl.workers.rollout.engines import build_rollout_engine

KINDS = [name for family in all_families() for name, tiny in family.tiny.items() if tiny.encoders]
SEEING = [name for family in all_families() for name, tiny in family.tiny.items() if tiny.vision is not None]
# Families of every suite; tests of the others are nightly. Images and videos, a state, sound, tiles.
EVERY_TIME = "qwen2_5_vl", "qwen3_5", "qwen2_audio", "internvl"
PAGE = ROOT / "docs" / "models.md"
TABLE = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- end -->)", re.DOTALL)
WIDE, SMALL = (80, 160), (64, 64)  # sizes of images; the first is more than one tile or slice
Error = float  # the largest of log-probs, and the relative one of gradients


@cache
def groups_of(kind: str) -> list[Group]:
    """Two media, one and a conversation that shows others, text; and every kind that the model reads."""
    rng, kinds = np.random.default_rng(0), load_tiny(kind).family.kinds
    wide, small = random_image(rng, *WIDE), random_image(rng, *SMALL)
    clip, long, short = random_clip(rng, 4, 64, 64), random_sound(rng, 4.3), random_sound(rng, 0.5)
    film = clip._replace(sound=random_sound(rng, 2.7).samples)
    first, second = (wide, small) if "image" in kinds else (long, short)
    groups: list[Group] = [
        (["look:\n", first, " or\n", second, "?"], (5, 8, 3)),
        ([second, "How many?"], (4, 1, [2, ["closer:\n", first], 3])),
        (["What colour is the shape?"], (6,)),
    ]
    if "video" in kinds:
        groups += [([clip, "What moves?"], (3, 2)), (["first\n", clip, "then\n", wide], (4, 2))]
    if {"audio", "video"} <= {*kinds}:
        groups += [
            ([long, "How many?"], (3, 2)),
            (["first\n", short, clip, small, long], (4, [2, [short], 1])),
            (["What is heard in\n", film, " and\n", small, film, "?"], (4, 2)),
        ]
    return groups


@cache
def own_of(kind: str) -> Own:
    """Return the reference that packed rows and shared prompts are compared with."""
    return own_results(load_tiny(kind), groups_of(kind))


def packed(kind: str) -> Error:
    return max(training_errors(load_tiny(kind), groups_of(kind), share_prompt=False, own=own_of(kind)))


def shared(kind: str) -> Error:
    return max(training_errors(load_tiny(kind), groups_of(kind), share_prompt=True, own=own_of(kind)))


def adapted(kind: str) -> Error:
    """LoRA in all linear layers, also the tower's: gradients of adapters in packed and in padded rows."""
    tiny = load_tiny(kind)
    batch, held = batch_of(tiny, groups_of(kind))
    adapter = AdapterConfig(rank=4, alpha=8, target_modules="all-linear")
    plain, model = load_model(tiny, False), load_model(tiny, True)
    for each in (plain, model):
        torch.manual_seed(0)
        select_trainable(each, ModelConfig(), "worker.actor.model", adapter)
        for name, parameter in each.named_parameters():
            if is_adapter(name):
                torch.nn.init.normal_(parameter, std=0.1)
    expected = own_forward(tiny, plain, batch, held)[0]
    found = PackedForward(model, held, share_prompt=True).log_probs(batch, TEMPERATURE).log_probs
    expected.square().sum().backward()
    found.square().sum().backward()
    parts = family_of(tiny.config).encoder
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert {is_part(name, parts) for name in trained} == {False, True} and all(map(is_adapter, trained))
    return max(_difference(found, expected), _gradient_error(model, plain))


def frozen(kind: str) -> Error:
    """All encoders frozen: nothing that makes features has a gradient, all others keep theirs."""
    tiny = load_tiny(kind)
    batch, held = batch_of(tiny, groups_of(kind))
    plain, model = load_model(tiny, False), load_model(tiny, True)
    senses = tiny.family.encoders
    options = ModelConfig(freeze_vision_tower="vision" in senses, freeze_audio_tower="audio" in senses)
    select_trainable(model, options, "worker.actor.model")
    parts = family_of(tiny.config).encoder
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not is_part(name, parts))
    assert parts and not all(parameter.requires_grad for parameter in plain.parameters())
    expected = own_forward(tiny, plain, batch, held)[0]
    found = PackedForward(model, held).log_probs(batch, TEMPERATURE).log_probs
    expected.square().sum().backward()
    found.square().sum().backward()
    assert all(each.grad is None for name, each in model.named_parameters() if is_part(name, parts))
    return max(_difference(found, expected), _gradient_error(model, plain))


def features_once(kind: str) -> Error:
    """Features of files, kept for all passes, against a tower that runs in every pass."""
    tiny = load_tiny(kind)
    model = load_model(tiny, True)
    model.requires_grad_(False)
    calls: list[str] = []
    for name, module in model.named_modules():  # some families call parts of the tower and not the whole
        if is_part(name, tiny.family.encoder):
            module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    with tempfile.TemporaryDirectory() as folder:
        loader = MediaLoader(tiny.processor, MediaOptions(1, 1 << 20), family=tiny.family)
        batch = _batch_of_files(tiny, loader, Files(tiny, Path(folder)))
        media = [row for key in MEDIA_KEYS for row in batch.non_tensor_batch[key]]
        expected = PackedForward(model, loader).log_probs(batch, TEMPERATURE).log_probs
        tower = FrozenTower(model, loader, "cpu", torch.float32)
        forward = PackedForward(model, loader, tower=tower, share_prompt=True)
        assert calls, "no call of the tower is seen"
        with tower.holding(media):
            calls.clear()
            found = forward.log_probs(batch, TEMPERATURE).log_probs
    assert not calls, "the tower ran again"
    return _difference(found, expected)


def merged(kind: str) -> Error:
    """Weights in memory under their names on the hub against the model's files, bit for bit."""
    tiny = load_tiny(kind)
    on_disk = stored_tensors(tiny.folder)
    names = HubNames(tiny.config)
    in_memory = ((name, each) for name, each in tiny.model.state_dict().items() if name not in names.tied)
    made = dict(names.convert(in_memory))
    assert made.keys() == on_disk.keys()
    for name in made:
        # transformers does not write these as the hub has them
        if name.endswith(transposed_experts(tiny.config)) and made[name].shape != on_disk[name].shape:
            made[name] = made[name].transpose(-1, -2)
    return float(not all(torch.equal(made[name], on_disk[name]) for name in made))


@cache
def on_two_ranks() -> dict[str, dict[str, Error]]:
    """The largest error of each family, by the division of its sequences over two processes."""
    models = [(load_tiny(kind).folder, groups_of(kind), divisions_of(kind)) for kind in KINDS]
    ranks = run_distributed(_errors_of_families, 2, models)
    return {
        kind: {division: max(error[division] for error in errors) for division in divisions_of(kind)}
        for kind, *errors in zip(KINDS, *ranks, strict=True)
    }


def _errors_of_families(
    rank: int, world_size: int, models: Sequence[tuple[Path, list[Group], list[str]]]
) -> list[dict[str, Error]]:
    found = []
    for folder, groups, divisions in models:
        errors = errors_on_ranks(rank, world_size, folder, groups, divisions)
        found.append({name: max(max(errors[name, shared]) for shared in (False, True)) for name in divisions})
    return found


def divisions_of(kind: str) -> list[str]:
    return [name for name in DIVISIONS if name != "ring" or ring_refusal(kind) is None]


def sampled(kind: str) -> Error:
    """Log-probs of transformers' engine, after a weight sync, against the model's own forward."""
    tiny = load_tiny(kind)
    engine = build_rollout_engine(rollout_config(name="hf", max_model_len=1024), setup_of(tiny.folder))
    return engine_error(tiny, engine, [row for row, _ in groups_of(kind)], seeds=(1,)) / 10


def ring_refusal(kind: str) -> str | None:
    """Return the reason that a ring of two ranks is refused for."""
    try:
        check_sequence_parallel(load_tiny(kind).config, SequenceParallel(1, 2, 0))
    except ValueError as error:
        return str(error)
    return None


ABILITIES: dict[str, Callable[[str], Error]] = {
    "packed": packed,
    "shared": shared,
    "LoRA": adapted,
    "frozen tower": frozen,
    "features once": features_once,
    "merge": merged,
    "HF engine": sampled,
}
DIVISIONS = ("fsdp", "ulysses", "ring")


@cache
def error_of(ability: str, kind: str) -> Error:
    """Return an ability's error, computed once for the tests and the table."""
    return ABILITIES[ability](kind)


class Files:
    """Rows whose media are files, as the references in a batch name them."""

    def __init__(self, tiny: Tiny, folder: Path) -> None:
        rng, kinds = np.random.default_rng(0), tiny.family.kinds
        wide, small, long, short = (
            str(folder / name) for name in ("wide.png", "small.png", "long.wav", "short.wav")
        )
        for path, size in ((wide, WIDE), (small, SMALL)):
            random_image(rng, *size).save(path)
        for path, seconds in ((long, 4.3), (short, 0.5)):
            Path(path).write_bytes(wav_bytes(random_sound(rng, seconds).samples, 16000))
        name, first, second = ("images", wide, small) if "image" in kinds else ("audios", long, short)
        self.rows: list[dict[str, list[str]]] = [{name: [first, second]}, {name: [second]}, {}]
        self.observed = {name: [first]}
        if "video" in kinds:
            clip = save_video(folder / "clip.mkv", 64, 64, 8)
            self.rows += [{"videos": [clip]}, {"images": [wide], "videos": [clip]}]
        if {"audio", "image"} <= {*kinds}:
            self.rows += [{"audios": [long]}, {"images": [wide], "audios": [long] * 2}]


def _batch_of_files(tiny: Tiny, loader: MediaLoader, files: Files) -> DataProto:
    """Return a response and a conversation to each row, measured and expanded as the dataset does."""
    generator, rows = torch.Generator().manual_seed(0), []
    observation, seen = _read(tiny, loader, files.observed)
    for number, refs in enumerate(files.rows):
        prompt, shape = _read(tiny, loader, refs)
        answer = torch.randint(20, 300, (5,), generator=generator)
        talk = torch.cat([answer[:3], observation, answer[3:]])
        both = join_shapes(shape, seen)
        for response, media, observed in ((answer, shape, {}), (talk, both, files.observed)):
            ids = torch.cat([prompt, response])
            positions = tiny.family.positions(tiny.config, ids, media)
            positions = torch.arange(len(ids)) if positions is None else positions
            is_sampled = torch.ones(len(response), dtype=torch.int64)
            is_sampled[3 : len(response) - 2] = 0 if observed else 1
            rows.append(Row(number, prompt, response, positions, is_sampled, (refs, observed)))
    return as_batch(rows)


def _read(tiny: Tiny, loader: MediaLoader, refs: dict[str, list[str]]) -> tuple[Tensor, MediaShape]:
    decoded, shape = loader.decode(refs), loader.measure(refs)
    videos, sounds = (Clip(*video) for video in decoded.videos), (Sound(each) for each, _ in decoded.audios)
    parts: list[Part] = [*decoded.images, *videos, *sounds, "What colour?"]
    raw = tiny.processor.tokenizer.encode(render(tiny, parts), add_special_tokens=False)
    return torch.tensor(loader.expand(raw, shape)), shape


def _difference(found: Tensor, expected: Tensor) -> Error:
    return (found - expected).abs().max().item()


def _gradient_error(model: Any, other: Any) -> Error:
    return relative_difference(model, other, summed=False)


def row_of(kind: str) -> str:
    """Return the line of a family in the table."""
    cells = ["yes" if medium in load_tiny(kind).family.kinds else "no" for medium in MEDIA]
    cells += [_cell(error_of(ability, kind)) for ability in ABILITIES]
    errors = on_two_ranks()[kind]
    cells += [_cell(errors[division]) if division in errors else "no" for division in DIVISIONS]
    return f"| {kind} | {' | '.join(cells)} |"


def _cell(error: Error) -> str:
    return "yes" if error < LARGEST else f"{error:.1g}"


def table() -> str:
    names = ["model", *MEDIA, *ABILITIES, "FSDP", "Ulysses", "ring"]
    rule = "|".join(["---"] * len(names))
    return "\n".join([f"| {' | '.join(names)} |", f"|{rule}|", *map(row_of, KINDS)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
