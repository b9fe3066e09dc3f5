# SPDX-License-Identifier: Apache-2.0
"""The command: `python3 -m verl.trainer.main config=examples/config.yaml section.option=value ...`."""

import sys
from collections.abc import Sequence

from verl.config.hints.renamed_keys import VERL_KEYS
from verl.config.ppo import PPOConfig
from verl.logger.console.start_up import shown_start_up
from verl.planning.planned_run import planned_ppo
from verl.planning.step_plan import make_plan
from verl.trainer.command import TrainingCommand, usage
from verl.trainer.first_look import look_at_prompts
from verl.trainer.run.exit_status import ExitStatus
from verl.utils.imports import deferred
from verl.workers.warm_up import imports_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `TrainingCommand.run`."""
    return TrainingCommand(
        PPOConfig,
        usage("examples/config.yaml", "docs/options.md"),
        planned_ppo,
        lambda config: make_plan(config).text,
        lambda config: config.engine,
        train_once,
        VERL_KEYS,
        lambda config: look_at_prompts(
            config.data, config.worker, config.reward_servers, makes_text=not config.trainer.diffusion
        ),
    ).run(arguments)


def train_once(config: PPOConfig, wait_s: float | None = None) -> ExitStatus:
    """Train until the last step, a request to stop, or a failure; see `run_once`."""
    with shown_start_up(config.trainer):
        # Imported here so that a wrong config or version is reported before torch, Ray and vLLM load.
        from verl.trainer.prepare import prepared_run  # noqa: PLC0415
        from verl.trainer.run.run_once import run_once  # noqa: PLC0415

        if config.trainer.diffusion:
            deferred("verl.diffusion.files", "downloaded")(config.worker.actor.model)
        check_reward = deferred("verl.trainer.reward_samples", "check_reward")
        check = check_reward if wait_s is None else None  # a restart uses what was checked
        running_trainer = deferred("verl.trainer.setup", "running_trainer")
        prepared = prepared_run(
            config, planned_ppo, wait_s or 0.0, config.trainer.viewer_port, check, imports_of(config.worker)
        )
        return run_once(config.trainer, prepared, running_trainer, is_restart=wait_s is not None)


if __name__ == "__main__":
    sys.exit(main())
