# SPDX-License-Identifier: Apache-2.0
"""Export a checkpoint in Hugging Face format: `verl/cli/merge.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a clone without installing

from verl.cli.merge import main

if __name__ == "__main__":
    sys.exit(main())
