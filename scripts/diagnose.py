# SPDX-License-Identifier: Apache-2.0
"""Check this machine before a run: `verl/cli/doctor.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a clone without installing

from verl.cli.doctor import main

if __name__ == "__main__":
    sys.exit(main())
