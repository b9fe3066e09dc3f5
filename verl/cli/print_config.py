# SPDX-License-Identifier: Apache-2.0
"""Print the config that a run would have, as YAML that loads to the same config.

    verl-print-config config=run.yaml worker.rollout.n=4 --changed

Errors are those of a run with this config. Exit status: 0; 2 for a config that cannot be used.
"""

import argparse
import sys
from collections.abc import Sequence

from verl.config.hints.renamed_keys import VERL_KEYS
from verl.config.ppo import PPOConfig
from verl.config.text import config_yaml
from verl.config.trainer import RunTree
from verl.planning.device_defaults import device_defaults
from verl.trainer.command import make_parser, run_with_config


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("verl-print-config", __doc__)
    parser.add_argument("--changed", action="store_true", help="only options that differ from their default")
    return run_with_config(parser.parse_intermixed_args(arguments), PPOConfig, _print, VERL_KEYS)


def _print(switches: argparse.Namespace, config: RunTree) -> int:
    defaults = device_defaults(type(config), config.trainer.device)
    sys.stdout.write(config_yaml(config, only_changed=switches.changed, defaults=defaults))
    return 0
