# SPDX-License-Identifier: Apache-2.0
"""The plan of a run on the virtual cluster: the same options and rows as its measurement."""

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.virtual.cluster import worker_config, write_model
from tests.virtual.shapes import FRAME_TOKENS, SHAPES, Setup, video
from verl.config.ppo import AlgorithmConfig, DataConfig, PPOConfig, TrainerConfig
from verl.config.rollout import RolloutConfig
from verl.planning.machine import GIB, Machine
from verl.planning.memory_plan import HeldModel, held_model, plan_memory
from verl.planning.planned_run import PlannedRun, planned_ppo
from verl.planning.report import make_planner
from verl.planning.speed.workload import ExpectedLengths, Responses

# Two micro batches, each a prompt of 512 tokens with its 7 responses: as many tokens as 4 whole rows.
ROWS: dict[str, Any] = {"prompts": 2, "responses": 7, "rows_at_once": 4}
LAYERS = 6
# Parts of the plan that no virtual rank has.
NOT_OF_A_MODEL = ("context", "engine", "sleeping engine", "logits")


def fewer_layers(shape: str, layers: int = LAYERS) -> dict[str, Any]:
    """Changes of a model's config that leave it `layers` layers, of the text and of the tower."""
    fields = SHAPES[shape][1]
    if "text_config" not in fields:
        return {"num_hidden_layers": layers}
    return {
        "text_config": fields["text_config"] | {"num_hidden_layers": layers},
        "vision_config": fields["vision_config"],
    }


@dataclass(frozen=True)
class Case:
    """A model on a number of ranks."""

    shape: str
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)
    layers: int = LAYERS

    @property
    def name(self) -> str:
        changed = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.shape} on {self.ranks}" + (f", {changed}" if changed else "")

    def setup(self, layers: int | None = None) -> Setup:
        return Setup(**ROWS | self.options, override=fewer_layers(self.shape, layers or self.layers))


CASES = (
    Case("0.5b", 1),
    Case("1.5b", 4, {"checkpointing": False}),
    Case("3b", 8, {"reference": True}),
    Case("7b", 8),
    Case("7b", 64, {"checkpointing": False}),
    Case("7b", 8, {"checkpointing": 0.5}),
    Case("7b", 2, {"lora_rank": 16, "dtype": "bf16"}),
    Case("14b", 16, {"fsdp_size": 8}),
    Case("7b", 16, {"fsdp_size": 8, "optimizer": "adamw_bf16", "dtype": "bf16"}),
    Case("72b", 64),
    Case("7b", 8, {"tensor_parallel": 2}),
    Case("32b", 16, {"tensor_parallel": 8, "checkpointing": False}),
    Case("72b", 64, {"tensor_parallel": 8}),
    Case("30b-a3b", 8),
    Case("30b-a3b", 16, {"expert_parallel": 4}),
    Case("30b-a3b", 32, {"expert_parallel": 8, "fsdp_size": 16}),
    Case("235b-a22b", 128, {"expert_parallel": 8}),
    Case("671b", 256, {"expert_parallel": 8}, layers=5),  # of which three are dense
    Case("1t", 256, {"expert_parallel": 8}, layers=3),  # one is dense; 48 experts on 32 ranks
    Case("vl-7b", 8, {"images": (1,)}),
    Case("vl-7b", 8, {"images": (1,), "checkpointing": 0.25}),
    Case("longvila-7b", 8, video(1024)),
)


@dataclass(frozen=True)
class Planned:
    """The plan of a case: its run, its policy, and bytes on the device and in host memory by phase."""

    run: PlannedRun
    policy: HeldModel
    peaks: dict[str, int]
    host: dict[str, int]  # of the first rank, without its process
    resting: int  # of all models
    lengths: ExpectedLengths


def planned(case: Case, layers: int | None = None) -> Planned:
    setup = case.setup(layers)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, case.shape, setup.override)
        config = _config(folder, case, setup)
        machine = Machine("cuda", 10**4 * GIB, 10**4 * GIB, "a large GPU")
        read_shape = make_planner(planned_ppo, machine).read_shape
        run = _without_media(planned_ppo(config), setup)
        plan = plan_memory(run, read_shape, machine)
        policy, *others = [held_model(model, case.ranks, "cuda", read_shape) for model in run.models]
    peaks = {
        phase.name: phase.device_bytes - sum(phase.device.get(part, 0) for part in NOT_OF_A_MODEL)
        for phase in plan.phases
    }
    host = {
        phase.name: sum((phase.host | phase.first_rank).values()) - phase.host["process"]
        for phase in plan.phases
    }
    resting = sum(model.resting_weights + model.resting_state for model in (policy, *others))
    rows = Responses(setup.response_width, setup.response_width)
    return Planned(run, policy, peaks, host, resting, ExpectedLengths(setup.prompt_length, rows))


def _without_media(run: PlannedRun, setup: Setup) -> PlannedRun:
    """Plan the images that the rows have: a plan for all of a prompt would be too large."""
    width, height = setup.image_size
    tokens = max(setup.images) * (width // 28) * (height // 28) + setup.frames * FRAME_TOKENS
    return replace(run, lengths=replace(run.lengths, media=tokens))


def _config(folder: Path, case: Case, setup: Setup) -> PPOConfig:
    return PPOConfig(
        data=DataConfig(
            rollout_batch_size=setup.prompts
            * case.ranks
            // (setup.ulysses * setup.ring * setup.tensor_parallel),
            max_prompt_length=setup.prompt_length,
            max_response_length=setup.response_width,
        ),
        algorithm=AlgorithmConfig(disable_kl=not setup.reference),
        worker=replace(
            worker_config(folder, setup, case.ranks),
            rollout=RolloutConfig(n=setup.responses, tensor_parallel_size=1),
        ),
        trainer=TrainerConfig(n_gpus_per_node=case.ranks, device="cuda", critic_warmup=1),
    )
