# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: `python3 -m verl.trainer.sft config=examples/sft.yaml section.option=value ...`."""

import sys
from collections.abc import Sequence

from verl.config.sft import SFTConfig
from verl.planning.planned_run import planned_sft
from verl.planning.step_plan import make_sft_plan
from verl.trainer.command import TrainingCommand
from verl.trainer.run.dry_run import MEMORY_SWITCH, dry_run
from verl.trainer.run.exit_status import ExitStatus
from verl.utils.version_check import check_versions

USAGE = """\
usage: python3 -m verl.trainer.sft [config=FILE.yaml] [section.option=value ...] [--dry-run]

  config=FILE.yaml        a file such as examples/sft.yaml; options that it leaves out keep their default
  section.option=value    one option; wins over the file; lists and mappings as '["file","wandb"]', '{"a":1}'
  --dry-run               print the config, the plan of a step and its memory, start nothing
  --device-memory-gb=N    with --dry-run: plan for GPUs with N GiB; on CPU for nodes with as much
  --print-config          print every option with its help as YAML: examples/sft.yaml
  --print-options         ... as a Markdown page
  --help [NAME]           print this and every option, or those of a section (`worker.actor`) or name (`lr`)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `TrainingCommand.run`."""
    return TrainingCommand(SFTConfig, USAGE, _dry_run, _check, fine_tune_once, switch=MEMORY_SWITCH).run(
        arguments
    )


def _dry_run(config: SFTConfig, switches: Sequence[str]) -> int:
    return dry_run(config, switches, planned_sft, lambda chosen: make_sft_plan(chosen).text)


def _check(config: SFTConfig) -> None:
    check_versions("hf")  # nothing is sampled, so vLLM may be missing


def fine_tune_once(config: SFTConfig, patience_s: float | None = None) -> ExitStatus:
    """Train until the last step, a request to stop, or a failure; see `attempt`."""
    # Imported here so that a wrong config or version is reported before torch and Ray load.
    from verl.trainer.run.attempt import attempt  # noqa: PLC0415
    from verl.trainer.sft.setup import running_sft  # noqa: PLC0415

    return attempt(config, running_sft, patience_s)


if __name__ == "__main__":
    sys.exit(main())
