# SPDX-License-Identifier: Apache-2.0
"""Look at runs in a browser: `verl/viewer/process.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a clone without installing

from verl.viewer.process import main

if __name__ == "__main__":
    main()
