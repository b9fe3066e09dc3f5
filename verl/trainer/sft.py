# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: `python3 -m verl.trainer.sft config=examples/sft.yaml section.option=value ...`."""

import sys
from collections.abc import Sequence

from verl.config.sft import SFTConfig
from verl.planning.planned_run import planned_sft
from verl.planning.step_plan import make_sft_plan
from verl.trainer.command import TrainingCommand, usage
from verl.trainer.first_look import look_at_conversations


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `TrainingCommand.run`."""
    return TrainingCommand(
        SFTConfig,
        usage("examples/sft.yaml"),
        planned_sft,
        lambda config: make_sft_plan(config).text,
        look=lambda config: look_at_conversations(config.data, config.worker),
    ).run(arguments)


if __name__ == "__main__":
    sys.exit(main())
