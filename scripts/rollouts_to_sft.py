# SPDX-License-Identifier: Apache-2.0
"""Turn the rollouts of a run into data for supervised fine-tuning: `verl/cli/rollouts_to_sft.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a clone without installing

from verl.cli.rollouts_to_sft import main

if __name__ == "__main__":
    sys.exit(main())
