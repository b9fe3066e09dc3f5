# SPDX-License-Identifier: Apache-2.0
"""Print what completes options and their values in a shell; for the commands that read a config.

echo 'source <(verl-completion)' >> ~/.bashrc
echo 'autoload -Uz bashcompinit && bashcompinit && source <(verl-completion)' >> ~/.zshrc
"""

import sys
from collections.abc import Sequence

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
SCRIPT = """\
# Completes KEY=VALUE. bash gives `KEY`, `=` and `VALUE` as three words, zsh gives one.
_verl_complete() {
    local options=$1 switches=$2 values_of=$3 word=${COMP_WORDS[COMP_CWORD]} key= before=
    COMPREPLY=()
    if [[ $word == "=" ]]; then
        key=${COMP_WORDS[COMP_CWORD-1]} word=
    elif [[ $COMP_CWORD -gt 1 && ${COMP_WORDS[COMP_CWORD-1]} == "=" ]]; then
        key=${COMP_WORDS[COMP_CWORD-2]}
    elif [[ $word == *=* ]]; then
        key=${word%%=*} before=${word%%=*}= word=${word#*=}
    fi
    if [[ $key == config || $key == *_files || $key == *_path || $key == *format_prompt ]]; then
        COMPREPLY=($(compgen -P "$before" -f -- "$word"))
    elif [[ -n $key ]]; then
        COMPREPLY=($(compgen -P "$before" -W "$($values_of "$key")" -- "$word"))
    elif [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$switches" -- "$word"))
    else
        COMPREPLY=($(compgen -S = -W "$options" -- "$word"))
        compopt -o nospace 2>/dev/null
    fi
}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    command_parser("verl-completion", __doc__).parse_args(arguments)
    sys.stdout.write(completion_script())
    return 0


def completion_script() -> str:
    """Return the script: the options of each kind of config, and a function for each command."""
    parts = [SCRIPT]
    for config in dict.fromkeys(COMMANDS.values()):
        options = list_options(config)
        name = _name_of(config)
        keys = " ".join(["config", *(entry.key for entry in options)])
        cases = "".join(
            f"        {entry.key}) echo '{words}' ;;\n" for entry in options if (words := _words(entry))
        )
        clusters = " ".join(f"8x{gpu.name.replace(' ', '-')}" for gpu in KNOWN_GPUS)
        cases += f"        {ON}) echo '{clusters}' ;;\n"
        parts.append(f"{name}_options='{keys}'\n{name}_values() {{\n    case $1 in\n{cases}    esac\n}}\n")
    for command, config in COMMANDS.items():
        switches = " ".join((*SWITCHES, *VALUE_SWITCHES)) if command in TRAINING else "--help --version"
        function = f"_{command.replace('-', '_')}"
        name = _name_of(config)
        call = f"_verl_complete \"${name}_options\" '{switches}' {name}_values"
        parts.append(f"{function}() {{ {call}; }}\ncomplete -F {function} {command}\n")
    return "".join(parts)


def _name_of(config: type) -> str:
    return f"_verl_{config.__name__.lower()}"


def _words(entry: OptionEntry) -> str:
    """Return the values that an option may have, if they are few."""
    if entry.hint is bool:
        return "true false"
    return " ".join(str(choice) for choice in entry.info.choices or ())
