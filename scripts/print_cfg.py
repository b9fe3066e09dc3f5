# SPDX-License-Identifier: Apache-2.0
"""Print the config that a run would have: `verl-train --print-config`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a clone without installing

from verl.trainer.main import print_config as main

if __name__ == "__main__":
    sys.exit(main())
