# SPDX-License-Identifier: Apache-2.0
"""Show the data of a run as its model will see them, without Ray, GPU or weights.

    verl-data-check config=run.yaml --rows 5 --out outputs/data_check
    verl-data-check --sft config=sft.yaml                # for supervised fine-tuning

Opens the files with the run's own code and reports for each of them how many rows are used, too long or bad,
and why; the lengths of the prompts or conversations, and how many tokens of a conversation are learned; and
if a run would start. Some rows, spread from the first to the last, are shown whole: the rendered text, its
tokens, and its images and video frames on a contact sheet; in a conversation `+` marks learned lines. Their
media are decoded; for all other rows only the headers of files are read, unless `--decode` is given. With
`worker.rollout.multi_turn` the tools are listed, with a call and its answer in the chat template.

Exit status: 0; 2 if a run with this config would stop because of its data or its config.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, load_config
from verl.config.sft import SFTConfig
from verl.trainer.command import at_least, make_parser, run_with_config
from verl.trainer.first_look import look_at_conversations, look_at_prompts
from verl.trainer.run.exit_status import BAD_INPUT

OUT = Path("outputs", "data_check")
ADD_SFT = "these are options of supervised fine-tuning: add `--sft`\n"
DROP_SFT = "these are options of reinforcement learning: leave out `--sft`\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("verl-data-check", __doc__)
    parser.add_argument("--sft", action="store_true", help="the config is for supervised fine-tuning")
    parser.add_argument("--rows", type=at_least(0), default=3, help="rows of each kind to show (default: 3)")
    parser.add_argument(
        "--out", type=Path, default=OUT, help=f"folder of contact sheets and bad rows (default: {OUT})"
    )
    parser.add_argument("--decode", action="store_true", help="decode the media of every row")
    switches = parser.parse_intermixed_args(arguments)
    kind, other = (SFTConfig, PPOConfig) if switches.sft else (PPOConfig, SFTConfig)
    status = run_with_config(switches, kind, _check)
    if status == BAD_INPUT:
        with suppress(ConfigError):  # the options fit only one of the two
            load_config(other, switches.options)
            sys.stderr.write(DROP_SFT if switches.sft else ADD_SFT)
    return status


def _check(switches: argparse.Namespace, config: Any) -> int:
    look = look_at_conversations if switches.sft else look_at_prompts
    look(config.data, config.worker, checks_rows=False)  # the report counts bad rows
    # Imported here so that a wrong config, and wrong columns, are reported before torch loads.
    from verl.cli.data_report.report import CONVERSATIONS, PROMPTS, Kind, report_data  # noqa: PLC0415
    from verl.cli.data_report.tools import tool_lines  # noqa: PLC0415

    if not switches.sft and config.worker.rollout.multi_turn.enable:
        sys.stdout.write("\n  ".join(tool_lines(config.data, config.worker)) + "\n\n")

    kind: Kind[Any] = CONVERSATIONS if switches.sft else PROMPTS
    return report_data(config, kind, switches.rows, switches.out, decode=switches.decode)
