# SPDX-License-Identifier: Apache-2.0
"""Show the data of a run as its model will see them: `verl/cli/data_check.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a clone without installing

from verl.cli.data_check import main

if __name__ == "__main__":
    sys.exit(main())
