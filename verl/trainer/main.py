# SPDX-License-Identifier: Apache-2.0
"""The command: `python3 -m verl.trainer.main config=examples/config.yaml section.option=value ...`."""

import sys
from collections.abc import Sequence

from verl.trainer.config import PPOConfig
from verl.trainer.ending import BAD_INPUT, FOR_THE_USER, INTERRUPTED, Ending, ending_of, raised_by_us
from verl.trainer.plan import make_plan, plan_text
from verl.utils.checkpoint.tracker import checkpoint_to_resume
from verl.utils.config import ConfigError, config_notes, load_config
from verl.utils.config_text import config_yaml, example_yaml, help_text
from verl.utils.logger.tracker import check_loggers
from verl.utils.version_check import check_versions

USAGE = """\
usage: python3 -m verl.trainer.main [config=FILE.yaml] [section.option=value ...] [--dry-run]

  config=FILE.yaml        a file such as examples/config.yaml; options that it leaves out keep their default
  section.option=value    one option; wins over the file; lists and mappings as '["file","wandb"]', '{"a":1}'
  --dry-run               print the config and the plan of a step, start nothing
  --print-config          print every option with its help as YAML: examples/config.yaml
  --help [NAME]           print this and every option, or those of a section (`worker.actor`) or name (`lr`)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; what is wrong is told on stderr.

    Args:
        arguments: Of the command line; None takes those of this process.

    Returns:
        The exit status: 0; 2 for bad input, before anything was trained; 1 for a machine that does not do or
        a run that failed; 128 + the signal that ended it: 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        Exception: An error of this package, which needs its traceback.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    switches = [argument for argument in arguments if argument.startswith("-")]
    unknown = [switch for switch in switches if switch not in ("--dry-run", "--print-config", "--help", "-h")]
    if unknown:
        sys.stderr.write(f"`{unknown[0]}` is not a switch\n\n{USAGE}")
        return BAD_INPUT
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
        return BAD_INPUT
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
        ending = _checked_and_trained(config)
    except FOR_THE_USER as error:
        if not raised_by_us(error):
            raise
        ending = ending_of(error, config.trainer)
    except KeyboardInterrupt:
        ending = Ending(INTERRUPTED, "interrupted; nothing was trained")
    if ending.message is not None:
        sys.stderr.write(f"{ending.message}\n")
    return ending.status


def _checked_and_trained(config: PPOConfig) -> Ending:
    options = config.trainer
    check_versions(config.worker.rollout.name)
    check_loggers(options.logger)
    checkpoint_to_resume(
        options.checkpoint_folder, options.load_checkpoint_path, options.find_last_checkpoint
    )
    # Imported here so that a wrong config or version is reported before torch, Ray and vLLM load.
    if options.max_restarts:
        from verl.trainer.supervision import Supervisor  # noqa: PLC0415

        return Supervisor(config).run()
    from verl.trainer.attempt import attempt_to_train  # noqa: PLC0415

    return attempt_to_train(config)


if __name__ == "__main__":
    sys.exit(main())
