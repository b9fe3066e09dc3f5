# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the commands: parse arguments, and turn errors into an exit status."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from verl.checkpoint.tracker import checkpoint_to_resume
from verl.config.files.fp8_files import fp8_problem
from verl.config.files.model_files import hub_problem, weights_problem
from verl.config.hints.arguments import dashless
from verl.config.hints.missing_paths import config_elsewhere
from verl.config.schema import ConfigError, config_notes
from verl.config.text import config_yaml, example_yaml, help_text, options_page
from verl.config.trainer import RunConfig, RunTree
from verl.distributed.gpus import list_gpus, shows_gpu
from verl.logger.base import LOGGERS
from verl.logger.console.start_up import shown_start_up
from verl.logger.tracker import check_loggers, end_process_if_hung
from verl.planning.device_defaults import device_defaults, load_run_config
from verl.planning.planned_run import PlannedRun
from verl.planning.report import Describe
from verl.trainer.run.dry_run import PlanSwitches, dry_run, read_switches, split_values
from verl.trainer.run.exit_status import (
    BAD_INPUT,
    FOR_THE_USER,
    INTERRUPTED,
    ExitStatus,
    exit_status_of,
    raised_by_us,
    told,
)
from verl.trainer.run.run_lock import locked_run_folder
from verl.trainer.run.supervisor import Supervisor
from verl.utils.cuda_builds import repair_cuda_builds
from verl.utils.imports import deferred
from verl.utils.standard_streams import outlive_readers
from verl.utils.typed_command import command_parser, typed_command, version_text
from verl.utils.version_check import check_versions, name_clash

SWITCHES = ("--dry-run", "--print-config", "--changed", "--print-options", "--version", "--help", "-h")

C = TypeVar("C", bound=RunTree)

# Whether the run joins a cluster, whose other machines may have more cores and GPUs. Imports Ray.
joins_cluster = deferred("verl.single_controller.ray.cluster", "has_cluster")


def usage(example: str, page: str | None = None) -> str:
    """The text that `--help` prints above the options of a command that trains."""
    markdown = "... as a Markdown page" + (f": {page}" if page else "")
    text = Path(__file__).with_name("usage.txt").read_text(encoding="utf-8")
    return text.format(command=typed_command(), example=example, markdown=markdown)


@dataclass(frozen=True)
class TrainingCommand(Generic[C]):
    """A command that trains: `python3 -m MODULE config=FILE.yaml section.option=value ... --switch`."""

    config_class: type[C]
    usage: str
    describe: Describe[C]  # what the memory of a run depends on
    plan_text: Callable[[C], str]  # for `--dry-run`
    # Looks at what the config names: raises what would end a run, and returns notes.
    look: Callable[[C], list[str]] = field(default=lambda config: [])

    def run(self, arguments: Sequence[str] | None) -> int:
        """Run the command with the given arguments or this process's, and return its exit status.

        It is 0; 2 for bad input, before anything was trained; 1 for an unsuitable machine or a failed run;
        128 + the signal that ended it: 130 after Ctrl-C, 143 after SIGTERM, 129 after its terminal closed.
        """
        outlive_readers()
        repair_cuda_builds()
        given, arguments = split_values(sys.argv[1:] if arguments is None else arguments)
        overrides = [argument for argument in arguments if not argument.startswith("-")]
        switches = [argument for argument in arguments if argument.startswith("-")]
        unknown = [name for name in switches if name not in SWITCHES]
        if unknown:
            hint = dashless(unknown[0], [*arguments, ""][arguments.index(unknown[0]) + 1])
            sys.stderr.write(f"`{unknown[0]}` is not a switch{hint}\n\n{self.usage}")
            return BAD_INPUT
        try:
            planned = read_switches(given, switches)
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
            return BAD_INPUT
        if "--version" in switches:
            sys.stdout.write(f"{version_text()}\n")
            return 0
        asks_help = "--help" in switches or "-h" in switches
        is_alone = not overrides and not asks_help
        if "--print-options" in switches or ("--print-config" in switches and is_alone):
            printed = options_page if "--print-options" in switches else example_yaml
            sys.stdout.write(printed(self.config_class))
            return 0
        try:
            if asks_help:
                sys.stdout.write(self._help(overrides))
                return 0
            config = load_with_notes(self.config_class, [*overrides, *planned.options])
        except ConfigError as error:
            return told(error)
        if "--print-config" in switches:
            defaults = device_defaults(type(config), config.trainer.device)
            sys.stdout.write(config_yaml(config, only_changed="--changed" in switches, defaults=defaults))
            return 0
        return self._plan(config, planned) if "--dry-run" in switches else self._train(config)

    def _help(self, topics: Sequence[str]) -> str:
        if topics:
            return "\n".join(help_text(self.config_class, topic) for topic in topics)
        return f"{self.usage}\n{help_text(self.config_class)}"

    def _plan(self, config: C, planned: PlanSwitches) -> int:
        try:
            notes, run = self.look(config), self.describe(config)
            if planned.cluster is None:
                check_weights(run)
            else:  # whose disks may have them
                notes += weights_problems(run)
        except FOR_THE_USER as error:
            return told(error)
        if planned.machine is None and (problem := core_problem(config.trainer, config.num_serving)):
            notes.append(problem)
        sys.stderr.write("".join(f"note: {note}\n" for note in notes))
        return dry_run(config, planned, self.describe, self.plan_text)

    def _train(self, config: C) -> int:
        try:
            check_versions(config.engine)
            with locked_run_folder(config.trainer):
                check_run(config.trainer, config.num_serving)
                self.look(config)  # its notes come when the data is opened
                check_weights(self.describe(config), loads=True)
                if config.trainer.max_restarts > 0:
                    end = Supervisor(config, train_once).run()
                else:
                    end = train_once(config)
        except FOR_THE_USER as error:
            if not raised_by_us(error):
                raise
            end = exit_status_of(error, config.trainer)
        except KeyboardInterrupt:
            end = ExitStatus(INTERRUPTED, "interrupted; nothing was trained")
        except SystemExit as stop:  # by a second signal
            end_process_if_hung(int(stop.code or 0))
            raise
        if end.message is not None:
            sys.stderr.write(f"{end.message}\n")
        end_process_if_hung(end.status)
        return end.status


def train_once(config: RunTree, wait_s: float | None = None) -> ExitStatus:
    """Train in this process, see `run_once`; also what the supervisor runs in its children."""
    with shown_start_up(config.trainer):
        # Imported here so that a wrong config or version is reported before torch, Ray and vLLM load.
        from verl.trainer.run.run_once import run_once  # noqa: PLC0415

        return run_once(config, wait_s)


def check_run(trainer: RunConfig, num_serving: int = 0) -> None:
    """Check devices, loggers and the checkpoint to resume from, before anything is loaded."""
    if trainer.device not in ("auto", "cpu") and not shows_gpu() and not joins_cluster():
        raise RuntimeError(
            f"`trainer.device` ({trainer.device}) needs a GPU, and this machine shows none: set"
            " `trainer.device=cpu`, or `auto` for any machine"
        )
    check_cores(trainer, num_serving)
    check_loggers(trainer.logger)
    for name in trainer.logger:
        LOGGERS[name].check()
    checkpoint_to_resume(trainer)


def check_weights(run: PlannedRun, *, loads: bool = False) -> None:
    """Raise if a model's folder has no weights of its config, or a hub name with `loads` cannot be loaded."""
    for problem in weights_problems(run, loads=loads):
        raise FileNotFoundError(problem)


def weights_problems(run: PlannedRun, *, loads: bool = False) -> Iterator[str]:
    for planned in run.models:
        path = planned.model.model_path or ""
        problem = weights_problem(path, planned.model.override_config) or fp8_problem(path)
        if problem is None and loads:
            problem = hub_problem(path)
        if problem is not None:
            yield f"`{planned.option}.model_path` {problem}"


def check_cores(trainer: RunConfig, num_serving: int = 0) -> None:
    """Raise if the run starts its own Ray and has more processes than this machine has cores."""
    problem = core_problem(trainer, num_serving)
    if problem is not None and not joins_cluster():
        raise RuntimeError(problem)


def core_problem(trainer: RunConfig, num_serving: int = 0) -> str | None:
    """Say that the run is on CPU and has more processes than this machine has cores."""
    is_on_cpu = trainer.device == "cpu" or (trainer.device == "auto" and not list_gpus())
    return trainer.core_problem(num_serving) if is_on_cpu else None


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Build a parser that takes the options of a config; `--help` prints the description unchanged."""
    parser = command_parser(name, description)
    parser.add_argument(
        "options", nargs="*", metavar="config=FILE.yaml section.option=value",
        help="the config of the run, as for the trainer's command",
    )  # fmt: skip
    return parser


def run_with_config(
    switches: argparse.Namespace, config_class: type[C], run: Callable[[argparse.Namespace, C], int]
) -> int:
    """Load the config from `switches.options` and run a command with it; see `run_told`."""
    return run_told(lambda: run(switches, load_with_notes(config_class, switches.options)))


def run_told(run: Callable[[], int]) -> int:
    """Run a command that trains nothing, with errors on stderr.

    The exit status is that of `run`; 2 for bad input; 1 for an unsuitable machine; 130 after Ctrl-C.
    """
    outlive_readers()
    repair_cuda_builds()
    try:
        return run()
    except FOR_THE_USER as error:
        return told(error)
    except KeyboardInterrupt:
        return INTERRUPTED


def load_with_notes(config_class: type[C], overrides: Sequence[str]) -> C:
    """Load a config, and print notes and a warning about another `verl` on stderr."""
    try:
        config = load_run_config(config_class, overrides)
    except ConfigError as error:
        raise ConfigError([*error.problems, *config_elsewhere(overrides, error.problems)]) from None
    for note in config_notes(config):
        sys.stderr.write(f"note: {note}\n")
    if (clash := name_clash()) is not None:
        sys.stderr.write(f"warning: {clash}\n")
    return config


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a type for a command-line switch: integers from `minimum` up."""

    def read(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {number}")
        return number

    read.__name__ = "integer"  # for argparse's "invalid integer value"
    return read
