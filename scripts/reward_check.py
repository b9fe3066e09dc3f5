# SPDX-License-Identifier: Apache-2.0
"""Call the reward function of a run in this process: `verl/cli/reward_check.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a clone without installing

from verl.cli.reward_check import main

if __name__ == "__main__":
    sys.exit(main())
