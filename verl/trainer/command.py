# SPDX-License-Identifier: Apache-2.0
"""What the commands beside training share: how they read their arguments, and how they end."""

import argparse
import sys
from collections.abc import Callable, Sequence

from verl.trainer.config import PPOConfig
from verl.trainer.ending import BAD_INPUT, FOR_THE_USER, INTERRUPTED, ending_of, raised_by_us
from verl.utils.config import ConfigError, config_notes, load_config


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
    switches = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(PPOConfig, switches.options)
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
        ending = ending_of(error, config.trainer)
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
