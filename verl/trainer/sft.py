# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: `python3 -m verl.trainer.sft config=examples/sft.yaml section.option=value ...`."""

import sys
from collections.abc import Sequence

from verl.trainer.command import TrainingCommand, check_run
from verl.trainer.ending import Ending
from verl.trainer.sft_config import SFTConfig
from verl.trainer.sft_plan import sft_plan_text
from verl.utils.config_text import config_yaml
from verl.utils.version_check import check_versions

USAGE = """\
usage: python3 -m verl.trainer.sft [config=FILE.yaml] [section.option=value ...] [--dry-run]

  config=FILE.yaml        a file such as examples/sft.yaml; options that it leaves out keep their default
  section.option=value    one option; wins over the file; lists and mappings as '["file","wandb"]', '{"a":1}'
  --dry-run               print the config and the plan of a step, start nothing
  --print-config          print every option with its help as YAML: examples/sft.yaml
  --print-options         ... as a Markdown page
  --help [NAME]           print this and every option, or those of a section (`worker.actor`) or name (`lr`)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `TrainingCommand.run`."""
    return TrainingCommand(SFTConfig, USAGE, _dry_run, _train).run(arguments)


def _dry_run(config: SFTConfig, switches: Sequence[str]) -> int:
    sys.stdout.write(f"{config_yaml(config)}\nplan of a training step\n{sft_plan_text(config)}")
    return 0


def _train(config: SFTConfig) -> Ending:
    check_versions("hf")  # nothing is sampled, so vLLM may be missing
    check_run(config.trainer)
    # Imported here so that a wrong config or version is reported before torch and Ray load.
    from verl.trainer.attempt import attempt  # noqa: PLC0415
    from verl.trainer.sft_setup import running_sft  # noqa: PLC0415

    return attempt(config.trainer, lambda: running_sft(config))


if __name__ == "__main__":
    sys.exit(main())
