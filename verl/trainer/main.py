# SPDX-License-Identifier: Apache-2.0
"""The command: `python3 -m verl.trainer.main config=examples/config.yaml section.option=value ...`."""

import math
import sys
from collections.abc import Sequence

from verl.trainer.command import TrainingCommand, check_run
from verl.trainer.config import PPOConfig
from verl.trainer.ending import BAD_INPUT, Ending
from verl.trainer.memory_report import dry_run_memory
from verl.trainer.plan import make_plan, plan_text
from verl.trainer.verl_keys import VERL_KEYS
from verl.utils.config_text import config_yaml
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
MEMORY = "--device-memory-gb="


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `TrainingCommand.run`."""
    return TrainingCommand(PPOConfig, USAGE, _dry_run, _train, VERL_KEYS, MEMORY).run(arguments)


def _dry_run(config: PPOConfig, switches: Sequence[str]) -> int:
    """Print what would be done; the last `--device-memory-gb` counts."""
    sizes = [switch.removeprefix(MEMORY) for switch in switches if switch.startswith(MEMORY)]
    try:
        memory_gb = float(sizes[-1]) if sizes else None
    except ValueError:
        memory_gb = -1.0
    if memory_gb is not None and not 0 < memory_gb < math.inf:
        sys.stderr.write(f"`{MEMORY}{sizes[-1]}` must be a number of GiB above zero\n")
        return BAD_INPUT
    settled, memory = dry_run_memory(config, memory_gb)
    plan = plan_text(settled, make_plan(settled))
    sys.stdout.write(f"{config_yaml(config)}\nplan of a training step\n{plan}\nmemory at its most\n{memory}")
    return 0


def _train(config: PPOConfig) -> Ending:
    check_versions(config.worker.rollout.name)
    check_run(config.trainer)
    # Imported here so that a wrong config or version is reported before torch, Ray and vLLM load.
    if config.trainer.max_restarts:
        from verl.trainer.supervision import Supervisor  # noqa: PLC0415

        return Supervisor(config).run()
    from verl.trainer.attempt import attempt_to_train  # noqa: PLC0415

    return attempt_to_train(config)


if __name__ == "__main__":
    sys.exit(main())
