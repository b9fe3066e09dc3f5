# SPDX-License-Identifier: Apache-2.0
"""The command: `python3 -m verl.trainer.main config=examples/config.yaml section.option=value ...`."""

import sys
from collections.abc import Sequence

from verl.trainer.config import PPOConfig
from verl.trainer.plan import make_plan, plan_text
from verl.utils.config import ConfigError, config_notes, load_config
from verl.utils.config_text import config_yaml, example_yaml, help_text
from verl.utils.version_check import check_versions

USAGE = """\
usage: python3 -m verl.trainer.main [config=FILE.yaml] [section.option=value ...] [--dry-run]

  config=FILE.yaml        a file such as examples/config.yaml; options that it leaves out keep their default
  section.option=value    one option; wins over the file; lists and mappings as '["file","wandb"]', '{"a":1}'
  --dry-run               print the config and the plan of a step, start nothing
  --print-config          print every option with its help as YAML: examples/config.yaml
  --help [NAME]           print this and every option, or those of a section (`worker.actor`) or name (`lr`)
"""
BAD_MACHINE = 1  # exit status
BAD_CONFIG = 2  # exit status


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status: 0, 1 for unsupported versions, 2 for a bad config."""
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    switches = [argument for argument in arguments if argument.startswith("-")]
    unknown = [switch for switch in switches if switch not in ("--dry-run", "--print-config", "--help", "-h")]
    if unknown:
        sys.stderr.write(f"`{unknown[0]}` is not a switch\n\n{USAGE}")
        return BAD_CONFIG
    if "--print-config" in switches:
        sys.stdout.write(example_yaml(PPOConfig))
        return 0
    try:
        if "--help" in switches or "-h" in switches:
            sys.stdout.write(_help(overrides))
            return 0
        config = load_config(PPOConfig, overrides)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_CONFIG
    for note in config_notes(config):
        sys.stderr.write(f"note: {note}\n")
    if "--dry-run" in switches:
        sys.stdout.write(
            f"{config_yaml(config)}\nplan of a training step\n{plan_text(config, make_plan(config))}"
        )
        return 0
    return _train(config)


def _help(topics: Sequence[str]) -> str:
    if topics:
        return "\n".join(help_text(PPOConfig, topic) for topic in topics)
    return f"{USAGE}\n{help_text(PPOConfig)}"


def _train(config: PPOConfig) -> int:
    try:
        check_versions(config.worker.rollout.name)
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_MACHINE
    # Imported here so that a wrong config or version is reported before torch, Ray and vLLM load.
    from verl.trainer.setup import running_trainer  # noqa: PLC0415

    with running_trainer(config) as trainer:
        trainer.fit()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
