# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: `python3 -m verl.trainer.sft config=examples/sft.yaml section.option=value ...`."""

from collections.abc import Sequence

from verl.config.sft import SFTConfig
from verl.logger.console.start_up import shown_start_up
from verl.planning.planned_run import planned_sft
from verl.planning.step_plan import make_sft_plan
from verl.trainer.command import TrainingCommand, usage
from verl.trainer.first_look import look_at_conversations
from verl.trainer.run.exit_status import ExitStatus
from verl.utils.imports import deferred
from verl.workers.warm_up import import_sft_worker


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `TrainingCommand.run`."""
    return TrainingCommand(
        SFTConfig,
        usage("examples/sft.yaml"),
        planned_sft,
        lambda config: make_sft_plan(config).text,
        lambda config: "hf",  # nothing is sampled, so vLLM may be missing
        fine_tune_once,
        look=lambda config: look_at_conversations(config.data, config.worker),
    ).run(arguments)


def fine_tune_once(config: SFTConfig, wait_s: float | None = None) -> ExitStatus:
    """Train until the last step, a request to stop, or a failure; see `run_once`."""
    with shown_start_up(config.trainer):
        # Imported here so that a wrong config or version is reported before torch and Ray load.
        from verl.trainer.prepare import prepared_run  # noqa: PLC0415
        from verl.trainer.run.run_once import run_once  # noqa: PLC0415

        running_sft = deferred("verl.trainer.setup", "running_sft")
        prepared = prepared_run(config, planned_sft, wait_s or 0.0, warm_up=import_sft_worker)
        return run_once(config.trainer, prepared, running_sft, is_restart=wait_s is not None)
