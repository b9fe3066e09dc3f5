# SPDX-License-Identifier: Apache-2.0
"""Section `trainer.async_training`: sampling next to training, in processes of its own."""

from dataclasses import dataclass

from verl.config.schema import option


@dataclass(frozen=True)
class AsyncConfig:
    """Sampling next to training; needs `worker.hybrid_engine=false`."""

    mode: str = option(
        "off",
        "off: sampling and training take turns; one_step_off: each step trains on what was sampled during the"
        " one before, with weights that are one step old; stream: sampling never stops, and each step trains"
        " on the oldest groups that are finished.",
        choices=("off", "one_step_off", "stream"),
    )
    staleness_threshold: int = option(
        1,
        "With mode=stream: the largest number of updates between the weights that begin a prompt's responses"
        " and the ones that its step begins with; sampling waits rather than exceed it. 0 samples each step"
        " with its own weights.",
        minimum=0,
    )
    max_inflight_prompts: int | None = option(
        None,
        "With mode=stream: prompts that an engine samples at once; null shares `data.rollout_batch_size` x"
        " (`staleness_threshold` + 1) evenly.",
        minimum=1,
    )
    max_engine_restarts: int = option(
        3,
        "With mode=stream: rollout engines that are started again in a run when their processes are lost, and"
        " sample on where the lost ones were; one more ends the run.",
        minimum=0,
    )
    deterministic: bool = option(
        False,
        "With mode=stream: change weights at points that do not depend on time, each engine with its own"
        " share of every step, so that runs repeat and resume exactly. Slower; for tests.",
    )

    @property
    def is_stream(self) -> bool:
        return self.mode == "stream"

    @property
    def samples_ahead(self) -> bool:
        return self.mode != "off"
