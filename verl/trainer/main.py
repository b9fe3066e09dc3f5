# SPDX-License-Identifier: Apache-2.0
"""The command: `python3 -m verl.trainer.main config=examples/config.yaml section.option=value ...`."""

import sys
from collections.abc import Sequence

from verl.config.ppo import PPOConfig
from verl.config.renamed_keys import VERL_KEYS
from verl.planning.planned_run import planned_ppo
from verl.planning.step_plan import make_plan
from verl.trainer.command import TrainingCommand
from verl.trainer.run.dry_run import MEMORY_SWITCH, dry_run
from verl.trainer.run.exit_status import ExitStatus
from verl.utils.version_check import check_versions

USAGE = """\
usage: python3 -m verl.trainer.main [config=FILE.yaml] [section.option=value ...] [--dry-run]

  config=FILE.yaml        a file such as examples/config.yaml; options that it leaves out keep their default
  section.option=value    one option; wins over the file; lists and mappings as '["file","wandb"]', '{"a":1}'
  --dry-run               print the config, the plan of a step and its memory, start nothing
  --device-memory-gb=N    with --dry-run: plan for GPUs with N GiB; on CPU for nodes with as much
  --print-config          print every option with its help as YAML: examples/config.yaml
  --print-options         ... as a Markdown page: docs/options.md
  --help [NAME]           print this and every option, or those of a section (`worker.actor`) or name (`lr`)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `TrainingCommand.run`."""
    command = TrainingCommand(PPOConfig, USAGE, _dry_run, _check, train_once, VERL_KEYS, MEMORY_SWITCH)
    return command.run(arguments)


def _dry_run(config: PPOConfig, switches: Sequence[str]) -> int:
    return dry_run(config, switches, planned_ppo, lambda chosen: make_plan(chosen).text)


def _check(config: PPOConfig) -> None:
    check_versions(config.worker.rollout.name)


def train_once(config: PPOConfig, patience_s: float | None = None) -> ExitStatus:
    """Train until the last step, a request to stop, or a failure; see `attempt`."""
    # Imported here so that a wrong config or version is reported before torch, Ray and vLLM load.
    from verl.trainer.run.attempt import attempt  # noqa: PLC0415
    from verl.trainer.setup import running_trainer  # noqa: PLC0415

    return attempt(config, running_trainer, patience_s)


if __name__ == "__main__":
    sys.exit(main())
