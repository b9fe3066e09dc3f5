# SPDX-License-Identifier: Apache-2.0
"""Score the responses of a model to held-out rows, with the templates, rewards and sampling of a run.

    verl-eval config=run.yaml --model checkpoints/math/first/global_step_100
    verl-eval config=run.yaml --model Qwen/Qwen2.5-1.5B-Instruct --samples 8 --k 1,8 --by level,subject
    verl-eval config=run.yaml --json worker.rollout.val_override_config.temperature=0.6 > scores.json

A model is a folder, a hub name or a checkpoint (`global_step_N`), which is merged into a temporary folder.
The means are those of the run's own validation of these weights if sampling is greedy; pass@k is the unbiased
estimate. The table is printed; `evaluation.json`, the log and the responses are written into a folder that
`verl-view` opens.

Exit status: 0; 2 for bad input; 1 for an unsuitable machine or a failed worker; 130 after Ctrl-C.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.api import EVALUATION_OPTIONS, evaluate_model, evaluation_options
from verl.config.ppo import PPOConfig
from verl.config.python_values import as_arguments
from verl.planning.device_defaults import load_run_config
from verl.trainer.command import at_least, load_with_notes, make_parser, run_told
from verl.trainer.evaluation.report import Question
from verl.utils.typed_command import command_path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = make_parser("verl-eval", __doc__)
    parser.add_argument(
        "--model", "--checkpoint", help="folder, hub name or global_step_N (default: the config's)"
    )
    parser.add_argument(
        "--samples", type=at_least(1), help="responses to each prompt (default: as the run's validation)"
    )
    parser.add_argument(
        "--k", type=numbers, default=[], metavar="K,K", help="of pass@k (default: 1, 2, 4 ... and samples)"
    )
    parser.add_argument(
        "--by", type=names, metavar="COLUMN,COLUMN",
        help="columns of the rows whose values are categories (default: `data.category_keys`)",
    )  # fmt: skip
    parser.add_argument(
        "--correct-key", metavar="NAME", help="value of the reward function that says what is correct"
        " (default: accuracy if it returns one, else overall)",
    )  # fmt: skip
    parser.add_argument(
        "--correct-at",
        type=float,
        default=1.0,
        metavar="X",
        help="least value of a correct response (default: 1)",
    )
    parser.add_argument(
        "--keep", type=at_least(0), default=256, help="prompts whose responses are written (default: 256)"
    )
    parser.add_argument("--out", type=Path, help="folder to write (default: evaluations/NAME of the model)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of the table")
    switches = parser.parse_intermixed_args(arguments)
    return run_told(lambda: _evaluate(switches))


def _evaluate(switches: argparse.Namespace) -> int:
    own = evaluation_options(switches.model, switches.samples, switches.by)

    def read(replaced: Mapping[str, Any]) -> PPOConfig:
        return load_run_config(PPOConfig, [*switches.options, *as_arguments(PPOConfig, own | {**replaced})])

    load_with_notes(PPOConfig, [*switches.options, *as_arguments(PPOConfig, own | EVALUATION_OPTIONS)])
    question = Question(switches.k, switches.correct_key, switches.correct_at, switches.keep)
    evaluation = evaluate_model(read, question, switches.out)
    text = json.dumps(evaluation.as_dict(), indent=2) + "\n" if switches.json else evaluation.table()
    sys.stdout.write(text)
    look = shlex.join([str(command_path("verl-view")), str(evaluation.folder)])
    sys.stderr.write(f"written to {evaluation.folder}; look at the responses with: {look}\n")
    return 0


def numbers(text: str) -> list[int]:
    """Read `1,2,8`."""
    return [at_least(1)(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """Read `duration,domain`."""
    return [part.strip() for part in text.split(",") if part.strip()]
