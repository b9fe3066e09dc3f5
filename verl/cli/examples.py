# SPDX-License-Identifier: Apache-2.0
"""Copy the examples: configs, prompt templates, reward functions, data converters, and scripts for clusters.

    verl-examples my_examples

They are those of the installed version, and run from where they are copied to.
"""

import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from verl.trainer.run.exit_status import BAD_INPUT
from verl.utils.typed_command import command_parser

PARTS = ("examples", "scripts")
CLONE = Path(__file__).resolve().parents[2]
INSTALLED = Path(sysconfig.get_path("data")) / "share" / "easy-verl"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "docs_site.py")


def main(arguments: Sequence[str] | None = None) -> int:
    """Copy those of this clone, or of the installation; return 2 if the folder is in use."""
    parser = command_parser("verl-examples", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new or an empty folder")
    folder = parser.parse_args(arguments).folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.stderr.write(f"{folder} is not empty: name a new folder\n")
        return BAD_INPUT
    source = CLONE if (CLONE / "pyproject.toml").is_file() else INSTALLED
    for part in PARTS:
        shutil.copytree(source / part, folder / part, ignore=LEFT_OUT, dirs_exist_ok=True)
    sys.stdout.write(
        f"written to {folder}\n"
        f"  every option with its help    {folder}/examples/config.yaml\n"
        f"  runs with published settings  bash {folder}/examples/qwen2_5_7b_math_grpo.sh --dry-run\n"
        f"  data sets                     python3 {folder}/scripts/convert_data.py --list\n"
    )
    return 0
