# SPDX-License-Identifier: Apache-2.0
"""Write a small model with random weights: `verl/cli/tiny_model.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a clone without installing

from verl.cli.tiny_model import main

if __name__ == "__main__":
    sys.exit(main())
