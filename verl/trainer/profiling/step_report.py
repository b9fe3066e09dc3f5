# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step went, and what to change: the report of `trainer.profile_steps`.

To add advice: an entry in `ADVICE`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

PREFIX = "timing_s/"
INSIDE_GEN = ("sync_weights",)  # stages that run inside of `gen`
BAR = 40  # characters of the longest bar


class Step(NamedTuple):
    """A step in numbers."""

    shares: dict[str, float]  # of the step's time, by stage
    metrics: Mapping[str, float]

    def share(self, *stages: str) -> float:
        """The share of the step that these stages take together."""
        return sum(self.shares.get(stage, 0.0) for stage in stages)

    def __call__(self, name: str) -> float:
        """A metric; 0 where the step has none of that name."""
        return self.metrics.get(name, 0.0)


class Advice(NamedTuple):
    """What to change in a step that looks like this."""

    applies: Callable[[Step], bool]
    text: str


ADVICE = (
    Advice(
        lambda step: step.share("gen") > 0.5 and step("response_length/clip_ratio") > 0.2,
        "the rollout waits for responses that run into `data.max_response_length`: lower it, or punish length"
        " with `worker.reward.overlong_buffer_length`",
    ),
    Advice(
        lambda step: (
            step.share("gen") > 0.5 and step("response_length/max") > 3 * step("response_length/mean")
        ),
        "the rollout waits for a few long responses: more prompts in a step (`data.rollout_batch_size`) hide"
        " them",
    ),
    Advice(
        lambda step: step.share("gen") > 0.5,
        "the rollout takes most of the step: more memory for the engine"
        " (`worker.rollout.gpu_memory_utilization`), or more engines of fewer devices"
        " (`worker.rollout.tensor_parallel_size`)",
    ),
    Advice(
        lambda step: step.share("reward") > 0.1,
        "the step waits for rewards: more processes (`worker.reward.num_cpus`), or a faster function",
    ),
    Advice(
        lambda step: step.share("old", "ref", "values") > 0.25,
        "passes without gradient take long: raise"
        " `worker.actor.micro_batch_size_per_device_for_experience`, or run each prompt once for its group"
        " (`worker.actor.share_prompt=true`)",
    ),
    Advice(
        lambda step: step.share("update_actor", "update_critic", "prime") > 0.5,
        "updates take most of the step: raise `worker.actor.micro_batch_size_per_device_for_update`; where"
        " memory is left, set `worker.actor.model.enable_gradient_checkpointing=false`",
    ),
    Advice(
        lambda step: step.share("sync_weights") > 0.15,
        "weights take long to reach the engine: larger steps (`data.rollout_batch_size`) pay for it",
    ),
    Advice(
        lambda step: step.share("save_checkpoint") > 0.1,
        "checkpoints hold the training: `trainer.async_save=true`, or a larger `trainer.save_freq`",
    ),
    Advice(
        lambda step: step.share("validation") > 0.3,
        "validation takes long: fewer rows in `data.val_files`, or a larger `trainer.val_freq`",
    ),
    Advice(
        lambda step: step("global_seqlen/balanced_max") > 1.2 * step("global_seqlen/balanced_min"),
        "ranks have unequal work although rows are moved between them: larger mini batches"
        " (`worker.actor.global_batch_size`) balance better",
    ),
)


def step_report(step: int, metrics: Mapping[str, float]) -> str:
    """The stages of a step by their time, and what may shorten it.

    Args:
        step: Its number.
        metrics: Of the step; reads `timing_s/*`, `response_length/*` and `global_seqlen/*`.
    """
    seconds = {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(PREFIX)}
    total = seconds.pop("step")
    named = sum(value for name, value in seconds.items() if name not in INSIDE_GEN)
    seconds["between the stages"] = max(0.0, total - named)
    lines = [f"step {step}: {total:.2f} s"]
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        bar = "#" * round(BAR * value / total)
        note = " (inside gen)" if name in INSIDE_GEN else ""
        lines.append(f"  {name + note:28} {value:9.3f} s {value / total:6.1%} {bar}".rstrip())
    view = Step({name: value / total for name, value in seconds.items()}, metrics)
    advice = [entry.text for entry in ADVICE if entry.applies(view)] or ["nothing stands out"]
    return "\n".join([*lines, "", *(f"- {text}" for text in advice), ""])
