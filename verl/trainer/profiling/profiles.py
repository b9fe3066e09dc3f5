# SPDX-License-Identifier: Apache-2.0
"""Profiles of the steps in `trainer.profile_steps`, written next to the checkpoints.

```
profile/step_N/rank_R.json.gz     every operation of a rank's process (torch.profiler)
profile/step_N/ray_timeline.json  every call of every process since the start of the run
profile/step_N/report.txt         time by stage, and advice on what to change
```

To add advice: an entry in `ADVICE`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import ray

from verl.config.trainer import RunConfig
from verl.single_controller.ray.worker_group import RayWorkerGroup
from verl.utils.rank_logger import get_logger

logger = get_logger(__name__)

PREFIX = "timing_s/"
INSIDE_GEN = ("sync_weights",)  # stages that run inside of `gen`
MAX_BAR = 40  # characters


class StepProfiles:
    """Profiles the steps that the options name."""

    def __init__(self, config: RunConfig, workers: RayWorkerGroup) -> None:
        self.steps = set(config.profile_steps)
        self.folder = Path(config.checkpoint_folder) / "profile"
        self.workers = workers

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record the workers inside the block if this step is to be profiled."""
        if step not in self.steps:
            yield
            return
        self.workers.start_profiler()
        yield
        folder = self._folder_of(step)
        self.workers.stop_profiler(str(folder))
        ray.timeline(str(folder / "ray_timeline.json"))

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        if step not in self.steps:
            return
        report = step_report(step, metrics)
        (self._folder_of(step) / "report.txt").write_text(report)
        logger.info("profiled: path=%s\n%s", self._folder_of(step), report)

    def _folder_of(self, step: int) -> Path:
        return self.folder / f"step_{step}"


class Step(NamedTuple):
    """A step in numbers."""

    fractions: dict[str, float]  # of the step's time, by stage
    metrics: Mapping[str, float]

    def time_in(self, *stages: str) -> float:
        return sum(self.fractions.get(stage, 0.0) for stage in stages)

    def __call__(self, name: str) -> float:
        return self.metrics.get(name, 0.0)


ADVICE: tuple[tuple[Callable[[Step], bool], str], ...] = (  # the steps that it applies to, and a remedy
    (
        lambda step: step.time_in("gen") > 0.5 and step("response_length/clip_ratio") > 0.2,
        "the rollout waits for responses that run into `data.max_response_length`: lower it, or punish length"
        " with `worker.reward.overlong_buffer_length`",
    ),
    (
        lambda step: (
            step.time_in("gen") > 0.5 and step("response_length/max") > 3 * step("response_length/mean")
        ),
        "the rollout waits for a few long responses: more prompts in a step (`data.rollout_batch_size`) hide"
        " them",
    ),
    (
        lambda step: step.time_in("gen") > 0.5,
        "the rollout takes most of the step: more memory for the engine"
        " (`worker.rollout.gpu_memory_utilization`), or more engines of fewer devices"
        " (`worker.rollout.tensor_parallel_size`)",
    ),
    (
        lambda step: step.time_in("reward") > 0.1,
        "the step waits for rewards: more processes (`worker.reward.num_cpus`), or a faster function",
    ),
    (
        lambda step: step.time_in("old", "ref", "values") > 0.25,
        "passes without gradient take long: raise"
        " `worker.actor.micro_batch_size_per_device_for_experience`, or run each prompt once for its group"
        " (`worker.actor.share_prompt=true`)",
    ),
    (
        lambda step: step.time_in("update_actor", "update_critic", "prime") > 0.5,
        "updates take most of the step: raise `worker.actor.micro_batch_size_per_device_for_update`; where"
        " memory is left, set `worker.actor.model.enable_gradient_checkpointing=false`",
    ),
    (
        lambda step: step.time_in("sync_weights") > 0.15,
        "weights take long to reach the engine: larger steps (`data.rollout_batch_size`) pay for it",
    ),
    (
        lambda step: step.time_in("save_checkpoint") > 0.1,
        "checkpoints hold the training: `trainer.async_save=true`, or a larger `trainer.save_freq`",
    ),
    (
        lambda step: step.time_in("validation") > 0.3,
        "validation takes long: fewer rows in `data.val_files`, or a larger `trainer.val_freq`",
    ),
    (
        lambda step: step("global_seqlen/balanced_max") > 1.2 * step("global_seqlen/balanced_min"),
        "ranks have unequal work although rows are moved between them: larger mini batches"
        " (`worker.actor.global_batch_size`) balance better",
    ),
)


def step_report(step: int, metrics: Mapping[str, float]) -> str:
    """List the stages of a step by their time, and advice to shorten it."""
    seconds = {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(PREFIX)}
    total = seconds.pop("step")
    named = sum(value for name, value in seconds.items() if name not in INSIDE_GEN)
    seconds["between the stages"] = max(0.0, total - named)
    lines = [f"step {step}: {total:.2f} s"]
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        bar = "#" * round(MAX_BAR * value / total)
        note = " (inside gen)" if name in INSIDE_GEN else ""
        lines.append(f"  {name + note:28} {value:9.3f} s {value / total:6.1%} {bar}".rstrip())
    view = Step({name: value / total for name, value in seconds.items()}, metrics)
    advice = [text for applies, text in ADVICE if applies(view)] or ["no stage stands out"]
    return "\n".join([*lines, "", *(f"- {text}" for text in advice), ""])
