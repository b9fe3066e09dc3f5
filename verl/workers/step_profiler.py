# SPDX-License-Identifier: Apache-2.0
"""What a process did during a step, as a trace that chrome://tracing and Perfetto show."""

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepProfiler:
    """Records every operation between `start` and `stop`.

    Example::

        profiler = StepProfiler()
        profiler.start()
        ...
        profiler.stop(Path("profile/step_3/rank_0.json.gz"))
    """

    def __init__(self) -> None:
        self._profile: profile | None = None

    def start(self) -> None:
        """Begin to record; until `stop` everything is slower."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self, path: Path) -> None:
        """Write what was recorded since `start`, compressed; the file appears whole."""
        assert self._profile is not None, "stop() follows start()"
        recorded, self._profile = self._profile, None
        recorded.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{os.getpid()}.{path.name}")  # its ending says how it is compressed
        recorded.export_chrome_trace(str(partial))
        partial.replace(path)
