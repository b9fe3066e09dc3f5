# SPDX-License-Identifier: Apache-2.0
"""`--dry-run` of the commands that train: prints the config, the plan of a step and its memory."""

import math
import sys
from collections.abc import Callable, Sequence

from verl.config.parsing import yaml_text
from verl.config.text import config_yaml
from verl.planning.device_defaults import chosen_for_device
from verl.planning.report import C, Describe, dry_run_memory
from verl.trainer.run.exit_status import BAD_INPUT

MEMORY_SWITCH = "--device-memory-gb="


def dry_run(config: C, switches: Sequence[str], describe: Describe[C], plan_text: Callable[[C], str]) -> int:
    """Print what a run would do, and return the exit status."""
    try:
        memory_gb = _memory_gb(switches)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT
    resolved, memory = dry_run_memory(config, describe, memory_gb)
    sys.stdout.write(
        f"{config_yaml(config)}\n{_chosen(config, describe)}plan of a training step\n{plan_text(resolved)}\n"
        f"memory at its most\n{memory}"
    )
    return 0


def _chosen(config: C, describe: Describe[C]) -> str:
    """The options of this run's models and processes whose default depends on the device, as lines."""
    used = [f"worker.{role}." for role in ("rollout", *describe(config).roles())]
    lines = [
        f"  {key}={yaml_text(value)}\n"
        for key, value in chosen_for_device(config).items()
        if not key.startswith("worker.") or key.startswith(tuple(used))
    ]
    return f"defaults that follow from the device\n{''.join(lines)}\n" if lines else ""


def _memory_gb(switches: Sequence[str]) -> float | None:
    given = [switch.removeprefix(MEMORY_SWITCH) for switch in switches if switch.startswith(MEMORY_SWITCH)]
    if not given:
        return None
    try:
        memory_gb = float(given[-1])
    except ValueError:
        memory_gb = math.nan
    if not 0 < memory_gb < math.inf:
        raise ValueError(f"`{MEMORY_SWITCH}{given[-1]}` must be a number of GiB above zero")
    return memory_gb
