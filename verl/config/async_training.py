# SPDX-License-Identifier: Apache-2.0
"""Section `trainer.async_training`: sampling next to training, and responses that take several steps."""

from dataclasses import dataclass

from verl.config.schema import option

PARTIAL, STREAM, ONE_STEP_OFF = "partial", "stream", "one_step_off"


@dataclass(frozen=True)
class AsyncConfig:
    """Sampling next to training, with `worker.hybrid_engine=false`, or in turn with partial rollouts."""

    mode: str = option(
        "off",
        "off: sampling and training take turns; partial: they do, but a step ends sampling once it has its"
        " prompts, and unfinished responses continue in the next (`worker.hybrid_engine=true`); one_step_off:"
        " each step trains on what was sampled during the one before, with weights that are one step old;"
        " stream: sampling never stops, and each step trains on the oldest groups that are finished.",
        choices=("off", PARTIAL, ONE_STEP_OFF, STREAM),
    )
    staleness_threshold: int = option(
        1,
        "With mode=partial and stream: the largest number of updates between the weights that begin a"
        " prompt's responses and those of the start of its step; sampling waits rather than exceed it. 0"
        " samples each step with its own weights.",
        minimum=0,
    )
    max_inflight_prompts: int | None = option(
        None,
        "With mode=partial and stream: prompts that an engine samples at once, as far as their responses fit"
        " `worker.rollout.max_num_seqs`; null shares `data.rollout_batch_size` x (`staleness_threshold` + 1)"
        " evenly.",
        minimum=1,
    )
    max_engine_restarts: int = option(
        3,
        "With `worker.hybrid_engine=false`: rollout engines that are started again in a run where others were"
        " lost; after these the run continues with the engines that are left, and ends with the last one.",
        minimum=0,
    )
    max_gpus_for_rollout: int | None = option(
        None,
        "With mode=stream: GPUs that may sample at most; while the run continues, engines are started on GPUs"
        " that are free. null is `trainer.n_gpus_for_rollout`, the number at the start.",
        minimum=1,
    )
    deterministic: bool = option(
        False,
        "With mode=partial and stream: change weights at points that do not depend on time, each engine with"
        " its own share of every step, so that runs repeat and resume exactly. Slower; for tests.",
    )

    @property
    def continues_responses(self) -> bool:
        """True if a response may take several steps."""
        return self.mode in (PARTIAL, STREAM)

    @property
    def samples_ahead(self) -> bool:
        """True if sampling and training run at the same time."""
        return self.mode in (ONE_STEP_OFF, STREAM)
