# SPDX-License-Identifier: Apache-2.0
"""The plan of a diffusion run on the virtual cluster: the same options and pictures as its measurement."""

import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.virtual.pictures import picture_config
from tests.virtual.pipelines import write_pipeline
from tests.virtual.shapes import PictureSetup
from verl.config.ppo import AlgorithmConfig, DataConfig, PPOConfig, TrainerConfig
from verl.planning.diffusion.memory import held_pictures
from verl.planning.diffusion.planned import PictureShape
from verl.planning.machine import GIB, Machine, MemoryPlan
from verl.planning.memory_plan import HeldModel
from verl.planning.planned_run import planned_ppo
from verl.planning.report import make_planner

LARGE = Machine("cuda", 10**4 * GIB, 10**4 * GIB, "a large GPU")


class PlannedPicturesRun(NamedTuple):
    """Sizes of a pipeline, its transformer on a rank, and the plan of its run."""

    shape: PictureShape
    model: HeldModel
    plan: MemoryPlan

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes on the device by phase, without its context."""
        return {phase.name: phase.device_bytes - phase.device.get("context", 0) for phase in self.plan.phases}


def planned_pictures_run(shape: str, setup: PictureSetup, ranks: int) -> PlannedPicturesRun:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pipeline(folder, shape, setup.layers)
        config = PPOConfig(
            data=DataConfig(
                rollout_batch_size=setup.prompts * ranks,
                max_prompt_length=setup.prompt_length,
                max_response_length=setup.steps,
            ),
            algorithm=AlgorithmConfig(disable_kl=not setup.reference),
            worker=picture_config(folder, setup, ranks),
            trainer=TrainerConfig(n_gpus_per_node=ranks, device="cuda", diffusion=True),
        )
        planner, run = make_planner(planned_ppo, LARGE), planned_ppo(config)
        assert run.pictures is not None
        sizes = run.pictures.read(planner.read_pictures)
        model = held_pictures(run.pictures, sizes, ranks, LARGE.device)
        return PlannedPicturesRun(sizes, model, planner(config))
