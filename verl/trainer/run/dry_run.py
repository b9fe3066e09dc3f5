# SPDX-License-Identifier: Apache-2.0
"""`--dry-run` of the commands that train: changed options, the plan of a step, its memory and its time."""

import dataclasses
import math
import sys
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from verl.config.parsing import yaml_text
from verl.config.text import config_yaml
from verl.distributed.backends import USUAL_GPU
from verl.distributed.gpus import list_gpus
from verl.planning.auto_switches import look_up_last, recorded_options
from verl.planning.device_defaults import chosen_for_device, device_defaults
from verl.planning.machine import GIB, Machine
from verl.planning.report import C, Describe, DryRun, dry_run_memory
from verl.planning.speed.cluster import Cluster, cluster_here, parse_cluster
from verl.planning.speed.report import time_text
from verl.planning.speed.step_time import Predictor
from verl.trainer.run.exit_status import BAD_INPUT

CHANGED = "# options that are not at their default; --print-config instead of --dry-run prints all\n"
MEMORY, ON, MEAN_PROMPT, MEAN_RESPONSE = "--device-memory-gb", "--on", "--mean-prompt", "--mean-response"
VALUE_SWITCHES = (MEMORY, ON, MEAN_PROMPT, MEAN_RESPONSE)
NUMBERS = {MEMORY: "a number of GiB", MEAN_PROMPT: "a number of tokens", MEAN_RESPONSE: "a number of tokens"}


@dataclass(frozen=True)
class PlanSwitches:
    """Cluster, memory and lengths that `--dry-run` plans for, instead of the usual ones."""

    memory_gb: float | None = None
    cluster: Cluster | None = None
    mean_prompt: float | None = None
    mean_response: float | None = None

    @property
    def machine(self) -> Machine | None:
        if self.cluster is None:
            return None
        machine = self.cluster.machine
        if self.memory_gb is None:
            return machine
        return dataclasses.replace(machine, device_bytes=int(self.memory_gb * GIB))

    @property
    def options(self) -> list[str]:
        """Arguments that the cluster implies."""
        return [] if self.cluster is None else self.cluster.options


def split_values(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of the switches that have one, and the other arguments."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    for switch in VALUE_SWITCHES:
        parser.add_argument(switch, dest=switch, nargs="?", const="")
    values, others = parser.parse_known_args(arguments)
    return vars(values), others


def read_switches(given: dict[str, str], others: Sequence[str]) -> PlanSwitches:
    """Read the values of the switches of `--dry-run`.

    Raises:
        ValueError: A value is not a number above zero, or names no cluster.
    """
    if given and "--dry-run" not in others:
        raise ValueError(f"`{next(iter(given))}` needs `--dry-run`: nothing else uses it")
    return PlanSwitches(
        _number(MEMORY, given),
        parse_cluster(given[ON]) if ON in given else None,
        _number(MEAN_PROMPT, given),
        _number(MEAN_RESPONSE, given),
    )


def dry_run(config: C, switches: PlanSwitches, describe: Describe[C], plan_text: Callable[[C], str]) -> int:
    """Print what a run would do, and return the exit status."""
    recorded = partial(recorded_options, config.trainer, look_up_last)
    run = dry_run_memory(config, describe, switches.memory_gb, switches.machine, recorded)
    defaults = device_defaults(type(config), config.trainer.device)
    sys.stdout.write(
        f"{CHANGED}{config_yaml(config, only_changed=True, defaults=defaults)}\n"
        f"{_chosen(config, describe)}{_on(switches)}plan of a training step\n{plan_text(run.config)}"
    )
    if run.problem is not None:
        sys.stderr.write(f"{run.problem}\n")
        return BAD_INPUT
    sys.stdout.write(f"\nmemory at its most\n{run.memory}{_time(run, switches)}")
    return 0


def _on(switches: PlanSwitches) -> str:
    if switches.cluster is None:
        return ""
    options = "".join(f"  {option}\n" for option in switches.options)
    return f"options of a run on {switches.cluster.name}\n{options}\n"


def _time(run: DryRun[C], switches: PlanSwitches) -> str:
    """The predicted step, where the devices and the sizes of the models are known."""
    cluster = switches.cluster or _cluster_here(run)
    if run.planner is None or cluster is None:
        return ""
    predict = Predictor(run.planner, cluster, switches.mean_prompt, switches.mean_response)
    return f"\npredicted time of a step\n{time_text(run.config, predict, run.choices)}"


def _cluster_here(run: DryRun[C]) -> Cluster | None:
    if run.planner is None or run.planner.machine.device != USUAL_GPU:
        return None
    trainer, gpus = run.config.trainer, list_gpus()
    return cluster_here(gpus[0].name, trainer.nnodes, trainer.n_gpus_per_node) if gpus else None


def _chosen(config: C, describe: Describe[C]) -> str:
    """The options of this run's models and processes whose default depends on the device, as lines."""
    used = [f"worker.{role}." for role in ("rollout", *describe(config).roles())]
    lines = [
        f"  {key}={yaml_text(value)}\n"
        for key, value in chosen_for_device(config).items()
        if not key.startswith("worker.") or key.startswith(tuple(used))
    ]
    return f"defaults that follow from the device\n{''.join(lines)}\n" if lines else ""


def _number(switch: str, given: dict[str, str]) -> float | None:
    if switch not in given:
        return None
    try:
        number = float(given[switch])
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"`{switch}={given[switch]}` must be {NUMBERS[switch]} above zero")
    return number
