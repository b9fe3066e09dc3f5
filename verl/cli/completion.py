# SPDX-License-Identifier: Apache-2.0
"""Print what completes options, their values and files in a shell.

echo 'source <(verl-completion)' >> ~/.bashrc
echo 'autoload -Uz bashcompinit && bashcompinit && source <(verl-completion)' >> ~/.zshrc
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from verl.config.ppo import PPOConfig
from verl.config.schema import OptionEntry, list_options
from verl.config.sft import SFTConfig
from verl.distributed.known_gpus import KNOWN_GPUS
from verl.trainer.command import SWITCHES
from verl.trainer.run.dry_run import ON, VALUE_SWITCHES
from verl.utils.typed_command import command_parser

COMMANDS = {  # and the config that they read
    "verl-train": PPOConfig,
    "verl-sft": SFTConfig,
    "verl-eval": PPOConfig,
    "verl-doctor": PPOConfig,
    "verl-data-check": PPOConfig,
    "verl-reward-check": PPOConfig,
    "verl-print-config": PPOConfig,
}
TRAINING = ("verl-train", "verl-sft")
SCRIPT = Path(__file__).with_suffix(".bash")


def main(arguments: Sequence[str] | None = None) -> int:
    command_parser("verl-completion", __doc__).parse_args(arguments)
    sys.stdout.write(completion_script())
    return 0


def completion_script() -> str:
    """Return the script: the options of each kind of config, and a function for each command."""
    parts = [SCRIPT.read_text(encoding="utf-8")]
    names = {config: f"_verl_{config.__name__.lower()}" for config in COMMANDS.values()}
    for config, name in names.items():
        options = list_options(config)
        keys = " ".join(["config", *(entry.key for entry in options)])
        cases = "".join(
            f"        {entry.key}) echo '{words}' ;;\n" for entry in options if (words := _words(entry))
        )
        clusters = " ".join(f"8x{gpu.name.replace(' ', '-')}" for gpu in KNOWN_GPUS)
        cases += f"        {ON}) echo '{clusters}' ;;\n"
        parts.append(f"{name}_options='{keys}'\n{name}_values() {{\n    case $1 in\n{cases}    esac\n}}\n")
    for command, config in COMMANDS.items():
        switches = " ".join((*SWITCHES, *VALUE_SWITCHES)) if command in TRAINING else ""  # those of its help
        function = f"_{command.replace('-', '_')}"
        call = f"_verl_complete \"${names[config]}_options\" '{switches}' {names[config]}_values"
        parts.append(f"{function}() {{ {call}; }}\ncomplete -F {function} {command}\n")
    return "".join(parts)


def _words(entry: OptionEntry) -> str:
    """Return the values that an option may have, if they are few."""
    if entry.hint is bool:
        return "true false"
    return " ".join(str(choice) for choice in entry.info.choices or ())
