# SPDX-License-Identifier: Apache-2.0
"""The command: `python3 -m verl.trainer.main config=examples/config.yaml section.option=value ...`."""

import dis
import sys
from collections.abc import Sequence

from verl.trainer.config import PPOConfig, TrainerConfig
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
FAILED = 1  # exit status: the machine does not do, or the run ended before its last step
BAD_INPUT = 2  # exit status: an option or a file is wrong; nothing was trained
INTERRUPTED = 130  # exit status, as shells have it

# What our own code raises for the user to read; `OSError` holds missing files, full disks and timeouts.
FOR_THE_USER = (ValueError, TypeError, OSError, RuntimeError, ImportError)


def main(arguments: Sequence[str]) -> int:
    """Run the command; what is wrong is told on stderr.

    Returns:
        The exit status: 0; 2 for bad input, before anything was trained; 1 for a machine that does not do or
        a run that failed; 128 + the signal that ended it: 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        Exception: An error of this package, which needs its traceback.
    """
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
    supervisor = None
    try:
        check_versions(config.worker.rollout.name)
        # Imported here so that a wrong config or version is reported before torch, Ray and vLLM load.
        from verl.trainer.supervision import Supervisor  # noqa: PLC0415
        from verl.utils.checkpoint.tracker import checkpoint_to_resume  # noqa: PLC0415
        from verl.utils.logger.tracker import check_loggers  # noqa: PLC0415

        options = config.trainer
        assert options.save_checkpoint_path is not None, "the config names it"
        check_loggers(options.logger)
        checkpoint_to_resume(
            options.save_checkpoint_path, options.load_checkpoint_path, options.find_last_checkpoint
        )
        supervisor = Supervisor(config)
        status = supervisor.run()
    except FOR_THE_USER as error:
        if not raised_by_us(error):
            raise
        if supervisor is not None and supervisor.step is not None:
            how = _how_to_go_on(config.trainer)
            sys.stderr.write(f"the run failed in step {supervisor.step}: {error}\n\n{how}\n")
            return FAILED
        sys.stderr.write(f"{error}\n")
        is_machine = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
        return FAILED if is_machine else BAD_INPUT
    except KeyboardInterrupt:
        is_running = supervisor is not None and supervisor.step is not None
        how = _how_to_go_on(config.trainer) if is_running else "nothing was trained"
        sys.stderr.write(f"interrupted; {how}\n")
        return INTERRUPTED
    if status:
        sys.stderr.write(f"stopped after step {supervisor.step}; {_how_to_go_on(config.trainer)}\n")
    return status


def raised_by_us(error: BaseException) -> bool:
    """Whether a `raise` statement of this package made the error: then its message says everything.

    What another package or the interpreter raises inside of ours is our mistake, and needs its traceback.
    """
    assert error.__traceback__ is not None, "it was caught"
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    is_raise = dis.opname[frame.f_code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    return is_raise and frame.f_globals["__name__"].split(".")[0] == "verl"


def _how_to_go_on(trainer: TrainerConfig) -> str:
    from verl.utils.checkpoint.tracker import read_record  # noqa: PLC0415 - it needs torch

    assert trainer.save_checkpoint_path is not None, "the config names it"
    record = read_record(trainer.save_checkpoint_path)
    if record is None or record.last_global_step is None:
        return "no checkpoint was saved: `trainer.save_freq` says how often one is"
    folder = f"{trainer.save_checkpoint_path}/global_step_{record.last_global_step}"
    if trainer.find_last_checkpoint and trainer.load_checkpoint_path is None:
        return f"the same command goes on from the last checkpoint, {folder}"
    return f"the last checkpoint is {folder}: go on from it with `trainer.load_checkpoint_path={folder}`"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
