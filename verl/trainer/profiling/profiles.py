# SPDX-License-Identifier: Apache-2.0
"""Profiles of chosen steps (`trainer.profile_steps`), beside the checkpoints.

```
profile/step_N/rank_R.json.gz     every operation of a rank's process (torch.profiler)
profile/step_N/ray_timeline.json  every call of every process, since the run began
profile/step_N/report.txt         where the time went, and what to change
```
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ray

from verl.config.trainer import RunConfig
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.trainer.profiling.step_report import step_report
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)


class StepProfiles:
    """Profiles the steps that the options name."""

    def __init__(self, config: RunConfig, workers: RayWorkerGroup) -> None:
        self.steps = set(config.profile_steps)
        self.folder = Path(config.checkpoint_folder) / "profile"
        self.workers = workers

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record what the workers do inside the block if this step is to be profiled."""
        if step not in self.steps:
            yield
            return
        self.workers.start_profiler()
        yield
        folder = self._folder_of(step)
        self.workers.stop_profiler(str(folder))
        ray.timeline(str(folder / "ray_timeline.json"))

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say where the time of a profiled step went."""
        if step not in self.steps:
            return
        report = step_report(step, metrics)
        (self._folder_of(step) / "report.txt").write_text(report)
        logger.info("profiled: path=%s\n%s", self._folder_of(step), report)

    def _folder_of(self, step: int) -> Path:
        return self.folder / f"step_{step}"
