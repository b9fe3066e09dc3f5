# SPDX-License-Identifier: Apache-2.0
"""The command: `python3 -m verl.trainer.main config=examples/config.yaml section.option=value ...`."""

import sys
from collections.abc import Sequence

from verl.config.ppo import PPOConfig
from verl.planning.planned_run import planned_ppo
from verl.planning.step_plan import make_plan
from verl.trainer.command import TrainingCommand, usage
from verl.trainer.first_look import look_at_prompts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `TrainingCommand.run`."""
    return TrainingCommand(
        PPOConfig,
        usage("examples/config.yaml", "docs/options.md"),
        planned_ppo,
        lambda config: make_plan(config).text,
        lambda config: look_at_prompts(
            config.data, config.worker, config.reward_servers, makes_text=not config.trainer.diffusion
        ),
    ).run(arguments)


def print_config(arguments: Sequence[str] | None = None) -> int:
    """Print the config of a run, as `verl-train --print-config` does, and return the exit status."""
    return main(["--print-config", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
