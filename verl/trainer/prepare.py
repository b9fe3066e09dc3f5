# SPDX-License-Identifier: Apache-2.0
"""Preparation of a run: joins the cluster, starts its processes, and checks everything that needs no devices.

Starting is slow because of imports: five seconds in the controller, and as much in each worker. So Ray starts
first, while a thread imports the rest of the controller, and the processes of the workers import theirs while
the controller checks models and opens data.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from verl.config.trainer import RunTree
from verl.logger.console.start_up import phase
from verl.planning.report import Describe, resolve_auto_sizes
from verl.single_controller.ray.processes import WorkerProcesses
from verl.single_controller.ray.resource_pool import ResourcePool, all_resources
from verl.trainer.run.cluster_join import connect_to_ray, find_devices, find_machine_of_run
from verl.utils.imports import collection_paused, importing

# Environment of the workers; the user's own values win. Errors reach the controller by themselves.
WORKER_ENV = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
}

# Imported while Ray starts.
DEVICE, CHECKS = "verl.distributed.device", "verl.trainer.model_checks"
EXTENSIONS, SETUP = "verl.trainer.extensions.checks", "verl.trainer.setup"

C = TypeVar("C", bound=RunTree)
WarmUp = Callable[[str], None]  # run by each process first, with the device


@contextmanager
def prepared_run(
    config: C,
    describe: Describe[C],
    wait_s: float = 0.0,
    viewer_port: int | None = None,
    check: Callable[[C], None] | None = None,
    warm_up: WarmUp | None = None,
) -> Iterator[tuple[C, ResourcePool, WorkerProcesses]]:
    """Join the cluster, start a process on each device, and check the run; leaving ends and disconnects all.

    Args:
        describe: `planned_ppo` or `planned_sft`.
        wait_s: Seconds to wait for a cluster that is too small or unreachable.
        check: Raises for what it finds wrong with the run.
        warm_up: A function of a module that imports what the workers need.

    Yields:
        The config, with numbers instead of `auto` and for the devices that were found; these devices, and
        their processes.
    """
    with ExitStack() as stack:
        if viewer_port is not None:
            from verl.viewer.process import viewer_process  # noqa: PLC0415 - a web server, for those who want it

            data = config.data
            named = {data.image_dir, data.video_dir, data.audio_dir}
            videos = [Path(one) for one in named if one is not None]
            folder = Path(config.trainer.checkpoint_folder)
            stack.enter_context(viewer_process(folder, viewer_port, videos))
        with phase("Ray and libraries"):
            with collection_paused(), importing(DEVICE, CHECKS, EXTENSIONS, SETUP) as wait_for:
                is_own = connect_to_ray(wait_s, stack)
                wait_for(DEVICE)
                device = importlib.import_module(DEVICE).resolve_device(
                    config.trainer.device, all_resources()
                )
                config, pool = find_devices(config, device, wait_s)
                # Devices of a cluster that others use are not taken before all checks.
                processes = start_processes(pool, warm_up, stack) if is_own else None
            checks = importlib.import_module(CHECKS)
        with phase("model files"):
            # First: a model family says how to read a model.
            importlib.import_module(EXTENSIONS).check_extensions(config)
            run = describe(config)
            checks.check_quantized_engine(run, device)
            checks.export_checkpoints(planned.model for planned in run.models)
            checks.check_trained_models(run)
            checks.check_divided_experts(run)
        if check is not None:
            with phase("rewards of samples"):
                check(config)
        processes = processes or start_processes(pool, warm_up, stack)
        # Last: with `trainer.elastic` there may be fewer devices than requested, and sizes depend on them.
        yield resolve_auto_sizes(config, describe, device, find_machine_of_run), pool, processes


def start_processes(pool: ResourcePool, warm_up: WarmUp | None, stack: ExitStack) -> WorkerProcesses:
    """Start the processes of a run, which end with the stack."""
    env = {name: os.environ.get(name, value) for name, value in WORKER_ENV.items()}
    processes = WorkerProcesses(pool, env, partial(warm_up, pool.device) if warm_up else None)
    stack.callback(processes.kill)
    return processes
