# SPDX-License-Identifier: Apache-2.0
"""Convert a public data set to rows of this project: `verl/cli/convert_data/command.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a clone without installing

from verl.cli.convert_data.command import main

if __name__ == "__main__":
    sys.exit(main())
