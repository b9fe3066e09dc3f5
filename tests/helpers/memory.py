# SPDX-License-Identifier: Apache-2.0
"""Measured peaks of a worker's resident memory by phase, for comparison with the plan."""

import gc
import json
import os
import tempfile
import threading
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.helpers.distributed import run_distributed
from verl.config.model import LoraConfig, ModelConfig, PolicyConfig
from verl.config.ppo import AlgorithmConfig, DataConfig, PPOConfig, TrainerConfig
from verl.config.rollout import RolloutConfig
from verl.config.sft import SFTActorConfig, SFTConfig, SFTDataConfig, SFTRunConfig, SFTWorkerConfig
from verl.config.worker import ActorConfig, WorkerConfig
from verl.models.tiny import save_tiny_model
from verl.planning.machine import find_machine
from verl.planning.memory_plan import plan_memory
from verl.planning.model_sizes import read_shape
from verl.planning.planned_run import PlannedRun, planned_ppo, planned_sft
from verl.protocol import DataProto, objects
from verl.workers.roles.actor import ActorTraining, DataParallelPPOActor
from verl.workers.roles.updater import Training
from verl.workers.sft_worker import DataParallelSFT
from verl.workers.sharded_model import ModelSetup, ShardedModel

PAGES_OF_ITS_OWN = 1 << 16  # size in bytes above which the allocator maps each tensor separately
PEAK, NOW, OWN = "VmHWM:", "VmRSS:", "RssAnon:"
OF_THE_MODEL = ("weights", "first rank reads", "gradients", "optimizer", "gathered weights", "activations")
FIRST_TOKEN, LAST_TOKEN = 10, 250  # of the tiny models' text


# Models of some 50 million weights whose memory is in different places.
SHAPES = {
    "deep": dict(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=48, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32,
    ),
    "wide": dict(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=3, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64,
    ),
    "vocabulary": dict(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, vocab_size=128000,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Rows of one rank, all of full length, in groups of `n` with the same prompt."""

    prompts: int = 2
    n: int = 2
    prompt_length: int = 64
    response_length: int = 64


Works = list[Callable[[], Any]]


@dataclass(frozen=True)
class Kind:
    """Measurement of one kind of run."""

    phases: tuple[str, ...]  # `load`, then those of `works`
    section: Callable[..., PolicyConfig]  # class of `worker.actor`
    mini_batch: int  # of one rank, in the unit of the option
    planned: Callable[[PolicyConfig, Rows, int], PlannedRun]
    works: Callable[[PolicyConfig, Rows, ShardedModel, DataProto], Works]
    options: dict[str, Any] = field(default_factory=dict)  # more options of the section


class Case(NamedTuple):
    """A model with its options, and the rows of one rank."""

    kind: Kind
    actor: PolicyConfig
    rows: Rows


def resident(name: str) -> int:
    """Bytes of this process: `PEAK` since the last `forget_peak`, `NOW`, or `OWN` without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def peak_bytes(device: str) -> int:
    """Peak since `forget_peak` of resident memory, or of tensors on a GPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else resident(PEAK)


def forget_peak(device: str) -> int:
    """Reset the peak to the current size, and return it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident(NOW)


@contextmanager
def watching_peak(device: str) -> Iterator[list[int]]:
    """Collect the bytes in use inside the block; pages of files that are read do not count."""
    seen, is_over = [], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            seen.append(resident(OWN))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()
        if device == "cuda":
            seen[:] = [peak_bytes(device)]


def make_rows(rows: Rows) -> DataProto:
    """Random rows with the inputs of an update."""
    generator = torch.Generator().manual_seed(0)
    total, width = rows.prompts * rows.n, rows.prompt_length + rows.response_length
    ids = torch.randint(FIRST_TOKEN, LAST_TOKEN, (total, width), generator=generator)
    first = torch.arange(total) // rows.n * rows.n
    ids[:, : rows.prompt_length] = ids[first, : rows.prompt_length]
    mask = torch.ones(total, rows.response_length, dtype=torch.int64)
    noise = torch.randn(total, rows.response_length, generator=generator)
    tensors = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(width).expand_as(ids).clone(),
        "responses": ids[:, rows.prompt_length :],
        "loss_mask": mask,
        "old_log_probs": noise - 6.0,
        "advantages": noise,
    }
    return DataProto.from_dict(tensors, {"uid": objects([str(int(row)) for row in first])})


def make_case(
    kind: Kind, folder: str | Path, rows: Rows, *, checkpointing: bool, world_size: int = 1, rank: int = 0
) -> Case:
    """Build a `worker.actor` with several micro batches per update, so that gradients accumulate.

    `rank` is that of LoRA adapters; 0 trains the weights.
    """
    actor = kind.section(
        global_batch_size=kind.mini_batch * world_size,
        micro_batch_size_per_device_for_update=1,
        micro_batch_size_per_device_for_experience=2,
        model=ModelConfig(
            model_path=str(folder), enable_gradient_checkpointing=checkpointing, lora=LoraConfig(rank=rank)
        ),
        **kind.options,
    )
    return Case(kind, actor, rows)


def planned_phases(case: Case, world_size: int = 1, device: str = "cpu") -> dict[str, int]:
    """Planned bytes of the model alone in a run with these options, by phase."""
    run = case.kind.planned(case.actor, case.rows, world_size)
    plan = plan_memory(run, read_shape, find_machine(device, 100))
    return {
        phase.name: sum(
            size
            for name, size in (*phase.device.items(), *(phase.first_rank.items() if device == "cpu" else ()))
            if name in OF_THE_MODEL
        )
        for phase in plan.phases
        if phase.name in case.kind.phases
    }


def measure_phases(
    cases: Sequence[Case], world_size: int = 1, *, keeps_freed: bool = False
) -> list[dict[str, int]]:
    """Measure the peak of each phase in bytes above the process without models, the maximum of all ranks.

    A tiny model runs first, so that the memory of code and libraries does not count. Freed tensors are
    returned to the system, unless `keeps_freed`: glibc's own threshold rises over time and keeps some.
    """
    threshold = {} if keeps_freed else {"MALLOC_MMAP_THRESHOLD_": str(PAGES_OF_ITS_OWN)}
    with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.dict(os.environ, threshold):
        files = json.loads((Path(str(cases[0].actor.model.model_path)) / "config.json").read_text())
        tiny = save_tiny_model(folder, files["model_type"])
        of_ranks = run_distributed(_measure_cases, world_size, tiny, cases, timeout_s=1500, method="spawn")
    return [
        {phase: max(found[number][phase] for found in of_ranks) for phase in of_ranks[0][number]}
        for number in range(len(cases))
    ]


def _measure_cases(rank: int, world_size: int, tiny: Path, cases: list[Case]) -> list[dict[str, int]]:
    kind, actor, rows = cases[0]
    warm_up = replace(actor, model=replace(actor.model, model_path=str(tiny)))
    measure(Case(kind, warm_up, replace(rows, prompt_length=8, response_length=8)), "cpu", world_size)
    return [measure(case, "cpu", world_size) for case in cases]


def measure(case: Case, device: str, world_size: int = 1) -> dict[str, int]:
    """Measure the peak of each phase in bytes above the initial size of this process."""
    kind, config, rows = case
    batch, peaks = make_rows(rows), {}
    base, own = forget_peak(device), 0 if device == "cuda" else resident(OWN)
    with watching_peak(device) as seen:
        hosted = ShardedModel(
            "actor", config.model, config.fsdp, config.offload,
            ModelSetup(torch.device(device), world_size, None),
            optim=config.optim, training_steps=10,
        )  # fmt: skip
    first, *phases = kind.phases
    peaks[first] = max(seen) - (own or base)
    forget_peak(device)
    for phase, work in zip(phases, kind.works(config, rows, hosted, batch), strict=True):
        work()
        peaks[phase] = peak_bytes(device) - base
        forget_peak(device)
    return peaks


def _planned_ppo(actor: PolicyConfig, rows: Rows, world_size: int) -> PlannedRun:
    assert isinstance(actor, ActorConfig)
    data = DataConfig(
        rollout_batch_size=rows.prompts * world_size,
        max_prompt_length=rows.prompt_length,
        max_response_length=rows.response_length,
    )
    rollout = RolloutConfig(name="hf", n=rows.n, tensor_parallel_size=1)
    return planned_ppo(
        PPOConfig(
            data=data,
            algorithm=AlgorithmConfig(disable_kl=True),
            worker=WorkerConfig(actor=actor, rollout=rollout),
            trainer=TrainerConfig(n_gpus_per_node=world_size),
        )
    )


def _ppo_works(config: PolicyConfig, rows: Rows, hosted: ShardedModel, batch: DataProto) -> Works:
    assert isinstance(config, ActorConfig)
    training = ActorTraining(*hosted.training, rollout_n=rows.n, max_response_length=rows.response_length)
    actor = DataParallelPPOActor(config, hosted.forward, training)
    return [lambda: actor.update(batch, 1.0), lambda: actor.compute_log_probs(batch, 1.0)]


def _planned_sft(actor: PolicyConfig, rows: Rows, world_size: int) -> PlannedRun:
    assert isinstance(actor, SFTActorConfig)
    return planned_sft(
        SFTConfig(
            data=SFTDataConfig(max_length=rows.prompt_length + rows.response_length, val_files="rows"),
            worker=SFTWorkerConfig(actor=actor),
            trainer=SFTRunConfig(n_gpus_per_node=world_size),
        )
    )


def _sft_works(config: PolicyConfig, rows: Rows, hosted: ShardedModel, batch: DataProto) -> Works:
    """Train on all tokens but the first; the second update already has optimizer state."""
    assert isinstance(config, SFTActorConfig)
    batch.batch["responses"] = batch.batch["input_ids"][:, 1:]
    batch.batch["loss_mask"] = torch.ones_like(batch.batch["responses"])
    sft = DataParallelSFT(config, hosted.forward, Training(*hosted.training))
    return [lambda: [sft.update(batch) for _ in range(2)], lambda: sft.losses(batch)]


# The pass without gradients comes last: the optimizer has its state by then.
PPO = Kind(
    phases=("load", "update_actor", "old"), section=ActorConfig, mini_batch=1,
    planned=_planned_ppo, works=_ppo_works, options={"share_prompt": False},
)  # fmt: skip
SFT = Kind(
    phases=("load", "update_actor", "validation"), section=SFTActorConfig, mini_batch=4,
    planned=_planned_sft, works=_sft_works,
)  # fmt: skip
