# SPDX-License-Identifier: Apache-2.0
"""What commands share: how they read their arguments, and how they end."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from verl.checkpoint.tracker import checkpoint_to_resume
from verl.config.ppo import PPOConfig
from verl.config.renamed_keys import VERL_KEYS, RenamedKeys
from verl.config.schema import ConfigError, config_notes, load_config
from verl.config.text import example_yaml, help_text, options_page
from verl.config.trainer import RunConfig, RunTree
from verl.logger.tracker import check_loggers
from verl.trainer.run.exit_status import (
    BAD_INPUT,
    FOR_THE_USER,
    INTERRUPTED,
    ExitStatus,
    exit_status_of,
    raised_by_us,
)
from verl.trainer.run.run_lock import held_folder
from verl.trainer.run.supervisor import Attempt, Supervisor

SWITCHES = ("--dry-run", "--print-config", "--print-options", "--help", "-h")


C = TypeVar("C", bound=RunTree)


@dataclass(frozen=True)
class TrainingCommand(Generic[C]):
    """A command that trains: `python3 -m MODULE config=FILE.yaml section.option=value ... --switch`.

    Attributes:
        config_class: The top of its options.
        usage: What `--help` prints above them.
        plan: Prints what would be done; gets the config and all switches, returns the exit status.
        check: Finds what a run would stop over before anything is loaded.
        attempt: Trains; called as the supervisor calls it.
        moved: The keys of another program, which errors then name by what they are called here.
        switch: Begins a switch that this command has beside `SWITCHES`.
    """

    config_class: type[C]
    usage: str
    plan: Callable[[C, Sequence[str]], int]
    check: Callable[[C], None]
    attempt: Attempt[C]
    moved: RenamedKeys | None = None
    switch: str | None = None

    def run(self, arguments: Sequence[str] | None) -> int:
        """Run the command; what is wrong is told on stderr.

        Args:
            arguments: Of the command line; None takes those of this process.

        Returns:
            The exit status: 0; 2 for bad input, before anything was trained; 1 for a machine that does not do
            or a run that failed; 128 + the signal that ended it: 130 after Ctrl-C, 143 after SIGTERM.

        Raises:
            Exception: An error of this package, which needs its traceback.
        """
        arguments = sys.argv[1:] if arguments is None else arguments
        overrides = [argument for argument in arguments if not argument.startswith("-")]
        switches = [argument for argument in arguments if argument.startswith("-")]
        unknown = [switch for switch in switches if not self._has(switch)]
        if unknown:
            sys.stderr.write(f"`{unknown[0]}` is not a switch\n\n{self.usage}")
            return BAD_INPUT
        if "--print-config" in switches or "--print-options" in switches:
            printed = example_yaml if "--print-config" in switches else options_page
            sys.stdout.write(printed(self.config_class))
            return 0
        try:
            if "--help" in switches or "-h" in switches:
                sys.stdout.write(self._help(overrides))
                return 0
            config = load_config(self.config_class, overrides, self.moved)
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            return BAD_INPUT
        for note in config_notes(config):
            sys.stderr.write(f"note: {note}\n")
        return self.plan(config, switches) if "--dry-run" in switches else self._train(config)

    def _has(self, switch: str) -> bool:
        return switch in SWITCHES or (self.switch is not None and switch.startswith(self.switch))

    def _help(self, topics: Sequence[str]) -> str:
        if topics:
            return "\n".join(help_text(self.config_class, topic) for topic in topics)
        return f"{self.usage}\n{help_text(self.config_class)}"

    def _train(self, config: C) -> int:
        try:
            self.check(config)
            with held_folder(config.trainer):
                check_run(config.trainer)
                is_supervised = config.trainer.max_restarts > 0
                ending = (
                    Supervisor(config, self.attempt).run() if is_supervised else self.attempt(config, None)
                )
        except FOR_THE_USER as error:
            if not raised_by_us(error):
                raise
            ending = exit_status_of(error, config.trainer)
        except KeyboardInterrupt:
            ending = ExitStatus(INTERRUPTED, "interrupted; nothing was trained")
        if ending.message is not None:
            sys.stderr.write(f"{ending.message}\n")
        return ending.status


def check_run(trainer: RunConfig) -> None:
    """Find, before anything is loaded, a logger that is not installed and a checkpoint that is not whole.

    Raises:
        ImportError: A logger's package is missing.
        FileNotFoundError: A file of the checkpoint to go on from is missing.
        ValueError: It is damaged.
    """
    check_loggers(trainer.logger)
    checkpoint_to_resume(
        trainer.checkpoint_folder, trainer.load_checkpoint_path, trainer.find_last_checkpoint
    )


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser that takes options of the config beside the command's own switches.

    Args:
        name: Of the command.
        description: The docstring of its module, which `--help` shows as it is.
    """
    parser = argparse.ArgumentParser(
        prog=name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "options", nargs="*", metavar="config=FILE.yaml section.option=value",
        help="the config of the run, as the trainer's command takes it",
    )  # fmt: skip
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    run: Callable[[argparse.Namespace, PPOConfig], int],
) -> int:
    """Load the config and run a command with it; what is wrong is told on stderr.

    Args:
        parser: From `make_parser`, with the command's own switches.
        arguments: Of the command line; None takes those of this process.
        run: Gets the switches and the config; returns the exit status.

    Returns:
        The exit status: what `run` returned; 2 for bad input; 1 for a machine that does not do; 130 after
        Ctrl-C.

    Raises:
        SystemExit: An unknown switch, with status 2, or `--help`.
        Exception: An error of this package, which needs its traceback.
    """
    return run_with_config(parser.parse_intermixed_args(arguments), PPOConfig, run, VERL_KEYS)


def run_with_config(
    switches: argparse.Namespace,
    config_class: type[C],
    run: Callable[[argparse.Namespace, C], int],
    moved: RenamedKeys | None = None,
) -> int:
    """Load the config and run a command with it; see `run_command`.

    Args:
        switches: Of the command, among them `options`, the config's.
        config_class: The top of the options.
        run: Gets the switches and the config; returns the exit status.
        moved: The keys of another program, which errors then name by what they are called here.
    """
    try:
        config = load_config(config_class, switches.options, moved)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT
    for note in config_notes(config):
        sys.stderr.write(f"note: {note}\n")
    try:
        return run(switches, config)
    except FOR_THE_USER as error:
        if not raised_by_us(error):
            raise
        ending = exit_status_of(error, config.trainer)
        sys.stderr.write(f"{ending.message}\n")
        return ending.status
    except KeyboardInterrupt:
        return INTERRUPTED


def at_least(minimum: int) -> Callable[[str], int]:
    """A type for a switch of the command line: integers from `minimum` on."""

    def read(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {number}")
        return number

    read.__name__ = "integer"  # argparse says: invalid integer value
    return read
